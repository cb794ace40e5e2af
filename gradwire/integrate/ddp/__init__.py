"""attach: put gradwire on a DistributedDataParallel or a sharded model; and a hook for DDP alone.

DDP takes one communication hook for good. The hook stays on the model after `detach`, and the next
`attach` uses it again. The module state `_attachments` keeps the hook's Attachment by model.
"""

import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.config import Config, configure
from gradwire.errors import AttachError, one_line
from gradwire.integrate.adam import note_adam, refuse_for_recipe, warn_of_adam
from gradwire.integrate.attached import Attached, Attachment
from gradwire.integrate.ddp.engine import Engine
from gradwire.integrate.refuse import (
    is_sharded,
    refuse_optimizer,
    refuse_shrinking_join,
    refuse_unsupported,
    refuse_watched_join,
    unwrap_ddp,
)
from gradwire.integrate.versions import note_torch
from gradwire.state.state import State
from gradwire.torch_internals import has_hook, missing, reduced_parameters

if TYPE_CHECKING:
    from gradwire.plan.auto import Auto


class Wire(Attached):
    """The handle that `attach` returns for DDP."""

    engine: Engine

    def __init__(self, ddp: DistributedDataParallel, config: Config | None, **fields: Any) -> None:
        super().__init__(config, model=ddp.module, process_group=ddp.process_group, **fields)
        self.ddp = weakref.ref(ddp)


class _Attachment(Attachment[Wire]):
    """The Attachment of DDP."""

    @cached_property
    def average(self) -> Callable[[dist.GradBucket], Future[Tensor]]:
        """The average of a bucket when the wire has left; loaded when it is needed."""
        from gradwire.integrate.ddp.released import DenseAverage

        return DenseAverage(self.process_group)


_attachments: "weakref.WeakKeyDictionary[DistributedDataParallel, _Attachment]"
_attachments = weakref.WeakKeyDictionary()
"""By model: the Attachment that is registered with DDP."""


def attach(
    model: nn.Module,
    config: Config | None = None,
    *,
    replicate_group: Any = None,
    scaler: Any = None,
    optimizer: Optimizer | None = None,
    **fields: Any,
) -> Attached:
    """Compress the gradient exchange of a DistributedDataParallel or a sharded model.

        ddp = DistributedDataParallel(model)
        wire = gradwire.attach(ddp, method="topk", density=0.001)

        fully_shard(model, mesh=mesh["shard"])
        wire = gradwire.attach(model, replicate_group=mesh["replicate"].get_group(), density=0.001)

    With FSDP2 the all-reduce over replicas is compressed. attach sends the first replica's
    parameters to the others.

    This is a collective call. The ranks compare their configurations and parameters, and any
    difference raises an error on every rank.

    replicate_group: the ranks that hold the same shard, for FSDP2.
    scaler: the GradScaler, if one is used.
    optimizer: this model's optimiser. attach then refuses a recipe that does not suit it, and warns
    of sparse methods before Adam. A scaler that serves several optimisers needs it too, because
    the scale alone does not tell which of them skipped a step.
    fields: fields of Config. `recipe` stands for several fields (`gradwire methods`).

    The residuals take 4 bytes per parameter (8 for bf16 and fp16), momentum correction 4 more.
    With `momentum`, and with recipe="plain-union", the optimiser must have no momentum, because
    momentum would act twice. Only the recipe is checked, and only if the optimiser is given.

    method="auto" sends dense for a few steps, and measures these steps and the link. Then it takes
    the method that `gradwire.plan` recommends, which may be dense. `wire.reason` and the log name
    the reason. `density` or `min_density` (0.01), `exchange`, `values`, `indices` and `bundle_mb`
    bound the choice.
    """
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise AttachError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    seen = [] if optimizer is None else [optimizer]
    if optimizer is not None:
        refuse_optimizer(optimizer, scaler)
        refuse_for_recipe(fields, seen)
    # Without a scaler no step is skipped, and the optimiser need not be watched.
    fields |= {"scaler": scaler, "optimizer": optimizer if scaler is not None else None}
    wire = _attach(model, config, replicate_group, fields)
    if seen:
        warn_of_adam(wire, seen)
    else:
        note_adam(wire)
    return wire


def _attach(
    model: nn.Module, config: Config | None, replicate_group: Any, fields: dict[str, Any]
) -> Attached:
    """Attach a wire to a model of any kind; see `attach`."""
    if replicate_group is not None or is_sharded(model):
        # torch takes seconds to import FSDP2, so only sharded models import it.
        try:
            from gradwire.integrate.fsdp import attach_sharded
        except ImportError as error:
            raise missing(f"FSDP2 ({one_line(error)})") from error
        return attach_sharded(model, config, replicate_group, fields)
    return _attach_ddp(model, config, fields)


def _attach_ddp(model: nn.Module, config: Config | None, fields: dict[str, Any]) -> Wire:
    """Attach a wire to a DistributedDataParallel model; see `attach`."""
    module = unwrap_ddp(model)
    note_torch(stacklevel=5)
    refuse_unsupported(module)
    attachment = _attachments.get(module)
    if attachment is None and has_hook(module):
        raise AttachError("this model has a communication hook already, and DDP takes only one")
    if attachment is not None:
        attachment.refuse_attached()
    auto, fields = _split_auto(fields)
    wire = Wire(module, config, **fields)
    wire.auto = auto
    wire.engine = Engine(wire, watch_unused=module.find_unused_parameters or module.static_graph)
    # The last layer's parameters first, because their gradients are ready first.
    wire.engine.open(list(reversed(reduced_parameters(module))))
    if attachment is None:
        attachment = _Attachment(module.process_group)
        module.register_comm_hook(attachment, _attached_hook)
        _attachments[module] = attachment
    attachment.wire = wire
    return wire


def check_fields(config: Config | None, fields: Mapping[str, Any]) -> None:
    """Raise the errors that `attach` would raise for these fields, before there is a model."""
    configure(config, _split_auto(fields)[1])


def _split_auto(fields: Mapping[str, Any]) -> "tuple[Auto | None, dict[str, Any]]":
    """Return the bounds of method="auto" and the fields to begin with; (None, fields) without."""
    if fields.get("method") != "auto":
        return None, dict(fields)
    # The planner is loaded only where it is asked.
    from gradwire.plan.auto import split_bounds

    return split_bounds(fields)


def _attached_hook(attachment: _Attachment, bucket: dist.GradBucket) -> Future[Tensor]:
    """Pass a bucket to the wire that is attached; without a wire, average the bucket densely."""
    wire = attachment.wire
    if wire is not None and bucket.index() == 0:
        refuse_shrinking_join(wire.ddp())
        if wire.watch is not None:
            refuse_watched_join(wire.ddp())
        attachment.release_flushed()
    if attachment.wire is None:
        return attachment.average(bucket)
    return attachment.wire.engine.hook(bucket)


def ddp_hook(state: State, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket: `ddp.register_comm_hook(gradwire.State(density=0.01), gradwire.ddp_hook)`.

    This is PyTorch's convention, for trainers that take a state and a hook. The ranks compare their
    settings in the first backward pass.

    DDP throws away the delivery to a parameter that no rank used, and a hook cannot ask DDP which
    parameters these are. From the second step on a parameter without a gradient is therefore an
    error, although find_unused_parameters allows it. `attach` keeps the residual of such a
    parameter instead.
    """
    engine = state.engine
    if not isinstance(engine, Engine):
        engine = state.engine = Engine(state, refuse_unused=True)
    return engine.hook(bucket)
