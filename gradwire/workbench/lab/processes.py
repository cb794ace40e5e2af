"""The ranks of a lab as processes: what torchrun sets, one output, one exit code."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from gradwire.errors import ConfigError
from gradwire.workbench.lab.mps import shared_gpu
from gradwire.workbench.lab.network import Network

GRACE = 5.0
BEAT = 0.05
PR_SET_PDEATHSIG = 1

Process = subprocess.Popen[bytes]


def rank_environment(
    rank: int, ranks: int, master: str, interface: str, port: int
) -> dict[str, str]:
    """What a script under torchrun finds, and the link for Gloo and NCCL to use.

    NCCL takes several ranks on one GPU when each claims a host of its own.
    """
    here = str(Path(sys.executable).parent)
    cores = max(1, (os.cpu_count() or 1) // ranks)
    defaults = {"OMP_NUM_THREADS": str(cores), "PYTHONUNBUFFERED": "1"}
    # torch asks for the names of hosts; in the lab there is nobody to answer.
    defaults["RES_OPTIONS"] = "timeout:1 attempts:1"
    return {
        **defaults,
        **os.environ,
        "PATH": os.pathsep.join([here, os.environ.get("PATH", os.defpath)]),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_IB_DISABLE": "1",
    }


def run_ranks(lab: Network, command: Sequence[str]) -> int:
    """Runs `command` on every rank; the exit code of the first that failed, or 0.

    When one fails the others are stopped: they would wait for it until a timeout.
    """
    with shared_gpu(lab) as extra:
        return _run(lab, command, extra)


def _run(lab: Network, command: Sequence[str], extra: Mapping[str, str]) -> int:
    processes: list[Process] = []
    echoes: list[threading.Thread] = []
    try:
        for rank in range(lab.ranks):
            processes.append(_start(lab, rank, command, extra))
        lock = threading.Lock()
        for rank, process in enumerate(processes):
            assert process.stdout
            assert process.stderr
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                args = (f"[{rank}] ", source, target, lock)
                echoes.append(threading.Thread(target=_echo, args=args, daemon=True))
                echoes[-1].start()
        return _wait(processes)
    finally:
        _stop(processes)
        for echo in echoes:
            echo.join(timeout=1.0)


def check_command(command: Sequence[str]) -> None:
    """Refuses a command that no rank could start."""
    path = rank_environment(0, 1, "", "", 0)["PATH"]
    if shutil.which(command[0], path=path) is None:
        raise ConfigError(f"command {command[0]!r} is not found; give a program, e.g. -- python")


def _start(lab: Network, rank: int, command: Sequence[str], extra: Mapping[str, str]) -> Process:
    libc = ctypes.CDLL(None)

    def tie() -> None:
        # A lab that is killed outright takes its ranks with it.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    where = lab.address(0), lab.interface, lab.port
    environment = {**rank_environment(rank, lab.ranks, *where), **extra}
    program = shutil.which(command[0], path=environment["PATH"]) or command[0]
    with lab.inside(rank):
        return subprocess.Popen(
            [program, *command[1:]],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=tie,
        )


def _wait(processes: Sequence[Process]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        for code in codes:
            if code:
                return code if code > 0 else 128 - code
        if None not in codes:
            return 0
        time.sleep(BEAT)


def _stop(processes: Sequence[Process]) -> None:
    """Asks every rank that still runs, and what it started, to end; then insists."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        os.killpg(process.pid, signal.SIGTERM)
    end = time.monotonic() + GRACE
    for process in running:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _echo(prefix: str, source: IO[bytes], target: IO[str], lock: threading.Lock) -> None:
    """Each line with the rank before it, whole lines at a time."""
    for line in source:
        text = line.decode(errors="replace").rstrip("\n")
        with lock:
            target.write(f"{prefix}{text}\n")
            target.flush()
