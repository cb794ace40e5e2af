"""Attached: the base of the handles that `attach` returns, and how a handle leaves its model.

After `detach` the next step flushes: it sends every residual whole. A parameter that no rank uses
in that step keeps its residual, so the flush is repeated a few times. Then the wire is released.
"""

import logging
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch import Tensor

from gradwire.config import Config
from gradwire.errors import AttachError, ExchangeError
from gradwire.ranks.group import uncounted
from gradwire.state.state import State

_S = TypeVar("_S", bound=State)
_W = TypeVar("_W", bound="Attached")

log = logging.getLogger("gradwire")

_TRIES = 10
"""The flushes that are repeated, after `detach`, for residuals of parameters that no step used."""


def live_state(owner: "weakref.ref[_S]") -> _S:
    """Return the State behind a weak reference, or raise ExchangeError if it is gone.

    A State owns its engine, and the engine refers to the State weakly. Without a cycle of
    references a wire and its thread end with the model, and not at the next garbage collection.
    """
    state = owner()
    if state is None:
        raise ExchangeError("the wire is gone: keep what gradwire.attach returned")
    return state


def closed_error() -> ExchangeError:
    """Return the error for a step after `close`."""
    return ExchangeError(
        "the wire was closed: to go on with plain all-reduce call wire.detach() instead"
    )


class Attached(State):
    """A State that sits on a model, and can be detached from the model."""

    def __init__(self, config: Config | None, **fields: Any) -> None:
        super().__init__(config, **fields)
        self.detaching = False
        """True after `detach`: the model is released when a flush is complete."""
        self._tries = 0

    def detach(self) -> None:
        """Send all residuals with the next step, and go on with a plain dense all-reduce.

        Call it on every rank. Afterwards the model can be attached again. Momentum correction ends
        with the wire: from then on the optimiser needs its own momentum. The residual of a
        parameter that the step does not use waits for a step that does, for ten steps at most.
        """
        self.flush()
        self.detaching = True

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over a checked state; if this wire is to leave, what it brings is sent first."""
        super().restore(saved)
        if self.detaching and not self.stopped:
            self.detach()

    def finish_flush(self) -> bool:
        """Return True if the last step has sent all residuals; else let the next step flush again.

        A flush is repeated if the optimiser skipped the step or if parameters were unused. All
        ranks see the same unused parameters, so all ranks decide alike.
        """
        if self._flush:
            return False
        taken = self._flushing and not bool(self.was_skipped())
        withheld = self._has_withheld(taken)
        if not taken or (withheld and self._tries < _TRIES):
            self._tries += withheld
            self.flush()
            return False
        if withheld:
            self._warn_dropped()
        return True

    def release(self) -> None:
        """Complete the detach: stop the engine and give the communicators back.

        This is a collective call. Later calls such as `save` use the model's own process group.
        """
        self.stop()
        with uncounted(self.group):
            self.group.agree("detach", step=self.steps)
        self.leave()

    def _has_withheld(self, taken: bool) -> bool:
        """Return True if residuals remain after the last step.

        taken: True if that step was a flush, and the optimiser took it.
        """
        return any(bundle.withheld for bundle in self.bundles)

    def _withheld(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the residual of each parameter that the last step left out."""
        for bundle in self.bundles:
            names = {slot.offset: slot.name for slot in bundle.slots if slot.numel}
            for offset, residual in bundle.withheld:
                if residual.numel():
                    yield names[offset], residual

    def _warn_dropped(self) -> None:
        dropped = [name for name, residual in self._withheld() if bool(residual.any())]
        if dropped:
            warnings.warn(
                f"detach: no rank has used {', '.join(dropped[:3])} in {_TRIES + 1} steps; what "
                f"was kept for it is dropped",
                stacklevel=2,
            )


class Attachment(Generic[_W]):
    """The object between a model's hooks, which stay for good, and the wire, which may leave.

    process_group: the ranks that average densely after the wire has left.
    """

    def __init__(self, process_group: dist.ProcessGroup, wire: _W | None = None) -> None:
        self.process_group = process_group
        self.wire = wire

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts of a copy, which has no wire.

        A copied model has a new reducer without hooks, but still lists this object. None in place
        of the process group is the default group, which is also the copied model's.
        """
        if self.wire is not None:
            log.info("the copy of a model has no wire: the residual stays with the original")
        return type(self), (None,)

    def refuse_attached(self) -> None:
        """Raise AttachError if a wire is attached."""
        if self.wire is not None:
            raise AttachError(
                "this model is attached already: call wire.detach() and take a step first"
            )

    def release_flushed(self) -> None:
        """Let the wire go if it is detaching and its flush is complete. Called as a step begins."""
        if self.wire is not None and self.wire.detaching and self.wire.finish_flush():
            self.wire.release()
            self.wire = None
