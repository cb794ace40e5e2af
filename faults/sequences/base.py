"""The base of a player: messages to the ranks, checks of every answer, and new wires."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from faults.sequences.answer import Answer, Look, Vector
from faults.sequences.check import (
    NESTEROV,
    Finding,
    OuterStep,
    check_equal,
    check_unchanged,
    describe,
)
from faults.sequences.plan import DDP, Operation, Plan
from faults.sequences.ranks import Hang, Ranks
from faults.sequences.trainer import files_of

LONG, SHORT = 30.0, 4.0
"""Timeout of a wire in seconds; and where a rank is to be waited for in vain."""
ODD_RATE = 0.125
"""A learning rate that no plan gives to all ranks."""
OK, REFUSED, ANY = "ok", "refused", "any"
"""What an operation must do: succeed, raise on every rank, or either of them."""


@dataclass(frozen=True)
class Checkpoint:
    """What a folder must give back: each rank as it was, and the state of the sequence."""

    looks: Sequence[Look]
    optimizer: bytes
    flush: bool
    taken: bool
    rate: float
    dtype: str
    velocity: Vector
    whole: bool
    """True: every rank had a wire in use, so that its residual is known."""


class Base:
    """The state of one sequence as it must be, beside the ranks as they are.

    Every class behind it adds operations: a method `on_...` each.
    """

    def __init__(self, plan: Plan, ranks: Ranks, folder: Path) -> None:
        self.plan, self.ranks, self.folder = plan, ranks, folder
        self.setup = plan.setup
        self.world = plan.setup.world
        self.counts: Counter[str] = Counter()
        self.local = bool(self.setup.local)
        self.gradients = not self.local
        torn = [op for op in plan.operations if op.name == "exception"]
        waits = self.setup.is_real and any(
            op.args["where"] == "backward" and op.args["rank"] is not None for op in torn
        )
        self.timeout = SHORT if waits and not self.local else LONG
        self.checkpoint: Checkpoint | None = None
        self.default = "float32"
        self.saves = 0

    def play(self) -> None:
        """Run all operations; raise Finding at the first promise that is not kept."""
        self._build()
        for number, operation in enumerate(self.plan.operations):
            self.number, self.operation = number, operation
            try:
                self._play_one(operation)
            except (Finding, Hang) as finding:
                words = f"operation {number}, {operation}: {finding}"
                raise Finding(words) from finding
        self._each("close", limit=20.0)

    def _play_one(self, operation: Operation) -> None:
        act: Callable[..., None] = getattr(self, "on_" + re.sub(r"\W", "_", operation.name))
        act(**operation.args)
        self.counts[operation.name] += 1

    # --- messages and checks ----------------------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """True: the wire has left its model, which goes on alone."""
        return self.looks[0].stopped

    @property
    def broken(self) -> bool:
        return any(look.broken for look in self.looks)

    def _send(
        self, messages: Mapping[int, tuple[str, dict[str, Any]]], limit: float = 60.0
    ) -> list[Answer]:
        answers = self.ranks.call(messages, limit)
        if any(answer is None for answer in answers.values()):
            raise Finding(f"a rank died: {describe([answers[r] for r in sorted(answers)])}")
        known = [answers[rank] for rank in sorted(answers)]
        return [answer for answer in known if answer is not None]

    def _each(
        self,
        name: str,
        args: Callable[[int], dict[str, Any]] = lambda rank: {},
        limit: float = 60.0,
    ) -> list[Answer]:
        return self._send({r: (name, args(r)) for r in range(self.world)}, limit)

    def _run(
        self,
        name: str,
        args: Callable[[int], dict[str, Any]] = lambda rank: {},
        expect: str = OK,
        quiet: bool = False,
    ) -> list[Answer] | None:
        """Run one operation on all ranks; return the answers, None if it was refused.

        quiet: it changes neither parameters nor residuals.
        """
        was_broken, before, files = self.broken, self.looks, files_of(self.folder)
        answers = self._each(name, args)
        self.before, self.looks = before, self._looks_of(answers)
        failed = [rank for rank, answer in enumerate(answers) if answer.kind]
        if not failed:
            if expect == REFUSED and not was_broken:
                raise Finding("no rank refused it")
            if quiet:
                self._check_unchanged(before)
            self._check_equal()
            return answers
        if len(failed) < len(answers):
            raise Finding(f"only some ranks have an error: {describe(answers)}")
        if expect == OK and not was_broken:
            raise Finding(f"it was refused: {describe(answers)}")
        if not all(answer.clear for answer in answers):
            raise Finding(f"the error is not clear: {describe(answers)}")
        self._check_unchanged(_moved(before, answers), residual=not self.broken)
        if files_of(self.folder) != files:
            raise Finding("a refusal changed the checkpoint folder")
        return None

    def _looks_of(self, answers: Sequence[Answer]) -> list[Look]:
        looks = [answer.look for answer in answers]
        if any(look is None for look in looks):
            raise Finding(f"no wire: {describe(answers)}")
        return [look for look in looks if look is not None]

    def _check_equal(self) -> None:
        check_equal(self.looks, shares=self.local)

    def _check_unchanged(self, before: Sequence[Look], residual: bool = True) -> None:
        for rank, (one, other) in enumerate(zip(before, self.looks, strict=True)):
            check_unchanged(one, other, rank, residual)

    # --- the wire comes and goes ------------------------------------------------------------------

    def _build(self) -> None:
        """Make models and wires anew."""
        answers = self.ranks.build(self.setup, self.world, self.timeout)
        known = [answers[rank] for rank in range(self.world)]
        if any(answer is None or answer.kind for answer in known):
            raise Finding(f"no wire was made: {describe(known)}")
        self.looks = [a.look for a in known if a is not None and a.look is not None]
        self._begin()
        if self.default != "float32":
            self._each("default_dtype", lambda rank: {"dtype": self.default})
        self._check_equal()

    def _begin(self) -> None:
        """Note that the wires are new."""
        self.fresh, self.flush, self.taken, self.rate = True, False, False, 0.0
        self.passes = 0
        """The steps of these models; in the second forward pass DDP has collectives of its own."""
        self.largest = 0.0
        """The largest entry of the last update."""
        self.inside, self.late_flush, self.detaching = False, False, False
        """inside: micro-batches wait in the residual; a flush is of the step after."""
        self.uncertain = False
        """True: DDP itself may not follow what was changed last."""
        self.format = "contiguous_format"
        momentum = NESTEROV if self.setup.local.get("outer") == "nesterov" else 0.0
        self.outer = OuterStep(momentum, np.zeros_like(self.looks[0].parameters, np.float64))

    def _recover(self, restart: bool = False) -> None:
        """Go on from the last checkpoint, or from the beginning, with new wires."""
        if restart:
            self.ranks.restart(self.world)
        else:
            self._each("close")
        self._build()
        if self.checkpoint is not None:
            self.on_load()

    def _probe(self) -> None:
        """Take a step with a wire that is broken: it is refused again, and nobody waits."""
        if self.setup.kind == DDP and self.broken:
            self._run("step", lambda rank: {"data": 0}, REFUSED)

    # --- operations that others need --------------------------------------------------------------

    def on_step(self, data: int, without: Sequence[int] = (), **more: Any) -> None:
        """Take a step that must succeed."""
        raise NotImplementedError

    def on_save(self) -> None:
        """Save, and remember what the checkpoint must give back."""
        raise NotImplementedError

    def on_load(self) -> None:
        """Continue from the checkpoint."""
        raise NotImplementedError


def _moved(looks: Sequence[Look], answers: Sequence[Answer]) -> list[Look]:
    """Return looks with the weights that local steps had before they exchanged."""
    moved = []
    for look, answer in zip(looks, answers, strict=True):
        parameters, optimizer = answer.more.get("own", (look.parameters, look.optimizer))
        moved.append(replace(look, parameters=parameters, optimizer=optimizer))
    return moved
