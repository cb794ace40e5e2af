"""The lock of a run folder: one run at a time writes to the folder.

The file `lock` holds a line of JSON for each process of the run that may write: its host, its pid
and the time of its start. The first process holds a flock on the file, which ends with the process.
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
from gradwire.workbench.train.folder import LOCK, lock_folder, make_run_folder

_PATIENCE = 1.0
"""Seconds to wait for a holder that has made the lock, but not written its line yet."""


@dataclass(frozen=True)
class Holder:
    """A process that may write. `started` is in clock ticks since the boot; None without /proc."""

    host: str
    pid: int
    started: int | None

    @property
    def on_this_host(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """True: the process may still write. On another host it counts as alive.

        A new process with the same pid has another start.
        """
        if not self.on_this_host:
            return True
        if self.started is not None:
            return _start_ticks(self.pid) == self.started
        return _process_exists(self.pid)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make `folder` and lock it in this context; raise ConfigError if another run uses it.

    The end of the context removes the lock, and the folder too if it is empty. A killed process
    leaves its lock behind. On the same host that lock does not count.
    """
    make_run_folder(folder)
    path = lock_folder(folder) / LOCK
    file = _take(path)
    try:
        yield
    finally:
        # Removed before its release: afterwards the lock may belong to the next run.
        if _is_same_file(file, path):
            path.unlink(missing_ok=True)
        file.close()
        with contextlib.suppress(OSError):
            folder.rmdir()


def join_lock(folder: Path) -> None:
    """Add this process to the lock, because it may save after its launcher was killed."""
    path = lock_folder(folder) / LOCK
    with contextlib.suppress(OSError), path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(_line())


def _take(path: Path) -> BinaryIO:
    """Take the lock for this process, and return its open file."""
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
    """Return True if this process now holds `file`; False if its holder has just removed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _refusal(path, _holders_in_time(path)) from None
    except OSError:
        pass  # Some network file systems have no flock. The lines of the file then decide.
    if not _is_same_file(file, path):
        return False
    # Checked even with the flock: other hosts may not see it, and a killed launcher has lost it
    # while its workers may still write.
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
    """Return the error that names the holder of the lock, and says what to do."""
    if not holders:
        return ConfigError(f"{path.parent} is in use by another run. Wait for its end.")
    holder = next((holder for holder in holders if holder.alive), holders[0])
    who = f"{path.parent} is in use by a run, pid {holder.pid} on host {holder.host}."
    if holder.on_this_host:
        return ConfigError(
            f"{who} Wait for its end, stop it with `kill {holder.pid}`, or use another folder."
        )
    return ConfigError(
        f"{who} Wait for its end, stop it there, or use another folder. If that host is down or "
        f"the process is gone, remove {path}."
    )


def _holders_in_time(path: Path) -> list[Holder]:
    """Return the holders of another process's lock; wait a while if no line is written yet."""
    end = time.monotonic() + _PATIENCE
    while not (holders := _holders(path)) and time.monotonic() < end:
        time.sleep(0.02)
    return holders


def _holders(path: Path) -> list[Holder]:
    """Return the holders named in the file. A line that was cut off does not count."""
    holders = []
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                record = json.loads(line)
                host, pid, started = record["host"], int(record["pid"]), record["started"]
                holders.append(Holder(str(host), pid, None if started is None else int(started)))
    return holders


def _line() -> bytes:
    """Return the line of the file for this process."""
    me = Holder(socket.gethostname(), os.getpid(), _start_ticks(os.getpid()))
    return json.dumps(asdict(me)).encode() + b"\n"


def _is_same_file(file: BinaryIO, path: Path) -> bool:
    """Return True if `path` still names `file`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _start_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks since the boot; None after its end."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name before the last bracket may hold blanks. A zombie has ended: it writes no more.
    state, *numbers = text.rpartition(")")[2].split()
    return None if state in ("Z", "X") else int(numbers[18])


def _process_exists(pid: int) -> bool:
    """Return True if a process has this pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
