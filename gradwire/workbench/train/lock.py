"""The lock of a run folder: one run at a time writes there.

The file `lock` holds a line of JSON for each process of the run that may write: its host, its pid
and when it started. The first of them holds a flock on the file, which ends with the process.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from gradwire.errors import ConfigError
from gradwire.workbench.train.folder import LOCK, lock_folder, make

PATIENCE = 1.0
"""Seconds that a holder gets between making the lock and writing its name."""


@dataclass(frozen=True)
class Holder:
    """A process that writes. `started` is in clock ticks since the boot; None without /proc."""

    host: str
    pid: int
    started: int | None

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether it may still write; a pid that another process has by now is another's."""
        if not self.here:
            return True
        if self.started is not None:
            return _start_of(self.pid) == self.started
        return _answers(self.pid)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes `folder`; within this context no other run opens it. One in use is a ConfigError.

    The lock is removed at the end, and an empty folder too. A killed process leaves its lock, which
    does not count on its own host.
    """
    make(folder)
    path = lock_folder(folder) / LOCK
    file = _taken(path)
    try:
        yield
    finally:
        # Removed before it is let go of, or it could be the next one's.
        if _is(file, path):
            path.unlink(missing_ok=True)
        file.close()
        with contextlib.suppress(OSError):
            folder.rmdir()


def join(folder: Path) -> None:
    """Adds this process to the lock: a worker saves even after its launcher was killed."""
    path = lock_folder(folder) / LOCK
    with contextlib.suppress(OSError), path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(_line())


def _taken(path: Path) -> BinaryIO:
    """The lock's file, this process's from now on."""
    while True:
        try:
            file = path.open("a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
        try:
            if _claim(file, path):
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _claim(file: BinaryIO, path: Path) -> bool:
    """Whether `file` is ours now; False for one that its holder has just removed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _refusal(path, _holders_in_time(path)) from None
    except OSError:
        pass  # Some network file systems have no flock: what the file says has to do.
    if not _is(file, path):
        return False
    # Also with the flock: it may not reach other hosts, and a killed launcher has lost its own.
    if alive := [holder for holder in _holders(path) if holder.alive]:
        raise _refusal(path, alive)
    try:
        file.truncate(0)
        file.write(_line())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
    return True


def _refusal(path: Path, holders: list[Holder]) -> ConfigError:
    """Who holds the lock, and what to do."""
    if not holders:
        return ConfigError(f"{path.parent} is in use by another run. Wait for its end.")
    holder = next((one for one in holders if one.alive), holders[0])
    who = f"{path.parent} is in use by a run, pid {holder.pid} on host {holder.host}."
    if holder.here:
        return ConfigError(
            f"{who} Wait for its end, stop it with `kill {holder.pid}`, or use another folder."
        )
    return ConfigError(
        f"{who} Wait for its end, stop it there, or use another folder. If that host is down or "
        f"the process is gone, remove {path}."
    )


def _holders_in_time(path: Path) -> list[Holder]:
    """The holders of a lock that another process has, which may not have written them yet."""
    end = time.monotonic() + PATIENCE
    while not (holders := _holders(path)) and time.monotonic() < end:
        time.sleep(0.02)
    return holders


def _holders(path: Path) -> list[Holder]:
    """Who is named in the file; a line that was cut off is nobody."""
    holders = []
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                found = json.loads(line)
                host, pid, started = found["host"], int(found["pid"]), found["started"]
                holders.append(Holder(str(host), pid, None if started is None else int(started)))
    return holders


def _line() -> bytes:
    """This process, as a line of the file."""
    me = Holder(socket.gethostname(), os.getpid(), _start_of(os.getpid()))
    return json.dumps(asdict(me)).encode() + b"\n"


def _is(file: BinaryIO, path: Path) -> bool:
    """Whether `path` still names `file`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _start_of(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None for one that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name before the last bracket may hold blanks. A zombie has ended: it writes no more.
    state, *numbers = text.rpartition(")")[2].split()
    return None if state in ("Z", "X") else int(numbers[18])


def _answers(pid: int) -> bool:
    """Whether there is a process of that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
