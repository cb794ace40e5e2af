"""The ranks that run a sequence: real processes over Gloo, or the virtual workers of virtual.py."""

import gc
import multiprocessing
import os
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, Protocol

import torch
import torch.distributed as dist

from faults.sequences.answer import Answer
from faults.sequences.ddp import DDPTrainer
from faults.sequences.fsdp import FSDPTrainer
from faults.sequences.locals import LocalTrainer
from faults.sequences.mends import take_back
from faults.sequences.plan import DDP, FSDP, Setup
from faults.sequences.trainer import Place
from gradwire.workbench.train.worker import loopback

PRELOAD = ["torch._dynamo", "faults.sequences.ranks"]
PATIENCE = 0.5
"""Seconds that survivors give a silent rank, as all ranks are on one machine."""

Messages = Mapping[int, tuple[str, dict[str, Any]]]
"""By rank, an operation and its arguments."""


class Hang(Exception):
    """Ranks that did not answer in time."""


class Ranks(Protocol):
    """The ranks of one sequence."""

    def build(self, setup: Setup, world: int, timeout: float) -> dict[int, Answer | None]:
        """Make model and wire on the first `world` ranks."""

    def call(self, messages: Messages, limit: float) -> dict[int, Answer | None]:
        """Run operations, and return the answers by rank; None for a rank that died."""

    def restart(self, world: int) -> None:
        """Go on with new ranks, in this number."""


class RealRanks:
    """Processes that are all ranks of a job; they serve several sequences of two ranks."""

    def __init__(self, without: str = "") -> None:
        self._without = without
        self.uses = 0
        """The sequences so far."""
        self.start(2)

    def start(self, world: int) -> None:
        """Start processes."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes, self._processes = {}, []
        for rank in range(world):
            ours, theirs = context.Pipe()
            task = (theirs, rank, world, self._store.port, self._without)
            process = context.Process(target=_serve, args=task, daemon=True)
            process.start()
            theirs.close()
            self._pipes[rank] = ours
            self._processes.append(process)

    @property
    def world(self) -> int:
        return len(self._processes)

    def restart(self, world: int) -> None:
        self.close()
        self.start(world)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes.values():
            pipe.close()

    def kill(self, rank: int) -> None:
        """Kill a rank, if it is still alive."""
        self._processes[rank].kill()

    def build(self, setup: Setup, world: int, timeout: float) -> dict[int, Answer | None]:
        return self.call({r: ("build", {"of": (setup, timeout)}) for r in range(world)})

    def call(self, messages: Messages, limit: float = 60.0) -> dict[int, Answer | None]:
        answers: dict[int, Answer | None] = {}
        for rank, message in messages.items():
            try:
                self._pipes[rank].send(message)
            except OSError:
                answers[rank] = None
        waiting = {self._pipes[rank]: rank for rank in messages if rank not in answers}
        while waiting:
            ready = wait(list(waiting), limit)
            if not ready:
                raise Hang(f"ranks {sorted(waiting.values())} do not answer for {limit:g} s")
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except (EOFError, OSError):
                    answers[rank] = None
        return answers


def _serve(pipe: Any, rank: int, world: int, port: int, without: str) -> None:
    """Answer until the pipe ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    torch.set_num_threads(1)
    from gradwire.ranks import liveness

    liveness.PATIENCE = PATIENCE
    take_back(without)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    alone = [dist.new_group([r]) for r in range(world)][rank]
    trainer: Any = None
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            os._exit(0)
        if name == "build":
            setup, timeout = args["of"]
            kind = {DDP: DDPTrainer, FSDP: FSDPTrainer}.get(setup.kind, LocalTrainer)
            place = Place(rank, world, dist.group.WORLD, alone)
            trainer, answer = built(kind, place, setup, timeout)
        elif name == "reset":
            trainer, answer = None, Answer()
            torch.set_default_dtype(torch.float32)
            gc.collect()
        else:
            answer = trainer.answer(name, args)
        pipe.send(answer)


def built(kind: Any, place: Place, setup: Setup, timeout: float) -> tuple[Any, Answer]:
    """Return a new trainer, None after an error, and its first answer."""
    answer = Answer()
    try:
        trainer = kind(place, setup, timeout)
    except BaseException as error:
        answer.note_error(error)
        return None, answer
    answer.look = trainer.look()
    return trainer, answer
