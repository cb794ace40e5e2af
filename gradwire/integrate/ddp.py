"""One line on DistributedDataParallel."""

import weakref
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradwire.config import Config
from gradwire.errors import AttachError
from gradwire.integrate.engine import Engine
from gradwire.integrate.refuse import (
    refuse_shrinking_join,
    refuse_unsupported,
    refuse_watched_join,
    unwrap,
)
from gradwire.plan.auto import split_bounds
from gradwire.state import State

_ports: "weakref.WeakKeyDictionary[DistributedDataParallel, Port]" = weakref.WeakKeyDictionary()


class Port:
    """What is registered with DDP, for good: it passes buckets to the wire that is attached."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.wire: Wire | None = None


class Wire(State):
    """The handle that `attach` returns: a State that knows its model, and can let go of it."""

    def __init__(self, ddp: DistributedDataParallel, config: Config | None, **fields: Any) -> None:
        super().__init__(config, model=ddp.module, process_group=ddp.process_group, **fields)
        self.ddp = weakref.ref(ddp)
        self.detaching = False

    def detach(self) -> None:
        """The next step sends everything that is kept; later ones are plain dense all-reduce.

        Call it on every rank. Afterwards the model can be attached again. Momentum correction ends
        with the wire: from then on the optimiser needs its own momentum.
        """
        self.flush()
        self.detaching = True

    def flushed(self) -> bool:
        """Whether the step that flushes was taken; one that was skipped is asked for again."""
        if self._flush:
            return False
        if bool(self.was_skipped()):
            self.flush()
            return False
        return True


def attach(
    ddp: nn.Module, config: Config | None = None, *, scaler: Any = None, **fields: Any
) -> Wire:
    """Compress the gradient exchange of a DistributedDataParallel model.

        ddp = DistributedDataParallel(model)
        wire = gradwire.attach(ddp, method="topk", density=0.001)

    A collective call: every rank's configuration and parameters are compared, and a difference is
    an error on all of them. `scaler` is the GradScaler, if there is one. The fields are Config's.
    The residuals take 4 bytes a parameter (8 for bf16 and fp16 ones), momentum correction 4 more.
    With `momentum` the optimiser must have none of its own, which attach does not see: momentum
    would act twice.

    method="auto" sends dense for a few steps, measures them and the link, and goes on with what
    `gradwire.plan` recommends, which may be dense; `wire.reason` and the log say why. `density`, or
    `min_density` (0.01), `exchange`, `values`, `indices` and `bundle_mb` bound the choice.
    """
    module = unwrap(ddp)
    refuse_unsupported(module)
    port = _ports.get(module)
    if port is None and getattr(module, "_comm_hooks", None):
        raise AttachError("this model has a communication hook already, and DDP takes only one")
    if port is not None and port.wire is not None:
        raise AttachError(
            "this model is attached already: call wire.detach() and take a step first"
        )
    auto = None
    if fields.get("method") == "auto":
        auto, fields = split_bounds(fields)
    wire = Wire(module, config, scaler=scaler, **fields)
    wire.auto = auto
    wire.engine = Engine(wire, watch_unused=module.find_unused_parameters or module.static_graph)
    wire.engine.open(_parameters(module))
    if port is None:
        port = Port(module.process_group)
        module.register_comm_hook(port, _port_hook)
        _ports[module] = port
    port.wire = wire
    return wire


def _port_hook(port: Port, bucket: dist.GradBucket) -> Future[Tensor]:
    wire = port.wire
    if wire is not None and bucket.index() == 0:
        refuse_shrinking_join(wire.ddp())
        if wire.watch is not None:
            refuse_watched_join(wire.ddp())
        if wire.detaching and wire.flushed():
            wire.close()
            port.wire = wire = None
    if wire is None or wire.engine is None:
        return allreduce_hook(port.process_group, bucket)
    return wire.engine.hook(bucket)


def ddp_hook(state: State, bucket: dist.GradBucket) -> Future[Tensor]:
    """The hook for `ddp.register_comm_hook(gradwire.State(density=0.01), gradwire.ddp_hook)`.

    PyTorch's own convention, for trainers that take a state and a hook. The state meets the other
    ranks in the first backward pass.
    """
    if state.engine is None:
        state.engine = Engine(state, watch_unused=False)
    return state.engine.hook(bucket)


def _parameters(module: DistributedDataParallel) -> list[nn.Parameter]:
    """Those that DDP reduces, the last layer's first: the order in which gradients are expected.

    Only DDP knows which it was told to ignore: its own list is asked for, private as it is.
    """
    parameters, _ = module._build_params_for_reducer()
    return list(reversed(parameters))
