"""The operations on checkpoints: save, load, damage, and another number of ranks."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from faults.sequences.answer import Answer, Look
from faults.sequences.base import ANY, OK, REFUSED, Checkpoint
from faults.sequences.calls import Calls
from faults.sequences.check import (
    Finding,
    rows_of,
)
from faults.sequences.plan import CLUSTER, DDP, FSDP


class Checkpoints(Calls):
    """Checkpoints that give back what was saved, or are refused."""

    def _take_checkpoint(self, answers: Sequence[Answer]) -> None:
        self._note_checkpoint(self.looks, answers[0].more.get("optimizer", b""))

    def _note_checkpoint(self, looks: Sequence[Look], optimizer: bytes) -> None:
        flush = self.late_flush if self.inside else self.flush
        self.checkpoint = Checkpoint(
            looks, optimizer, flush, self.taken, self.rate, self.setup.dtype,
            self.outer.velocity.copy(), all(look.residual is not None for look in looks),
        )  # fmt: skip

    def _path(self) -> dict[str, Any]:
        return {"folder": str(self.folder)}

    def on_save(self) -> None:
        # A cluster learns its parameters in its first step, or from a state.
        unknown = self.setup.kind == CLUSTER and self.fresh
        expect = REFUSED if unknown else ANY if self.stopped else OK
        answers = self._run("save", lambda rank: self._path(), expect, quiet=True)
        if answers is not None:
            self._take_checkpoint(answers)

    def on_failed_save(self, rank: int) -> None:
        """Save where the disk of one rank is full: every rank hears of it."""
        rank %= self.world
        answers = self._run(
            "save", lambda r: {**self._path(), "fails": r == rank},
            ANY if self.stopped else REFUSED, quiet=True,
        )  # fmt: skip
        if answers is not None:
            self._take_checkpoint(answers)

    def on_load(self) -> None:
        """Continue from the checkpoint, which gives back what was saved."""
        saved = self.checkpoint
        if saved is None:
            expect = ANY if self.stopped else REFUSED
            self._run("load", lambda rank: self._path(), expect, quiet=True)
            return
        args: dict[str, Any] = dict(self._path())
        if self.setup.kind in (DDP, FSDP):
            args |= {"parameters": saved.looks[0].parameters, "optimizer": saved.optimizer}
        expect = ANY if self.stopped or self.setup.dtype != saved.dtype else OK
        if self._run("load", lambda rank: args, expect) is None:
            return
        self.fresh, self.flush, self.taken, self.rate = False, saved.flush, saved.taken, saved.rate
        self.flush |= self.detaching and not self.stopped
        self.inside = self.late_flush = False
        self.outer.velocity = saved.velocity.copy()
        self._check_loaded(saved)

    def _check_loaded(self, saved: Checkpoint) -> None:
        if not saved.whole or self.stopped or self.setup.dtype != saved.dtype:
            return
        like = self.looks[0].parameters
        then, now = (
            rows_of([k.residual for k in looks], like) for looks in (saved.looks, self.looks)
        )
        if len(then) == len(now):
            if then.tobytes() != now.tobytes():
                raise Finding("a residual is not what was saved")
        elif not np.allclose(then.astype(np.float64).mean(0), now.mean(0), rtol=1e-5, atol=1e-7):
            raise Finding("the mean residual moved as the number of ranks changed")
        if self.gradients and like.tobytes() != saved.looks[0].parameters.tobytes():
            raise Finding("the parameters are not what was saved")
        if self.local:
            one, other = saved.looks[0].shared, self.looks[0].shared
            assert one is not None
            assert other is not None
            if one.tobytes() != other.tobytes():
                raise Finding("the shared weights are not what was saved")

    def on_damage(self, how: str, place: float) -> None:
        """Load a damaged copy of the checkpoint."""
        if self.setup.kind == CLUSTER and self.fresh:
            self.on_step(0)
        if self.checkpoint is None or (self.stopped and self.setup.kind != CLUSTER):
            self.on_save()
        if self.setup.kind == CLUSTER:
            self._run("damage", lambda rank: {"how": how, "place": place}, REFUSED, quiet=True)
            return
        if self.stopped or self.checkpoint is None:
            return
        copy = self.folder.with_name("damaged")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.folder, copy)
        damage(copy, how, place)
        self._run("load", lambda rank: {"folder": str(copy)}, REFUSED, quiet=True)

    def on_resize(self, world: int) -> None:
        """Save, and let another number of ranks resume."""
        if self.stopped or self.broken:
            self._recover()
        self.on_save()
        self.ranks.restart(world)
        self.world = world
        self._build()
        self.on_load()


def damage(folder: Path, how: str, place: float) -> None:
    """Damage one file of a checkpoint, which `place` (from 0 to 1) chooses."""
    manifest = folder / "gradwire.json"
    # After a kill, a load rightly takes the copy of `.metadata` that the manifest names.
    for stand_in in folder.glob("*.old"):
        stand_in.unlink()
    # A rank that was killed has left files that belong to no checkpoint.
    belongs = manifest.read_text()
    files = [f for f in sorted(folder.iterdir()) if f == manifest or f'"{f.name}"' in belongs]
    file = files[int(place * len(files))]
    content = file.read_bytes()
    parts = sorted(folder.glob("*rank*.pt"))
    if how == "foreign" and len(parts) > 1:
        parts[0].write_bytes(parts[1].read_bytes())
    elif how == "truncate":
        file.write_bytes(content[: int(place * len(content))])
    elif how == "missing":
        file.unlink()
    elif how == "manifest":
        manifest.write_bytes(manifest.read_bytes()[:-20])
    elif how == "empty":
        for each in files:
            each.unlink()
    else:
        at = int(place * (len(content) - 1))
        file.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
