"""Virtual workers as the ranks of a sequence: with local steps, or in a VirtualCluster."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import gradwire
from faults.sequences.answer import Answer, Look
from faults.sequences.locals import LocalTrainer
from faults.sequences.plan import VIRTUAL_LOCAL, Setup
from faults.sequences.ranks import Messages, Ranks, built
from faults.sequences.trainer import Place
from gradwire.ranks.virtual import VirtualRanks


class VirtualTrainers:
    """Virtual workers with local steps."""

    def build(self, setup: Setup, world: int, timeout: float) -> dict[int, Answer | None]:
        self._ranks = VirtualRanks(world)
        groups = self._ranks.groups
        kind = LocalTrainer
        self._trainers: list[Any] = [None] * world

        def work(rank: int) -> Answer:
            made = built(kind, Place(rank, world, groups[rank]), setup, timeout)
            self._trainers[rank] = made[0]
            return made[1]

        return dict(enumerate(self._ranks.run(work)))

    def call(self, messages: Messages, limit: float = 0.0) -> dict[int, Answer | None]:
        answers: dict[int, Answer | None] = {}

        def work(rank: int) -> None:
            name, args = messages[rank]
            answers[rank] = answer = self._trainers[rank].answer(name, args)
            if answer.kind:
                # Workers that wait for this one are told.
                raise RuntimeError(answer.error)

        with contextlib.suppress(RuntimeError):
            self._ranks.run(work)
        # The first worker's own error tells all: others did not begin, or know that it failed.
        failed = (rank for rank, answer in answers.items() if answer and answer.kind)
        source = next(failed, 0)
        first = answers.get(source) or Answer()
        for rank, message in messages.items():
            answer = answers.setdefault(rank, Answer())
            assert answer is not None
            if first.kind and message[0] == messages[source][0] and not answer.kind:
                answer.kind, answer.error = first.kind, first.error
            answer.clear |= first.clear
            answer.look = self._trainers[rank].look()
        return answers

    def restart(self, world: int) -> None:
        """Nothing of a worker outlives its sequence."""


class Cluster:
    """The workers of a VirtualCluster, with gradients that are drawn."""

    SIZE = 217

    def build(self, setup: Setup, world: int, timeout: float) -> dict[int, Answer | None]:
        self._world, self._setup = world, setup
        self._cluster = gradwire.VirtualCluster(world, **setup.fields)
        self._weights = torch.zeros(self.SIZE, dtype=torch.float32)
        self._saved: Any = None
        return {rank: Answer(self._look(rank)) for rank in range(world)}

    def restart(self, world: int) -> None:
        """Nothing of a worker outlives its sequence."""

    def call(self, messages: Messages, limit: float = 0.0) -> dict[int, Answer | None]:
        answers = [Answer() for _ in range(self._world)]
        name = messages[0][0]
        try:
            getattr(self, f"do_{name}")(answers, [messages[r][1] for r in range(self._world)])
        except Exception as error:
            for answer in answers:
                answer.note_error(error)
        for rank, answer in enumerate(answers):
            answer.look = self._look(rank)
        return dict(enumerate(answers))

    def _look(self, rank: int) -> Look:
        opened = self._cluster._states[0].opened
        residual = self._cluster.residual(rank) if opened else torch.zeros(self.SIZE).float()
        steps = self._cluster._states[rank].steps
        return Look(self._weights.numpy().copy(), "", residual.float().numpy().copy(), steps)

    def _gradients(self, data: int, dtype: str) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(data)
        sizes = torch.logspace(-3, 2, self.SIZE, dtype=torch.float32)
        return [
            (sizes * torch.randn(self.SIZE, generator=generator, dtype=torch.float32)).to(
                getattr(torch, dtype)
            )
            for _ in range(self._world)
        ]

    def do_step(self, answers: list[Answer], args: list[dict[str, Any]]) -> None:
        gradients = self._gradients(args[0]["data"], args[0].get("dtype", self._setup.dtype))
        for gradient, more in zip(gradients, args, strict=True):
            if more.get("poisoned"):
                gradient[3] = float("inf")
        update = self._cluster.average(gradients)
        finite = bool(torch.isfinite(update).all())
        skips = bool(args[0].get("skips"))
        if skips:
            self._cluster.skip_step()
        elif finite:
            self._weights -= update.to(torch.float32)
        for answer, gradient in zip(answers, gradients, strict=True):
            came = gradient.to(torch.float32).numpy()
            answer.came = np.where(np.isfinite(came), came, np.float32(0))
            answer.out = update.to(torch.float32).numpy().copy()
            answer.taken = finite and not skips

    def do_flush(self, *_: Any) -> None:
        self._cluster.flush()

    def do_skip_step(self, *_: Any) -> None:
        self._cluster.skip_step()

    def do_follow_lr(self, answers: list[Answer], args: list[dict[str, Any]]) -> None:
        self._cluster.follow_lr(args[0]["rate"])

    def do_default_dtype(self, answers: list[Answer], args: list[dict[str, Any]]) -> None:
        torch.set_default_dtype(getattr(torch, args[0]["dtype"]))

    def do_save(self, *_: Any) -> None:
        self._saved = copy.deepcopy(self._cluster.state_dict()), self._weights.clone()

    def do_load(self, *_: Any) -> None:
        self._cluster.load_state_dict(self._saved[0] if self._saved else {})
        self._weights = self._saved[1].clone()

    def do_damage(self, answers: list[Answer], args: list[dict[str, Any]]) -> None:
        """Load a state with one fault."""
        state = copy.deepcopy(self._saved[0])
        faults: dict[str, Callable[[dict[str, Any]], Any]] = {
            "flip": lambda worker: worker["residual"]["gradient"].fill_(float("nan")),
            "truncate": lambda worker: worker["residual"].update(gradient=torch.zeros(3)),
            "missing": lambda worker: worker.pop("memory"),
            "manifest": lambda worker: worker.update(version=99),
            "foreign": lambda worker: worker.update(rank=worker["rank"] + 1),
            "empty": lambda worker: worker.clear(),
        }
        worker = int(args[0]["place"] * self._world)
        faults[args[0]["how"]](state["workers"][worker])
        self._cluster.load_state_dict(state)

    def do_wrong(self, answers: list[Answer], args: list[dict[str, Any]]) -> None:
        """Call with what cannot be averaged, or with the state of fewer workers."""
        gradients = self._gradients(args[0]["data"], self._setup.dtype)
        match args[0]["what"]:
            case "count":
                self._cluster.average(gradients[:-1])
            case "shape":
                self._cluster.average([*gradients[:-1], gradients[-1][:-1]])
            case "dtype":
                self._cluster.average([g.double() for g in gradients])
            case "world":
                state = self._cluster.state_dict()
                self._cluster.load_state_dict({"workers": state["workers"][:-1]})


def virtual_ranks(kind: str) -> Ranks:
    """Return new virtual workers of a kind."""
    return VirtualTrainers() if kind == VIRTUAL_LOCAL else Cluster()
