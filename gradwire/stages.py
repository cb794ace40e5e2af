"""Where the time goes: the path's stages as timers and as profiler ranges."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

STAGES = ("accumulate", "compress", "encode", "exchange", "decode")


class Clock:
    """Seconds per stage. On CUDA the stages are timed by events that are only read when asked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        if self.device.type != "cuda":
            started = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - started
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._open.append((name, begin, end))
        if len(self._open) > 512:
            self._collect()

    def seconds(self) -> dict[str, float]:
        """Seconds per stage so far; waits for the device."""
        if self._open:
            self._open[-1][2].synchronize()
        self._collect()
        return dict(self._seconds)

    def _collect(self) -> None:
        """Add up what the device has finished, without waiting for the rest."""
        while self._open and self._open[0][2].query():
            name, begin, end = self._open.pop(0)
            self._seconds[name] += begin.elapsed_time(end) / 1e3


_clock: ContextVar[Clock | None] = ContextVar("gradwire_clock", default=None)


@contextmanager
def timed_by(clock: Clock) -> Iterator[None]:
    """Within this context, `stage` reports to `clock`."""
    token = _clock.set(clock)
    try:
        yield
    finally:
        _clock.reset(token)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """One stage of the path: a profiler range, and time on the current clock."""
    clock = _clock.get()
    with torch.profiler.record_function(f"gradwire::{name}"):
        if clock is None:
            yield
        else:
            with clock.time(name):
                yield
