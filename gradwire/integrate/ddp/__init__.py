"""One line on DistributedDataParallel."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire.config import Config, configure
from gradwire.errors import AttachError
from gradwire.integrate.adam import warn_of_adam
from gradwire.integrate.attached import Attached
from gradwire.integrate.ddp.engine import Engine
from gradwire.integrate.refuse import (
    is_sharded,
    refuse_optimizer,
    refuse_shrinking_join,
    refuse_unsupported,
    refuse_watched_join,
    unwrap,
)
from gradwire.integrate.versions import note_torch
from gradwire.state.state import State
from gradwire.torch_internals import has_hook, reduced_parameters

_ports: "weakref.WeakKeyDictionary[DistributedDataParallel, Port]" = weakref.WeakKeyDictionary()


class Port:
    """What is registered with DDP, for good: it passes buckets to the wire that is attached."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.wire: Wire | None = None


class Wire(Attached):
    """The handle that `attach` returns for DDP."""

    engine: Engine

    def __init__(self, ddp: DistributedDataParallel, config: Config | None, **fields: Any) -> None:
        super().__init__(config, model=ddp.module, process_group=ddp.process_group, **fields)
        self.ddp = weakref.ref(ddp)


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

    With FSDP2 it is the all-reduce over replicas that is compressed, and attach sends the first
    replica's parameters to the others.

    A collective call: every rank's configuration and parameters are compared, and a difference is
    an error on all of them. `scaler` is the GradScaler, if there is one. Where it serves several
    optimisers, give this model's as `optimizer`: the scale alone does not tell which of them was
    passed over. The fields are Config's; `recipe` stands for several (`gradwire methods`).
    The residuals take 4 bytes a parameter (8 for bf16 and fp16 ones), momentum correction 4 more.
    With `momentum`, and with recipe="plain-union", the optimiser must have none of its own, which
    attach does not see: momentum would act twice.

    method="auto" sends dense for a few steps, measures them and the link, and goes on with what
    `gradwire.plan` recommends, which may be dense; `wire.reason` and the log say why. `density`, or
    `min_density` (0.01), `exchange`, `values`, `indices` and `bundle_mb` bound the choice.
    """
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise AttachError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    if optimizer is not None:
        refuse_optimizer(optimizer, scaler)
    if replicate_group is not None or is_sharded(model):
        from gradwire.integrate.fsdp import attach_sharded

        fields |= {"scaler": scaler, "optimizer": optimizer}
        return attach_sharded(model, config, replicate_group, fields)
    module = unwrap(model)
    note_torch()
    refuse_unsupported(module)
    port = _ports.get(module)
    if port is None and has_hook(module):
        raise AttachError("this model has a communication hook already, and DDP takes only one")
    if port is not None and port.wire is not None:
        raise AttachError(
            "this model is attached already: call wire.detach() and take a step first"
        )
    auto = None
    if fields.get("method") == "auto":
        # The planner is loaded only where it is asked.
        from gradwire.plan.auto import split_bounds

        auto, fields = split_bounds(fields)
    wire = Wire(module, config, scaler=scaler, optimizer=optimizer, **fields)
    wire.auto = auto
    wire.engine = Engine(wire, watch_unused=module.find_unused_parameters or module.static_graph)
    wire.engine.open(_parameters(module))
    if port is None:
        port = Port(module.process_group)
        module.register_comm_hook(port, _port_hook)
        _ports[module] = port
    port.wire = wire
    if optimizer is not None:
        warn_of_adam(wire, [optimizer])
    return wire


def check_fields(config: Config | None, fields: Mapping[str, Any]) -> None:
    """Raises for what `attach` would refuse of these, before there is a model."""
    if fields.get("method") == "auto":
        from gradwire.plan.auto import split_bounds

        fields = split_bounds(fields)[1]
    configure(config, fields)


def _port_hook(port: Port, bucket: dist.GradBucket) -> Future[Tensor]:
    wire = port.wire
    if wire is not None and bucket.index() == 0:
        refuse_shrinking_join(wire.ddp())
        if wire.watch is not None:
            refuse_watched_join(wire.ddp())
        if wire.detaching and wire.flushed():
            wire.let_go()
            port.wire = wire = None
    if wire is None:
        return allreduce_hook(port.process_group, bucket)
    return wire.engine.hook(bucket)


def ddp_hook(state: State, bucket: dist.GradBucket) -> Future[Tensor]:
    """The hook for `ddp.register_comm_hook(gradwire.State(density=0.01), gradwire.ddp_hook)`.

    PyTorch's own convention, for trainers that take a state and a hook. The state meets the other
    ranks in the first backward pass. DDP throws away what is delivered to a parameter that no rank
    used, and of a hook it cannot be asked which those are: from the second step on a parameter
    without a gradient, as find_unused_parameters allows, is an error. `attach` keeps it.
    """
    engine = state.engine
    if not isinstance(engine, Engine):
        engine = state.engine = Engine(state, refuse_unused=True)
    return engine.hook(bucket)


def _parameters(module: DistributedDataParallel) -> list[nn.Parameter]:
    """Return those that DDP reduces, the last layer's first, as gradients are expected."""
    return list(reversed(reduced_parameters(module)))
