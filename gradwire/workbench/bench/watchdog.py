"""A watchdog for steps that never end: it reports the stuck activity and every thread's stack."""

import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Watchdog:
    """A thread that calls `give_up` once an activity has made no progress for `seconds`.

    Needed for GPU kernels: a collective that waits has a timeout, a kernel that never ends has
    none. `give_up` gets a text that names the activity.
    """

    def __init__(self, seconds: float, give_up: Callable[[str], object]) -> None:
        self.seconds = seconds
        self._give_up = give_up
        self._activity, self._last_progress = "", float("inf")
        threading.Thread(target=self._watch, name="gradwire-watchdog", daemon=True).start()

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Expect `note_progress` at least every `seconds` inside this context."""
        self._activity = activity
        self._last_progress = time.monotonic()
        try:
            yield
        finally:
            self._last_progress = float("inf")

    def note_progress(self) -> None:
        """Start the wait anew; without effect outside of `during`."""
        if self._last_progress < float("inf"):
            self._last_progress = time.monotonic()

    def _watch(self) -> None:
        while time.monotonic() - self._last_progress < self.seconds:
            time.sleep(self.seconds / 100)
        faulthandler.dump_traceback()
        self._give_up(f"{self._activity} did not end in {self.seconds:g} s")
