"""The ranks of a lab as processes, with torchrun's environment, one output and one exit code."""

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
from gradwire.workbench.lab.network import RankNetwork

GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL."""
BEAT = 0.05
"""Seconds between two looks at the processes."""
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>

Process = subprocess.Popen[bytes]


def rank_environment(
    rank: int, ranks: int, master: str, interface: str, port: int
) -> dict[str, str]:
    """Return the environment of a rank: that of torchrun, and the interface for Gloo and NCCL.

    Each rank claims to be a host, because NCCL otherwise refuses several ranks on one GPU.
    """
    programs = str(Path(sys.executable).parent)
    cores = max(1, (os.cpu_count() or 1) // ranks)
    defaults = {"OMP_NUM_THREADS": str(cores), "PYTHONUNBUFFERED": "1"}
    # torch looks up host names; in the lab no server answers, so the lookup must end soon.
    defaults["RES_OPTIONS"] = "timeout:1 attempts:1"
    return {
        **defaults,
        **os.environ,
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
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


def run_ranks(lab: RankNetwork, command: Sequence[str]) -> int:
    """Run `command` on every rank; return the exit code of the first that failed, or 0.

    After a failure the other ranks are stopped, because they would wait until a timeout.
    """
    with shared_gpu(lab) as extra:
        return _run(lab, command, extra)


def _run(lab: RankNetwork, command: Sequence[str], extra: Mapping[str, str]) -> int:
    """Run the ranks with `extra` environment variables, and echo their output."""
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
    """Raise if no rank could start `command`."""
    path = rank_environment(0, 1, "", "", 0)["PATH"]
    if shutil.which(command[0], path=path) is None:
        raise ConfigError(f"command {command[0]!r} is not found; give a program, e.g. -- python")


def _start(
    lab: RankNetwork, rank: int, command: Sequence[str], extra: Mapping[str, str]
) -> Process:
    """Start one rank, in a session of its own that can be stopped as a whole."""
    # Loaded before the fork: the child may not import or allocate much.
    libc = ctypes.CDLL(None)

    def end_with_parent() -> None:
        # If the lab is killed, the kernel kills its ranks.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    master = lab.address(0)
    environment = rank_environment(rank, lab.ranks, master, lab.interface, lab.port)
    environment.update(extra)
    program = shutil.which(command[0], path=environment["PATH"]) or command[0]
    with lab.inside(rank):
        return subprocess.Popen(
            [program, *command[1:]],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def _wait(processes: Sequence[Process]) -> int:
    """Wait for all ranks or for the first failure; return its exit code, or 0."""
    while True:
        codes = [process.poll() for process in processes]
        for code in codes:
            if code:
                # A negative code is a signal; shells report 128 + signal.
                return code if code > 0 else 128 - code
        if None not in codes:
            return 0
        time.sleep(BEAT)


def _stop(processes: Sequence[Process]) -> None:
    """End every rank that still runs, with its children: SIGTERM, and SIGKILL after GRACE."""
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
    """Copy lines with the rank before each; the lock keeps lines whole."""
    for line in source:
        text = line.decode(errors="replace").rstrip("\n")
        with lock:
            target.write(f"{prefix}{text}\n")
            target.flush()
