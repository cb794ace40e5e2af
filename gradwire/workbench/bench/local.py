"""Contenders of `bench step` with local steps: ranks, or islands, that train on their own.

They train the shared model with Muon, which their recipes are for. `never` does so without an
exchange, and is what the others are compared with.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.integrate.local_steps import local_steps
from gradwire.integrate.local_steps.fragments import is_turn
from gradwire.integrate.local_steps.handle import LocalSteps
from gradwire.workbench.bench.contender import Contender, wrap
from gradwire.workbench.bench.job import NEVER, Job
from gradwire.workbench.bench.task import Task


@dataclass
class LocalContender(Contender):
    """The plain model, or a DDP inside an island, with local steps; `never` has none."""

    wire: LocalSteps | None = None
    weights: list[Tensor] = field(default_factory=list)
    """This contender's weights while others train the shared model; empty before its first turn."""

    @classmethod
    def build_local(cls, name: str, job: Job, task: Task) -> "LocalContender":
        """Build the contender `name` (collective)."""
        model = task.model
        if task.inside is not None:
            model = wrap(task.model, job.bucket_mb, task.inside)
        contender = cls(name, model, job.config(name))
        if name != NEVER:
            contender.wire = local_steps(
                model, task.muon, replicate_group=task.across, **job.local_fields(name)
            )
        return contender

    def step(self, task: Task) -> None:
        self.wait_for_kernels()
        task.on_step()
        task.forward(self.model).backward()
        task.update(task.muon)
        if self.wire is not None:
            self.wire.step()

    @property
    def period(self) -> int:
        return 1 if self.wire is None else self.wire.every

    @property
    def lead(self) -> int:
        """Steps of a turn that are not timed.

        After them every update on its way has been taken in this turn, so that it travels beside
        timed steps, as in training.
        """
        return 1 if self.wire is None else self.wire.overlap + 1

    @torch.no_grad()
    def begin_turn(self) -> None:
        """Take the weights of this contender, so that differences are those of its own steps."""
        for parameter, weight in zip(self.model.parameters(), self.weights, strict=False):
            parameter.copy_(weight)
        self.weights = []

    def end_turn(self) -> None:
        """Wait for the exchange on its way, and keep the weights."""
        if self.wire is not None:
            self.wire.wait_for_background()
            self.weights = [p.detach().clone() for p in self.model.parameters()]

    def whole_steps(self, steps: int) -> float:
        if self.wire is None:
            return steps
        last = self.wire.inner_steps
        return self.wire.every * rounds_between(self.wire, last - steps, last)

    def bytes_of(self, entries: int, ranks: int) -> int | None:
        return 0 if self.wire is None else None


def rounds_between(local: LocalSteps, first: int, last: int) -> float:
    """Return the rounds that ended after inner step `first`, up to `last`.

    A fragment counts as its share of the entries.
    """
    sizes = [0] * local.fragments
    for name, size in local.parts.sizes().items():
        sizes[local.fragment_of[name]] += size
    ended = sum(
        size
        for step in range(first + 1, last + 1)
        for number, size in enumerate(sizes)
        if is_turn(number, local.fragments, local.every, step)
    )
    return ended / sum(sizes)
