"""Stages of the path, as timers and as profiler ranges."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd import profiler

from gradwire.torch_internals import is_profiled, raw_stream

STAGES = ("accumulate", "compress", "encode", "exchange", "decode")

_FIRST, _EVERY = 8, 8
"""The first 8 steps on CUDA are timed, then every 8th step.

Recording an event takes the host as long as a small launch, and a bundle has twelve events.
"""

Mark = float | torch.cuda.Event
"""The time at which a stage began or ended: host seconds, or an event on the device."""


class Clock:
    """Seconds per stage. On CUDA events time the stages, and `seconds` reads them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._open: list[tuple[str, int, torch.cuda.Event, torch.cuda.Event]] = []
        self._spare: list[torch.cuda.Event] = []
        self._streams: dict[int, torch.cuda.Stream] = {}
        self.bundle = -1
        """The bundle whose stages are timed now."""
        self.log: list[tuple[str, int, Mark, Mark]] | None = None
        """Every stage with its bundle, begin and end; None if no log is wanted."""
        self.every = _EVERY if device.type == "cuda" else 1
        """One of this number of steps is timed, after the first steps."""
        self.weight = 1
        """The number of steps that this timed step represents; 0 for a step that is not timed."""
        self.counted = 0
        """The sum of the weights of all timed steps."""

    def begin_step(self, step: int) -> None:
        """Note that another step begins, and give it a weight."""
        self.weight = 1
        if self.log is None and step >= _FIRST:
            self.weight = 0 if step % self.every else self.every
        self.counted += self.weight

    def mark(self) -> Mark:
        """Return the current time of the device."""
        if self.device.type != "cuda":
            return time.perf_counter()
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream())
        return event

    def _stream(self) -> torch.cuda.Stream:
        """Return the current stream; torch.cuda.current_stream takes 4 times as long as a mark."""
        number = raw_stream(self.device.index or 0)
        stream = self._streams.get(number)
        if stream is None:
            stream = self._streams[number] = torch.cuda.current_stream(self.device)
        return stream

    def end_stage(self, name: str, begin: Mark) -> None:
        """End the stage that began at `begin`."""
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
        """Return the seconds per stage so far; wait for the device."""
        if self._open:
            self._open[-1][3].synchronize()
        self._collect()
        return dict(self._seconds)

    def _collect(self) -> None:
        """Add up the stages that the device has finished, without waiting for the others."""
        while self._open and self._open[0][3].query():
            name, weight, begin, end = self._open.pop(0)
            self._seconds[name] += weight * begin.elapsed_time(end) / 1e3
            if self.log is None:
                self._spare += begin, end


_clock: ContextVar[Clock | None] = ContextVar("gradwire_clock", default=None)


@contextmanager
def timed_by(clock: Clock, bundle: int) -> Iterator[None]:
    """Within this context, report the time of each `stage` of `bundle` to `clock`."""
    clock.bundle = bundle
    token = _clock.set(clock if clock.weight else None)
    try:
        yield
    finally:
        _clock.reset(token)


class stage:
    """Stage of the path: time on the current clock, and a range if a profiler is on."""

    # A class instead of a generator, and a range only under a profiler: a generator with a range
    # took half of the host time of a bundle.
    __slots__ = ("_begin", "_clock", "_name", "_range")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._range = None
        if is_profiled():
            self._range = profiler.record_function(f"gradwire::{self._name}")
            self._range.__enter__()
        self._clock = _clock.get()
        if self._clock is not None:
            self._begin = self._clock.mark()

    def __exit__(self, kind: Any, *details: Any) -> None:
        if self._clock is not None and kind is None:
            self._clock.end_stage(self._name, self._begin)
        if self._range is not None:
            self._range.__exit__(kind, *details)
