"""The operations that are steps, each checked against the law."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from faults.sequences.answer import Answer
from faults.sequences.base import ANY, OK, Base
from faults.sequences.check import (
    ROUNDED,
    TOLERANCE,
    Finding,
    check_equal,
    check_law,
    check_unchanged,
    rows_of,
)
from faults.sequences.plan import DDP


class Steps(Base):
    """Steps with gradients, and rounds of local steps."""

    def on_step(self, data: int, without: Sequence[int] = (), **more: Any) -> None:
        """Take a step that must succeed."""
        args: dict[str, Any] = {"data": data, **more}
        if without and not self.local:
            args["without"] = tuple(without)
        self._step(lambda rank: args)

    def _step(self, args: Callable[[int], dict[str, Any]], expect: str = OK) -> bool:
        """Take a step, and check it; return False if it was refused and all began anew."""
        if expect == OK and self.uncertain:
            expect = ANY
        was_stopped = self.stopped
        answers = self._run("step", args, expect)
        if answers is None:
            self._recover()
            return False
        if self.local:
            self._check_round(answers)
        else:
            self._check_step(answers, was_stopped, args(0))
        return True

    def _check_step(
        self, answers: Sequence[Answer], was_stopped: bool, args: dict[str, Any]
    ) -> None:
        first = answers[0]
        assert first.out is not None
        for rank, answer in enumerate(answers):
            assert answer.out is not None
            if answer.taken != first.taken:
                raise Finding(f"rank 0 takes the step: {first.taken}, rank {rank} does not agree")
            if answer.taken and answer.out.tobytes() != first.out.tobytes():
                raise Finding(f"the updates of ranks 0 and {rank} differ")
            if answer.more.get("moved", answer.taken) != answer.taken:
                raise Finding(f"rank {rank}: the GradScaler takes {not answer.taken}")
        if self.stopped and not first.taken:
            # Without a wire a step that is not taken is lost, as without gradwire.
            self._end_step(first.taken)
            return
        out = [answer.out if first.taken else None for answer in answers]
        came = [answer.came for answer in answers]
        old, new = ([look.residual for look in looks] for looks in (self.before, self.looks))
        rounds = self.stopped and self.setup.dtype != "float32"
        if rounds and not was_stopped:
            # The wire has left in this step, and nothing can deliver what bf16 has rounded off.
            if max(np.abs(part).max() for part in old if part is not None) > 2**-8 * self.largest:
                raise Finding("the wire has left with more than what the last update rounded off")
            old = [None] * self.world
        self.largest = float(np.abs(first.out).max())
        summands = [rows_of(rows, first.out) for rows in (came, out, old, new)]
        check_law(*summands, tolerance=ROUNDED * self.world**2 if rounds else TOLERANCE)
        partial = bool(args.get("without")) or self.setup.dtype != "float32"
        if self.flush and first.taken and not partial and not was_stopped:
            self._check_flushed(args)
        self._end_step(first.taken)

    def _end_step(self, taken: bool) -> None:
        self.fresh, self.taken, self.flush = False, taken, self.late_flush
        self.inside, self.late_flush = False, False
        self.passes += 1

    def _check_flushed(self, args: dict[str, Any]) -> None:
        if args.get("dtype", "float32") != "float32":
            return
        for rank, look in enumerate(self.looks):
            if look.residual is not None and np.abs(look.residual).max() > 0:
                raise Finding(f"after a flush rank {rank} keeps {np.abs(look.residual).max():.3g}")

    def _check_round(self, answers: Sequence[Answer]) -> None:
        """Check the law for differences of weights, if this step has exchanged them."""
        came = [answer.came for answer in answers]
        before, after = self.before[0], self.looks[0]
        assert before.shared is not None
        assert after.shared is not None
        if all(part is None for part in came):
            for rank, (one, other) in enumerate(zip(self.before, self.looks, strict=True)):
                same = replace(one, parameters=other.parameters, optimizer=other.optimizer)
                check_unchanged(same, other, rank)
            return
        taken = all(answer.taken for answer in answers)
        update = np.zeros_like(self.outer.velocity)
        if taken:
            update = self.outer.update_of(before.shared, after.shared)
        elif before.shared.tobytes() != after.shared.tobytes():
            raise Finding("a round with a weight that is not finite moved the shared weights")
        old, new = ([look.residual for look in looks] for looks in (self.before, self.looks))
        rows = [rows_of(part, update) for part in (came, [update] * self.world, old, new)]
        check_law(*rows, size=float(np.abs(before.shared).max()))
        if self.flush and taken:
            self._check_flushed({})
        if not self.setup.local["keep_unsent"]:
            check_equal([replace(look, optimizer="") for look in self.looks], shares=False)
        self._end_step(taken)

    def on_exchange(self, data: int) -> None:
        """Take an inner step, and exchange before it is time."""
        self._step(lambda rank: {"data": data, "exchanges": True})

    def on_poison(self, data: int, rank: int) -> None:
        """Take a step in which one rank is not finite: nobody takes it."""
        spoiled = rank % self.world
        more = {"exchanges": True} if self.local else {}
        self._step(lambda rank: {"data": data, "poisoned": rank == spoiled, **more})
        if self.taken and not self.stopped and not self.fresh:
            raise Finding("a step that is not finite was taken")

    def on_scaler(self, data: int, new_scale: float) -> None:
        """Take a step, and set the scale by hand."""
        more = {"new_scale": new_scale} if self.setup.scaler else {}
        self._step(lambda rank: {"data": data, **more})

    def on_no_sync(self, data: int, how: str) -> None:
        """Pass a micro-batch before the last."""
        if self.uncertain:
            # DDP's buckets are looked at when they are exchanged.
            self.on_step(data)
            return
        quiet = self.setup.kind == DDP or how == "sync"
        answers = self._run("no_sync", lambda rank: {"data": data, "how": how}, quiet=quiet)
        assert answers is not None
        if answers[0].came is not None:
            like = answers[0].came
            old, new = ([look.residual for look in looks] for looks in (self.before, self.looks))
            came = [answer.came for answer in answers]
            check_law(*(rows_of(rows, like) for rows in (came, [None] * self.world, old, new)))
            self.fresh, self.inside = False, True

    def _settle(self, data: int) -> None:
        """Take the steps that ranks can only take together: DDP's second, and those of a detach."""
        tries = 4
        while (self.setup.kind == DDP and self.passes < 2) or (
            self.detaching and not self.stopped and tries
        ):
            self.on_step(data)
            tries -= 1
