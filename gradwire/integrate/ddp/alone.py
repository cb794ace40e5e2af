"""DDP models that average nothing: a trainer wraps its model, and local steps exchange weights."""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import AttachError
from gradwire.integrate.refuse import unwrap_ddp
from gradwire.torch_internals import has_hook

if TYPE_CHECKING:
    from gradwire.integrate.local_steps import LocalSteps


def leave_alone(model: nn.Module) -> nn.Module:
    """Stop a DDP model from averaging gradients and buffers; return the model inside.

    From now on each rank trains on its own.
    """
    ddp = unwrap_ddp(model)
    if _is_alone(ddp):
        return ddp.module
    if has_hook(ddp):
        raise AttachError(
            "this model has a communication hook already: use local steps or attach, not both"
        )
    ddp.register_comm_hook(None, _keep_gradient)
    # Otherwise DDP sends rank 0's buffers to all ranks before every forward pass.
    ddp.require_forward_param_sync = False
    return ddp.module


def _is_alone(ddp: DistributedDataParallel) -> bool:
    return not ddp.require_forward_param_sync and has_hook(ddp)


def _keep_gradient(_: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Return a bucket as it is, in place of its mean over ranks."""
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


@torch.no_grad()
def end_alone(local: "LocalSteps") -> None:
    """Exchange what the last round has done, and leave the shared weights in the model."""
    if local.inner_steps % local.every:
        local.exchange()
    for name, weight in local.weights.items():
        weight.copy_(local.reference[name])
