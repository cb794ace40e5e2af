"""A function on every rank: those that torchrun started, or workers of our own."""

import math
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

import torch.multiprocessing
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from gradwire.errors import ExchangeError, GradwireError
from gradwire.workbench.lab.lab import check_memory
from gradwire.workbench.train.worker import (
    STOP_SIGNALS,
    Worker,
    device_of,
    joined,
    leave,
    loopback,
    share_cores,
    under_torchrun,
)

Work = Callable[..., Any]
GRACE = 0.3
"""Seconds that the peers of a failed worker get to say what happened to them."""
ALONE = 60.0
"""Seconds that a worker whose parent is gone gets to save."""


class WorkerError(ExchangeError):
    """A worker that ended before its work was done."""


def launch(
    work: Work, *args: Any, workers: int, device: str = "cpu", timeout: float | None = None
) -> Any:
    """What rank 0's `work(place, *args)` returned.

    Under torchrun this process is a rank and only calls `work`. Alone it starts `workers`
    processes on the loopback interface, passes SIGINT and SIGTERM on as `place.stop_asked`, and
    ends them all when one fails or `timeout` seconds have passed.
    """
    if under_torchrun():
        return _run_as_rank(work, args, device, timeout)
    check_memory(workers, name="workers")
    spawning = torch.multiprocessing.get_context("spawn")
    flag = spawning.RawValue("b", 0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rest = (workers, device, store.port, flag, os.getpid(), timeout)
    handles: list[_Handle] = []
    with _signals_set(flag):
        try:
            with _signals_blocked():
                for rank in range(workers):
                    handles.append(_start_worker(spawning, (work, args, rank, *rest)))
            return _collect(handles, timeout)
        finally:
            for handle in handles:
                handle.process.kill()
                handle.process.join()


@dataclass
class _Handle:
    """A process of ours and the end of the pipe on which it answers."""

    process: Any
    pipe: Any


def _start_worker(spawning: Any, task: tuple[Any, ...]) -> _Handle:
    """A running worker."""
    ours, theirs = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_run_own_worker, args=(theirs, *task), daemon=True)
    process.start()
    theirs.close()  # or its end would not show when the worker dies
    return _Handle(process, ours)


@contextmanager
def _signals_set(flag: Any) -> Iterator[None]:
    """Within this context a signal sets `flag`; a second Ctrl-C ends everything now."""
    asked = [0.0]

    def on_signal(number: int, _: object) -> None:
        if flag.value and number == signal.SIGINT and time.monotonic() - asked[0] > 1:
            raise KeyboardInterrupt
        asked[0] = asked[0] or time.monotonic()
        flag.value = 1

    before = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Within this context signals wait; processes started in it never get them.

    They inherit the mask. A Ctrl-C goes to every process of the terminal, and would otherwise end
    the workers in the middle of their imports.
    """
    resource_tracker.ensure_running()  # its start would unblock the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _collect(handles: list[_Handle], timeout: float | None) -> Any:
    """Rank 0's result once every worker has ended well; the first cause of a failure otherwise."""
    deadline = time.monotonic() + (timeout or math.inf)
    waiting = {handle.pipe: rank for rank, handle in enumerate(handles)}
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    while waiting:
        left = GRACE if failures else max(0.0, deadline - time.monotonic())
        ready = multiprocessing.connection.wait(list(waiting), None if left == math.inf else left)
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            answer = _receive(handles[rank], rank)
            if isinstance(answer, _Failure):
                failures.append(answer)
            results[rank] = answer
    if failures:
        raise min(failures, key=lambda failure: (failure.blame, failure.at)).error
    if waiting:
        raise WorkerError(f"the workers did not answer within {timeout:g} s.")
    for handle in handles:
        handle.process.join(10)
    return results[0]


@dataclass(frozen=True)
class _Failure:
    """Why a worker failed. One that dies takes its peers with it: the lowest `blame` that came
    first is the cause (0 a user's mistake, 1 a silent death, 2 any other exception, 3 that a peer
    is gone)."""

    error: GradwireError
    blame: int
    at: float = 0.0


def _receive(handle: _Handle, rank: int) -> Any:
    """What the worker returned, or its Failure."""
    try:
        done, value = handle.pipe.recv()
    except EOFError:
        handle.process.join(1)
        ending = _describe_ending(handle.process.exitcode)
        return _Failure(WorkerError(f"worker {rank} {ending}."), blame=1)
    if done:
        return value
    kind, message, trace, at = value
    if kind is None:
        return _Failure(WorkerError(f"worker {rank} failed.\n{trace}"), blame=2, at=at)
    return _Failure(kind(message), blame=3 if issubclass(kind, ExchangeError) else 0, at=at)


def _describe_ending(code: int | None) -> str:
    """How a process ended that did not say so itself."""
    if code == -signal.SIGKILL:
        return "was killed, perhaps for want of memory"
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _send_answer(pipe: Any, done: bool, value: Any) -> None:
    """Tells the parent, unless it is gone."""
    with suppress(BrokenPipeError):
        pipe.send((done, value))


def _run_own_worker(
    pipe: Any,
    work: Work,
    args: tuple[Any, ...],
    rank: int,
    world: int,
    kind: str,
    port: int,
    flag: Any,
    parent: int,
    timeout: float | None,
) -> None:
    """One of our own workers, from start to end."""
    threading.Thread(target=_exit_after_parent, args=(parent,), daemon=True).start()
    try:
        share_cores(world)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
        device = device_of(kind, rank, world, own=True)

        def stop_asked() -> bool:
            orphaned = os.getppid() != parent
            return bool(flag.value) or orphaned

        worker = Worker(rank, world, rank, device, stop_asked, own_workers=True)
        store = TCPStore("127.0.0.1", port, is_master=False)
        with joined(worker, store, timeout or 1800.0):
            result = work(worker, *args)
        _send_answer(pipe, True, result if rank == 0 else None)
    except BaseException as error:
        known = type(error) if isinstance(error, GradwireError) else None
        _send_answer(pipe, False, (known, str(error), traceback.format_exc(), time.monotonic()))
        sys.stdout.flush()
        # Leaving the usual way would wait for peers that are not coming.
        os._exit(1)


def _exit_after_parent(parent: int) -> None:
    """End this process some time after its parent: one that waits for peers would not notice."""
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(ALONE)
    os._exit(1)


def _run_as_rank(work: Work, args: tuple[Any, ...], device: str, timeout: float | None) -> Any:
    """The same for a rank of torchrun, whose signals come to the rank itself."""
    asked: list[int] = []
    for number in STOP_SIGNALS:
        signal.signal(number, lambda n, _: asked.append(n))
    rank, world, local = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    share_cores(local_world)
    on_device = device_of(device, local, local_world, own=False)
    worker = Worker(rank, world, local, on_device, lambda: bool(asked), own_workers=False)
    try:
        with joined(worker, timeout=timeout or 1800.0):
            return work(worker, *args)
    except GradwireError as error:
        # Every rank is refused alike; groups that are left behind make a noise at exit. To end them
        # when a peer is gone could mean to wait for it.
        if not isinstance(error, ExchangeError):
            leave()
        raise
