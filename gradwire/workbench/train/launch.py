"""Call a function on every rank: the ranks of torchrun, or worker processes started here."""

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
    Worker,
    heard_signals,
    joined,
    leave,
    loopback,
    share_cores,
    stop_signals,
    under_torchrun,
    worker_device,
)

Work = Callable[..., Any]
_GRACE = 0.3
"""Seconds to wait for answers of other workers after a worker has failed."""
ALONE = 60.0
"""Seconds that a worker has for a checkpoint after the end of its parent."""


class WorkerError(ExchangeError):
    """Error of a worker that ended before its work was done."""


def launch(
    work: Work, *args: Any, workers: int, device: str = "cpu", timeout: float | None = None
) -> Any:
    """Call `work(worker, *args)` on every rank, and return the result of rank 0.

    Under torchrun this process is a rank, calls `work`, and returns its own result. Otherwise it
    starts `workers` processes on the loopback interface. SIGINT, SIGTERM and SIGHUP reach them
    through `worker.stop_asked`. All processes end when one fails or `timeout` seconds have passed.
    """
    if under_torchrun():
        return _run_as_rank(work, args, device, timeout)
    check_memory(workers, name="workers")
    spawning = torch.multiprocessing.get_context("spawn")
    flag = spawning.RawValue("b", 0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    settings = (workers, device, store.port, flag, os.getpid(), timeout)
    handles: list[_Handle] = []
    with _signals_set(flag):
        try:
            with _signals_blocked():
                for rank in range(workers):
                    handles.append(_start_worker(spawning, (work, args, rank, *settings)))
            return _collect(handles, timeout)
        finally:
            for handle in handles:
                handle.process.kill()
                handle.process.join()


@dataclass
class _Handle:
    """A worker process, and our end of the pipe on which it answers."""

    process: Any
    pipe: Any


def _start_worker(spawning: Any, task: tuple[Any, ...]) -> _Handle:
    """Start a worker process."""
    ours, theirs = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_run_own_worker, args=(theirs, *task), daemon=True)
    process.start()
    theirs.close()  # An open copy here would hide the end of the pipe when the worker dies.
    return _Handle(process, ours)


@contextmanager
def _signals_set(flag: Any) -> Iterator[None]:
    """Let signals set `flag` in this context; a second Ctrl-C raises KeyboardInterrupt."""
    first_signal = [0.0]

    def on_signal(number: int, _: object) -> None:
        if flag.value and number == signal.SIGINT and time.monotonic() - first_signal[0] > 1:
            raise KeyboardInterrupt
        first_signal[0] = first_signal[0] or time.monotonic()
        flag.value = 1

    before = {number: signal.signal(number, on_signal) for number in heard_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals in this context, and for good in the processes that start in it.

    Started processes inherit the mask. A Ctrl-C goes to every process of the terminal, and would
    otherwise end the workers in the middle of their imports.
    """
    # Started now, because its start would unblock the signals.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, stop_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())


def _collect(handles: list[_Handle], timeout: float | None) -> Any:
    """Return the result of rank 0 when every worker has succeeded; raise the cause of a failure."""
    deadline = time.monotonic() + (timeout or math.inf)
    waiting = {handle.pipe: rank for rank, handle in enumerate(handles)}
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    while waiting:
        left = _GRACE if failures else max(0.0, deadline - time.monotonic())
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
    """The failure of a worker.

    A worker that dies makes its peers fail too. The cause is the failure with the lowest `blame`,
    and the earliest of those. blame: 0 for a user's mistake, 1 for a silent death, 2 for any other
    exception, 3 for a lost peer. at: the time of the failure.
    """

    error: GradwireError
    blame: int
    at: float = 0.0


def _receive(handle: _Handle, rank: int) -> Any:
    """Return the worker's result, or its failure."""
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
    """Describe the end of a process that sent no answer."""
    if code == -signal.SIGKILL:
        return "was killed, perhaps for want of memory"
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _send_answer(pipe: Any, done: bool, value: Any) -> None:
    """Send the result or the failure to the parent, unless the parent is gone."""
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
    """Run one of the processes that `launch` starts, from start to end."""
    threading.Thread(target=_exit_after_parent, args=(parent,), daemon=True).start()
    try:
        share_cores(world)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
        device = worker_device(kind, rank, world, own_workers=True)

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
    """End this process ALONE seconds after its parent.

    A process that waits for peers would not notice the end of its parent.
    """
    while os.getppid() == parent:
        time.sleep(1)
    time.sleep(ALONE)
    os._exit(1)


def _run_as_rank(work: Work, args: tuple[Any, ...], device: str, timeout: float | None) -> Any:
    """Run `work` as a rank of torchrun, which sends signals to the rank itself."""
    signals: list[int] = []
    for number in heard_signals():
        signal.signal(number, lambda n, _: signals.append(n))
    rank, world, local = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    share_cores(local_world)
    on_device = worker_device(device, local, local_world, own_workers=False)
    worker = Worker(rank, world, local, on_device, lambda: bool(signals), own_workers=False)
    try:
        with joined(worker, timeout=timeout or 1800.0):
            return work(worker, *args)
    except GradwireError as error:
        # Every rank raises the same error, and groups that are left behind warn at exit. After the
        # loss of a peer the groups stay, because their end could wait for that peer.
        if not isinstance(error, ExchangeError):
            leave()
        raise
