"""Real processes over Gloo, as ranks that may die, watched from outside."""

import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from gradwire.workbench.train.worker import loopback

LIMIT = 300.0
"""Seconds after which ranks that still run count as hanging."""

PRELOAD = ["torch._dynamo", "faults.job"]
"""Modules that the server imports for all ranks. DDP and optimizers import torch._dynamo late."""


@dataclass(frozen=True)
class Ending:
    """The end of one rank: a result, an error, a death without a word, or none at all (`hangs`).

    at: seconds of the machine's monotonic clock.
    """

    rank: int
    at: float
    result: Any = None
    error: str = ""
    killed: bool = False
    hangs: bool = False


def run(
    world: int, work: Callable[..., Any], *args: Any, log: Path, limit: float = LIMIT
) -> list[Ending]:
    """Run `work(rank, *args)` on `world` ranks and return their endings, in order of ranks.

    The ranks write stderr to `log`. They are forked from a server that has imported torch, so a
    start takes milliseconds. The store lives in this process and so outlives every rank. Under
    torchrun it would live in the agent.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waiting, processes, endings = {}, [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        task = (theirs, work, rank, world, store.port, str(log), args)
        process = context.Process(target=_rank, args=task, daemon=True)
        process.start()
        theirs.close()
        waiting[ours] = rank
        processes.append(process)
    deadline = time.monotonic() + limit
    while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            endings.append(_ending(pipe, waiting.pop(pipe)))
    endings += [Ending(rank, time.monotonic(), hangs=True) for rank in waiting.values()]
    for process in processes:
        process.kill()
        process.join()
    return sorted(endings, key=lambda ending: ending.rank)


def _ending(pipe: Any, rank: int) -> Ending:
    try:
        result, error, at = pipe.recv()
    except EOFError:
        return Ending(rank, time.monotonic(), killed=True)
    return Ending(rank, at, result, error)


def _rank(
    pipe: Any, work: Callable[..., Any], rank: int, world: int, port: int, log: str, args: Any
) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    result, error = None, ""
    try:
        store = TCPStore("127.0.0.1", port, is_master=False)
        limit = timedelta(seconds=LIMIT / 3)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        result = work(rank, *args)
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    pipe.send((result, error, time.monotonic()))
    # Process groups whose ranks are dead cannot be destroyed in order.
    os._exit(0)
