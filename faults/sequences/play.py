"""A player of one sequence: it knows which operations are legal by now, and checks each outcome."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from faults.sequences.answer import Answer, Look
from faults.sequences.base import ANY, ODD_RATE, REFUSED
from faults.sequences.check import (
    Finding,
)
from faults.sequences.checkpoints import Checkpoints
from faults.sequences.ranks import RealRanks


class Player(Checkpoints):
    """All operations, also those in which one rank acts alone or dies."""

    def on_one_sided(self, call: str, rank: int, data: int) -> None:
        """Make a call on one rank only: the next step is refused on every rank."""
        self._settle(data)
        if self.inside and call in ("flush", "detach"):
            # In the middle of a step they are of the step after.
            self.on_step(data)
        if self.stopped or self.world == 1:
            self.on_step(data)
            return
        if (call == "skip_step" and not self.taken) or (call == "detach" and self.flush):
            call = "follow_lr"
        rank %= self.world
        same = call == "flush" and self.flush
        args = {"call": call, "data": data, "rate": ODD_RATE} | self._path()
        answers = self._run(
            "one_sided", lambda r: args | {"mine": r == rank}, ANY if same else REFUSED
        )
        if answers is None:
            # DDP has a collective of its own for parameters without a use.
            if not self.setup.unused:
                self._probe()
            self._recover(restart=self.setup.unused)
        elif self.local:
            self._check_round(answers)
        else:
            self._check_step(answers, False, {})

    def on_kill(self, rank: int, moment: str, data: int) -> None:
        """Kill one rank: the others name it, and resume from the last checkpoint, or the new."""
        assert isinstance(self.ranks, RealRanks)
        rank %= self.world
        saving = moment in ("write", "replace")
        nth = 1 + random.Random(data).randrange(2)
        args = {"moment": moment, "nth": nth, "data": data} | self._path()
        messages = {r: ("kill", args | {"mine": r == rank}) for r in range(self.world)}
        before = self.looks
        answers = self.ranks.call(messages)
        if answers[rank] is not None:
            # The moment did not come: the rank dies between two operations.
            self.ranks.kill(rank)
        others = [r for r in range(self.world) if r != rank]
        if others and not any(a is not None and a.kind for r, a in answers.items() if r != rank):
            more = {"exchanges": True} if self.local else {}
            answers = self.ranks.call({r: ("step", {"data": data, **more}) for r in others})
        for other in others:
            answer = answers[other]
            if answer is None or not answer.kind:
                raise Finding(f"rank {rank} died, and rank {other} went on: {answer}")
            named = f"No word from rank {rank} " in answer.error
            torch_says = re.search("Connection (closed|reset) by peer", answer.error)
            if not named and not torch_says:
                raise Finding(f"rank {rank} died, and rank {other} says {answer.error:.300}")
        self._resume(before, answers, saving)

    def _resume(
        self, before: Sequence[Look], answers: Mapping[int, Answer | None], saving: bool
    ) -> None:
        """Go on with new processes; a save that was cut off is there whole, or not at all."""
        old = self.checkpoint
        steps = _steps_of(self.folder)
        if saving and steps is not None and (old is None or steps != old.looks[0].steps):
            # The new checkpoint is there. Its optimiser's state was not kept.
            optimizer = next(
                (a.more["optimizer"] for a in answers.values() if a and "optimizer" in a.more), b""
            )
            self._note_checkpoint(before, optimizer)
        self._recover(restart=True)


def _steps_of(folder: Path) -> int | None:
    """Return the steps of the checkpoint that a folder holds."""
    try:
        return int(json.loads((folder / "gradwire.json").read_bytes())["steps"])
    except (OSError, ValueError, KeyError):
        return None
