"""A player of one sequence: it knows which operations are legal by now, and checks each outcome."""

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from faults.sequences.answer import Answer, Look, Vector
from faults.sequences.check import (
    NESTEROV,
    ROUNDED,
    TOLERANCE,
    Finding,
    OuterStep,
    check_equal,
    check_law,
    check_unchanged,
    describe,
    rows_of,
)
from faults.sequences.plan import CLUSTER, DDP, FSDP, MOST, Operation, Plan
from faults.sequences.ranks import Hang, Ranks, RealRanks
from faults.sequences.trainers import files_of

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


class Player:
    """The state of one sequence as it must be, beside the ranks as they are."""

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

    # --- steps ------------------------------------------------------------------------------------

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
        check_law(*summands, tolerance=ROUNDED if rounds else TOLERANCE)
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

    # --- calls between steps ----------------------------------------------------------------------

    def on_flush(self) -> None:
        self._run("flush", expect=ANY if self.stopped else OK, quiet=True)
        self._note_flush()

    def on_detach(self) -> None:
        self._run("detach", expect=ANY if self.stopped else OK, quiet=True)
        self.detaching = True
        self._note_flush()

    def _note_flush(self) -> None:
        if self.inside:
            self.late_flush = True
        else:
            self.flush = not self.stopped

    def on_skip_step(self, data: int, bare: bool) -> None:
        """Skip the step after its backward pass; `bare` where there is none, if that is known."""
        if self.local or (bare and self.fresh and not self.stopped):
            self._run("skip_step", expect=REFUSED, quiet=True)
        elif self.stopped:
            self.on_step(data)
        else:
            # A model that is detached by this very step has no wire to tell.
            self._step(lambda rank: {"data": data, "skips": True})

    def on_follow_lr(self, rate: float) -> None:
        """Tell the next rate: residuals are worth the old rate over the new one."""
        before = self.looks
        answers = self._run(
            "follow_lr", lambda rank: {"rate": rate}, expect=ANY if self.stopped else OK
        )
        if answers is None or self.stopped:
            return
        factor = self.rate / rate if self.rate else 1.0
        self.rate = rate
        for rank, (one, other) in enumerate(zip(before, self.looks, strict=True)):
            check_unchanged(one, other, rank, residual=False)
            assert one.residual is not None
            assert other.residual is not None
            if not np.allclose(one.residual * factor, other.residual, rtol=1e-6, atol=1e-30):
                raise Finding(f"follow_lr: the residual of rank {rank} is not {factor:g} times it")

    def on_default_dtype(self, dtype: str) -> None:
        self.default = dtype
        self._run("default_dtype", lambda rank: {"dtype": dtype}, quiet=True)

    def on_memory_format(self, format: str, rank: int | None) -> None:
        """Change the memory format on all ranks; on one alone the next step is refused."""
        if rank is None or self.world == 1:
            self._run("memory_format", lambda r: {"format": format}, quiet=True)
            moves = self.setup.views and format != self.format
            self.format = format
            if moves:
                # DDP itself cannot follow: it reads some gradients in one order, some in another.
                self._step(lambda r: {"data": self.number}, ANY)
                self._recover()
            return
        rank %= self.world
        messages = {r: ("nothing", {}) for r in range(self.world)}
        self._send(messages | {rank: ("memory_format", {"format": format})})
        changes = format != self.format and not self.stopped
        uncertain = self.setup.views or self.setup.unused or self.stopped
        expect = (ANY if uncertain else REFUSED) if changes else OK
        if self._step(lambda r: {"data": self.number}, expect):
            self._send(messages | {rank: ("memory_format", {"format": self.format})})
            self.uncertain |= changes

    def on_model_dtype(self, dtype: str) -> None:
        """Change the model's dtype under the wire: the law, or a refusal."""
        changes = dtype != self.setup.dtype
        self.setup = replace(self.setup, dtype=dtype)
        self._run("model_dtype", lambda rank: {"dtype": dtype})
        for one, other in zip(self.before, self.looks, strict=True):
            check_unchanged(replace(one, parameters=other.parameters), other, 0)
        if changes and self.gradients and not self.stopped:
            # Also if it comes back to its old dtype: DDP has lost the parameters.
            self._run("step", lambda rank: {"data": self.number}, REFUSED)
        if changes and self.gradients:
            self._recover()

    def on_attach(self, differ: str, rank: int) -> None:
        """Attach where a wire is attached, or with a setting that differs on one rank."""
        if differ == "again" and self.local:
            differ = "scaler"
        rank %= self.world
        legal = self.stopped if differ == "again" else self.world == 1
        answers = self._run(
            "attach", lambda r: {"differ": differ, "mine": r == rank},
            OK if legal else REFUSED, quiet=not legal,
        )  # fmt: skip
        if answers is not None and differ == "again":
            self._begin()

    def on_close(self, data: int) -> None:
        """Close the wire: steps are refused from then on, and all begins anew."""
        if self.setup.kind == CLUSTER:
            return
        was_stopped = self.stopped
        self._run("close")
        more = {"exchanges": True} if self.local else {}
        expect = ANY if was_stopped or self.local else REFUSED
        self._run("step", lambda rank: {"data": data, **more}, expect)
        self._recover()

    def on_wrong(self, what: str, data: int) -> None:
        """Call with what cannot be averaged."""
        self._run("wrong", lambda rank: {"what": what, "data": data}, REFUSED, quiet=True)

    def on_exception(self, where: str, rank: int | None, kind: str, data: int) -> None:
        """Raise in the user's own code, on all ranks or on one."""
        self._settle(data)
        # Without a wire it is torch that lets the other ranks wait.
        alone = rank is not None and self.world > 1 and not (self.stopped and where == "backward")
        rank = rank % self.world if rank is not None and alone else None
        peers = "step" if alone and where == "backward" and not self.local else "nothing"
        args = {"where": where, "kind": kind, "data": data}
        messages = {
            r: ("exception", args) if rank in (None, r) or not alone
            else (peers, {"data": data} if peers == "step" else {})
            for r in range(self.world)
        }  # fmt: skip
        before = self.looks
        answers = self._send(messages)
        self.looks = self._looks_of(answers)
        for r, answer in enumerate(answers):
            raises = messages[r][0] == "exception"
            if raises and not (answer.planned or self.broken):
                raise Finding(f"the exception did not come back: {describe(answers)}")
            if not raises and bool(answer.kind) != (peers == "step" and not self.stopped):
                raise Finding(f"a peer of the exception: {describe(answers)}")
            if not raises and answer.kind and not answer.clear:
                raise Finding(f"a peer's error is not clear: {describe(answers)}")
            torn = where == "backward" and self.gradients
            check_unchanged(before[r], self.looks[r], r, residual=not torn)
        # FSDP2 itself does not survive a forward pass that fails.
        if self.setup.kind == FSDP or (where == "backward" and self.gradients):
            self._recover(restart=peers == "step")

    # --- checkpoints ------------------------------------------------------------------------------

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

    # --- ranks that fall out ----------------------------------------------------------------------

    def on_one_sided(self, call: str, rank: int, data: int) -> None:
        """Make a call on one rank only: the next step is refused on every rank."""
        self._settle(data)
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

    def _settle(self, data: int) -> None:
        """Take the steps that ranks can only take together: DDP's second, and those of a detach."""
        tries = 4
        while (self.setup.kind == DDP and self.passes < 2) or (
            self.detaching and not self.stopped and tries
        ):
            self.on_step(data)
            tries -= 1

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


def _moved(looks: Sequence[Look], answers: Sequence[Answer]) -> list[Look]:
    """Return looks with the weights that local steps had before they exchanged."""
    moved = []
    for look, answer in zip(looks, answers, strict=True):
        parameters, optimizer = answer.more.get("own", (look.parameters, look.optimizer))
        moved.append(replace(look, parameters=parameters, optimizer=optimizer))
    return moved


def _steps_of(folder: Path) -> int | None:
    """Return the steps of the checkpoint that a folder holds."""
    try:
        return int(json.loads((folder / "gradwire.json").read_bytes())["steps"])
    except (OSError, ValueError, KeyError):
        return None


def damage(folder: Path, how: str, place: float) -> None:
    """Damage one file of a checkpoint, which `place` (from 0 to 1) chooses."""
    manifest = folder / "gradwire.json"
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


__all__ = ["MOST", "Player", "damage"]
