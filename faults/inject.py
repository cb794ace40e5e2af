"""Moments at which a rank can be killed or put to sleep, and the means to do it.

The moments are the two ends of every stage, and the writes of a checkpoint. gradwire itself has no
hooks for this: a rank of the harness replaces a few functions in its own process.
"""

import io
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradwire import stages

MOMENTS = (*stages.STAGES, "optimizer", "write", "replace")
"""Each stage; before the optimizer's step; half a file written; before a file takes its name."""


@dataclass(frozen=True)
class Strike:
    """A blow to `rank` at the `nth` time that `moment` comes: death, or sleep for `seconds`."""

    rank: int
    moment: str
    nth: int
    seconds: float = 0.0


class Injector:
    """Counter of the moments of this process, which strikes at the chosen one."""

    def __init__(self, strike: Strike | None) -> None:
        self.strike = strike
        self.seen: Counter[str] = Counter()

    def passes(self, moment: str, before: Callable[[], None] = lambda: None) -> None:
        """Count a moment, and strike at the chosen one; a rank that dies runs `before` first."""
        self.seen[moment] += 1
        if self.strike is None or (moment, self.seen[moment]) != (
            self.strike.moment,
            self.strike.nth,
        ):
            return
        if self.strike.seconds:
            time.sleep(self.strike.seconds)
        else:
            before()
            os.kill(os.getpid(), signal.SIGKILL)


def install(rank: int, strike: Strike | None) -> Injector:
    """Replace the functions of this process, which is `rank`, and return its injector."""
    injector = Injector(strike if strike is not None and strike.rank == rank else None)
    enter, leave = stages.stage.__enter__, stages.stage.__exit__
    step, save, replace = torch.optim.SGD.step, torch.save, os.replace

    def entering(self: stages.stage) -> None:
        injector.passes(self._name)
        enter(self)

    def leaving(self: stages.stage, *what: Any) -> None:
        leave(self, *what)
        injector.passes(self._name)

    def stepping(self: torch.optim.SGD, *args: Any) -> Any:
        injector.passes("optimizer")
        return step(self, *args)

    def saving(content: Any, file: Any, *args: Any, **more: Any) -> None:
        injector.passes("write", lambda: _half(save, content, file))
        save(content, file, *args, **more)

    def replacing(*names: Any) -> None:
        injector.passes("replace")
        replace(*names)

    stages.stage.__enter__, stages.stage.__exit__ = entering, leaving
    torch.optim.SGD.step, torch.save, os.replace = stepping, saving, replacing
    return injector


def _half(save: Callable[..., None], content: Any, file: Any) -> None:
    whole = io.BytesIO()
    save(content, whole)
    half = whole.getvalue()[: whole.tell() // 2]
    if isinstance(file, Path):
        file.write_bytes(half)
    else:
        file.write(half)
        file.flush()
