"""Steps that do not end: who was stuck, and in what."""

import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Patience:
    """Calls `give_up` with a word on what was going on, once nothing was heard for `seconds`.

    A collective that waits has a limit of its own; a kernel that never ends has none.
    """

    def __init__(self, seconds: float, give_up: Callable[[str], object]) -> None:
        self.seconds = seconds
        self._give_up = give_up
        self._what, self._heard = "", float("inf")
        threading.Thread(target=self._look, name="gradwire-patience", daemon=True).start()

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """While in this context, `heard` has to be called now and then."""
        self._what = what
        self._heard = time.monotonic()
        try:
            yield
        finally:
            self._heard = float("inf")

    def heard(self) -> None:
        if self._heard < float("inf"):
            self._heard = time.monotonic()

    def _look(self) -> None:
        while time.monotonic() - self._heard < self.seconds:
            time.sleep(self.seconds / 100)
        faulthandler.dump_traceback()
        self._give_up(f"{self._what} did not end in {self.seconds:g} s")
