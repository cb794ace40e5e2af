"""The operations between steps: calls of the wire, changes of the model, errors of the user."""

from dataclasses import replace

import numpy as np

from faults.sequences.base import ANY, OK, REFUSED
from faults.sequences.check import (
    Finding,
    check_unchanged,
    describe,
)
from faults.sequences.plan import CLUSTER, FSDP
from faults.sequences.steps import Steps


class Calls(Steps):
    """Calls that change nothing, or change what the next step does."""

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
