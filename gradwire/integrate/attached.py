"""What the handles that `attach` returns have in common."""

from typing import Any

from gradwire.config import Config
from gradwire.state import State


class Attached(State):
    """A State that sits on a model, and can let go of it."""

    def __init__(self, config: Config | None, **fields: Any) -> None:
        super().__init__(config, **fields)
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
