"""What the handles that `attach` returns have in common."""

import warnings
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import Tensor

from gradwire.config import Config
from gradwire.errors import ExchangeError
from gradwire.ranks.group import uncounted
from gradwire.state.state import State

S = TypeVar("S", bound=State)

TRIES = 10
"""Steps in which a parameter that is kept something for may be used again, after `detach`."""


def alive(owner: "weakref.ref[S]") -> S:
    """Return the State behind a weak reference, or raise ExchangeError if it is gone.

    An engine and its parts are owned by their State. They refer to it weakly, so that a wire goes
    with its model, and its thread with it, without waiting for the garbage collector.
    """
    state = owner()
    if state is None:
        raise ExchangeError("the wire is gone: keep what gradwire.attach returned")
    return state


class Attached(State):
    """A State that sits on a model, and can let go of it."""

    def __init__(self, config: Config | None, **fields: Any) -> None:
        super().__init__(config, **fields)
        self.detaching = False
        self._tries = 0

    def detach(self) -> None:
        """The next step sends everything that is kept; later ones are plain dense all-reduce.

        Call it on every rank. Afterwards the model can be attached again. Momentum correction ends
        with the wire: from then on the optimiser needs its own momentum. What is kept for
        parameters that the step does not use waits for one that does, for ten steps at most.
        """
        self.flush()
        self.detaching = True

    def flushed(self) -> bool:
        """Whether the step that flushes was taken; one that was skipped is asked for again.

        So is one that did not use all parameters. All ranks see the same unused ones.
        """
        if self._flush:
            return False
        taken = self._flushing and not bool(self.was_skipped())
        waiting = self._waits(taken)
        if not taken or (waiting and self._tries < TRIES):
            self._tries += waiting
            self.flush()
            return False
        if waiting:
            self._say_dropped()
        return True

    def let_go(self) -> None:
        """Detach is complete, on every rank: the communicators are given back. A collective call.

        What is asked later, as by `save`, goes over the model's own.
        """
        self.stop()
        with uncounted(self.group):
            self.group.agree("detach", step=self.steps)
        self.leave()

    def _waits(self, taken: bool) -> bool:
        """Whether the last step, if it was `taken`, has left something that is kept."""
        return any(bundle.withheld for bundle in self.bundles)

    def _left(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters that the last step left out, and what is kept for each."""
        for bundle in self.bundles:
            names = {slot.offset: slot.name for slot in bundle.slots if slot.numel}
            yield from ((names[offset], kept) for offset, kept in bundle.withheld if kept.numel())

    def _say_dropped(self) -> None:
        dropped = [name for name, kept in self._left() if bool(kept.any())]
        if dropped:
            warnings.warn(
                f"detach: no rank has used {', '.join(dropped[:3])} in {TRIES + 1} steps; what was "
                f"kept for it is dropped",
                stacklevel=2,
            )
