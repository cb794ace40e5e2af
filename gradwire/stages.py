"""Where the time goes: the path's stages as timers and as profiler ranges."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd import profiler

STAGES = ("accumulate", "compress", "encode", "exchange", "decode")

FIRST, EVERY = 8, 8
"""On CUDA the first steps are timed, then one of so many: an event takes the host as long as a
small launch, and a bundle has twelve."""

Mark = float | torch.cuda.Event
"""When a stage began or ended: host seconds, or an event on the device."""


class Clock:
    """Seconds per stage. On CUDA the stages are timed by events that are only read when asked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._open: list[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._spare: list[torch.cuda.Event] = []
        self._streams: dict[int, torch.cuda.Stream] = {}
        self.bundle = -1
        """Whose stages are timed now."""
        self.log: list[tuple[str, int, Mark, Mark]] | None = None
        """Where set: every stage with its bundle, begin and end."""
        self.every = EVERY if device.type == "cuda" else 1
        self.weight = 1
        """How many steps this one stands for; 0 where it is not timed."""
        self.counted = 0
        """Steps that those which were timed stand for."""

    def begin(self, step: int) -> None:
        """Another step."""
        self.weight = 1
        if self.log is None and step >= FIRST:
            self.weight = 0 if step % self.every else self.every
        self.counted += self.weight

    def mark(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream())
        return event

    def _stream(self) -> torch.cuda.Stream:
        """The current one. torch.cuda.current_stream takes four times as long as the record."""
        number = torch._C._cuda_getCurrentRawStream(self.device.index or 0)
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = torch.cuda.current_stream(self.device)
        return stream

    def add(self, name: str, begin: Mark) -> None:
        """The stage that began at `begin` ends now."""
        end = self.mark()
        if self.log is not None:
            self.log.append((name, self.bundle, begin, end))
        if isinstance(begin, float) and isinstance(end, float):
            self._seconds[name] += self.weight * (end - begin)
        elif isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            self._open.append((name, self.weight, begin, end))
        if len(self._open) > 512:
            self._collect()

    def seconds(self) -> dict[str, float]:
        """Seconds per stage so far; waits for the device."""
        if self._open:
            self._open[-1][3].synchronize()
        self._collect()
        return dict(self._seconds)

    def _collect(self) -> None:
        """Add up what the device has finished, without waiting for the rest."""
        while self._open and self._open[0][3].query():
            name, weight, begin, end = self._open.pop(0)
            self._seconds[name] += weight * begin.elapsed_time(end) / 1e3
            if self.log is None:
                self._spare += begin, end


_clock: ContextVar[Clock | None] = ContextVar("gradwire_clock", default=None)


@contextmanager
def timed_by(clock: Clock, bundle: int) -> Iterator[None]:
    """Within this context, `stage` reports to `clock` what `bundle` takes."""
    clock.bundle = bundle
    token = _clock.set(clock if clock.weight else None)
    try:
        yield
    finally:
        _clock.reset(token)


class stage:
    """One stage of the path: time on the current clock, and a range where a profiler looks."""

    # Not a generator, and no range that nobody sees: that took half of the host time of a bundle.
    __slots__ = ("_begin", "_clock", "_name", "_range")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._range = None
        if getattr(profiler, "_is_profiler_enabled", True):
            self._range = profiler.record_function(f"gradwire::{self._name}")
            self._range.__enter__()
        self._clock = _clock.get()
        if self._clock is not None:
            self._begin = self._clock.mark()

    def __exit__(self, kind: Any, *what: Any) -> None:
        if self._clock is not None and kind is None:
            self._clock.add(self._name, self._begin)
        if self._range is not None:
            self._range.__exit__(kind, *what)
