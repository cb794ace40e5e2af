"""One run at a time writes in a folder; what a dead one has left blocks nobody on its host."""

import errno
import json
import multiprocessing
import os
import signal
import socket
import subprocess
from dataclasses import asdict

import pytest

from gradwire.errors import ConfigError
from gradwire.workbench.train import lock
from gradwire.workbench.train.folder import CONFIG
from tests.rank_pool import PRELOAD
from tests.workbench.train import jobs

HOST = socket.gethostname()


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of `tmp_path`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ready = context.Event()
    process = context.Process(target=jobs.hold, args=(tmp_path, ready), daemon=True)
    process.start()
    assert ready.wait(60)
    yield process
    process.kill()
    process.join()


@pytest.fixture
def sleeper():
    """A process that lives and holds nothing."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def left_by(folder, pid, host=HOST, started=0):
    """A lock without a flock, as it is left behind, or seen where there is no flock."""
    line = json.dumps(asdict(lock.Holder(host, pid, started))) + "\n"
    (folder / "lock").write_text(line)


def names(folder):
    return [json.loads(line)["pid"] for line in (folder / "lock").read_text().splitlines()]


def is_free(folder):
    """Whether the lock can be had; it names this process then, and is gone afterwards."""
    with lock.locked(folder):
        assert names(folder) == [os.getpid()]
    return not (folder / "lock").exists()


def refused(folder):
    with pytest.raises(ConfigError) as caught, lock.locked(folder):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def without_flock(*_):
    raise OSError(errno.ENOTSUP, "no flock here")


@pytest.mark.parametrize("flock", [True, False])
def test_a_folder_in_use_is_refused_with_the_pid_and_the_host(holder, tmp_path, monkeypatch, flock):
    (tmp_path / "notes.txt").touch()
    if not flock:
        monkeypatch.setattr(lock.fcntl, "flock", without_flock)
    for _ in range(2):
        assert refused(tmp_path) == (
            f"{tmp_path} is in use by a run, pid {holder.pid} on host {HOST}. Wait for its end, "
            f"stop it with `kill {holder.pid}`, or use another folder."
        )
    assert names(tmp_path) == [holder.pid]


def test_the_flock_alone_refuses_too(holder, tmp_path, monkeypatch):
    """Of a holder in another container of the same name, /proc here knows nothing."""
    monkeypatch.setattr(lock, "_PATIENCE", 0.0)
    (tmp_path / "lock").write_text("")
    assert refused(tmp_path) == f"{tmp_path} is in use by another run. Wait for its end."
    left_by(tmp_path, holder.pid, started=1)
    assert f"in use by a run, pid {holder.pid} on host {HOST}. Wait" in refused(tmp_path)


def test_a_holder_that_was_killed_does_not_block(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert names(tmp_path) == [holder.pid]
    (tmp_path / "notes.txt").touch()
    assert is_free(tmp_path)


def test_a_pid_counts_only_with_its_start_and_while_it_lives(sleeper, tmp_path):
    (tmp_path / "notes.txt").touch()
    begun = lock._start_ticks(sleeper.pid)
    left_by(tmp_path, sleeper.pid, started=begun)
    assert f"pid {sleeper.pid} on host {HOST}" in refused(tmp_path)
    left_by(tmp_path, sleeper.pid, started=begun - 1)
    assert is_free(tmp_path)
    left_by(tmp_path, sleeper.pid, started=begun)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # a zombie: nobody has waited for it
    os.kill(sleeper.pid, 0)
    assert is_free(tmp_path)


def test_without_proc_the_pid_alone_counts(sleeper, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_start_ticks", lambda pid: None)
    (tmp_path / "notes.txt").touch()
    left_by(tmp_path, sleeper.pid, started=None)
    assert f"pid {sleeper.pid} on host {HOST}" in refused(tmp_path)
    sleeper.kill()
    sleeper.wait()
    assert is_free(tmp_path)


def test_the_lock_of_another_host_is_refused_until_it_is_removed(tmp_path):
    (tmp_path / "notes.txt").touch()
    left_by(tmp_path, 2**22 + 1, host="elsewhere")
    assert refused(tmp_path) == (
        f"{tmp_path} is in use by a run, pid 4194305 on host elsewhere. Wait for its end, stop it "
        f"there, or use another folder. If that host is down or the process is gone, remove "
        f"{tmp_path}/lock."
    )
    (tmp_path / "lock").unlink()
    assert is_free(tmp_path)


@pytest.mark.parametrize("text", ["", '{"host": "elsew', "[]\n", '{"host": "a", "pid": "x"}\n'])
def test_a_lock_that_was_cut_off_is_nobodys(tmp_path, text):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "lock").write_text(text)
    assert is_free(tmp_path)


def fails(folder, keep):
    with lock.locked(folder):
        if keep:
            (folder / "kept").touch()
        raise ZeroDivisionError


def test_an_error_ends_the_lock_and_removes_a_folder_that_stayed_empty(tmp_path):
    for keep in (False, True):
        with pytest.raises(ZeroDivisionError):
            fails(tmp_path / "a" / "run", keep)
        left = sorted(path.name for path in (tmp_path / "a").rglob("*"))
        assert left == (["kept", "run"] if keep else [])


def test_the_end_of_a_run_leaves_the_lock_of_another(tmp_path):
    with lock.locked(tmp_path):
        (tmp_path / "lock").unlink()
        left_by(tmp_path, 7, host="elsewhere")
    assert names(tmp_path) == [7]


def test_a_lock_that_goes_away_between_two_looks_is_made_again(tmp_path, monkeypatch):
    calls, flock = [], lock.fcntl.flock

    def late(file, how):
        if not calls:
            (tmp_path / "lock").unlink()
        calls.append(how)
        flock(file, how)

    monkeypatch.setattr(lock.fcntl, "flock", late)
    (tmp_path / "notes.txt").touch()
    assert is_free(tmp_path)
    assert len(calls) == 2


def test_a_worker_that_outlives_its_launcher_keeps_the_folder(sleeper, tmp_path):
    left_by(tmp_path, sleeper.pid, started=0)
    lock.join_lock(tmp_path)
    assert names(tmp_path) == [sleeper.pid, os.getpid()]
    assert f"in use by a run, pid {os.getpid()} on host {HOST}" in refused(tmp_path)


def test_joining_makes_no_lock(tmp_path):
    lock.join_lock(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_has_the_lock_of_its_run(tmp_path):
    whole, part = tmp_path / "run", tmp_path / "run" / "compare-dense"
    for first, second in ((whole, part), (part, whole)):
        part.mkdir(parents=True, exist_ok=True)
        (whole / CONFIG).touch()
        (part / CONFIG).touch()
        with lock.locked(first):
            assert f"{whole} is in use by a run, pid {os.getpid()}" in refused(second)
    (whole / CONFIG).unlink()  # a folder of that name that belongs to no run
    with lock.locked(whole):
        assert is_free(part)


def test_a_lock_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "lock").mkdir()
    assert refused(tmp_path) == f"{tmp_path}/lock cannot be written: Is a directory."
    (tmp_path / "file").touch()
    assert refused(tmp_path / "file").endswith("file cannot be made: File exists.")


def test_a_full_disk_is_one_line_and_leaves_no_lock(tmp_path, monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lock, "_line", full)
    assert "lock cannot be written: No space left" in refused(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_take_over_at_once_one_gets_it(ranks, tmp_path):
    (tmp_path / "notes.txt").touch()
    for _ in range(10):
        left_by(tmp_path, 2**22 + 1)
        assert sum(ranks.run(4, jobs.race, tmp_path)) == 1
        assert not (tmp_path / "lock").exists()
