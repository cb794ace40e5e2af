import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gradwire.errors import GradwireError
from gradwire.workbench.data import DataError
from gradwire.workbench.train.launch import WorkerError, launch
from gradwire.workbench.train.worker import heard_signals
from tests.workbench.train import jobs


def test_every_worker_is_a_rank_and_gets_its_part_of_the_cores():
    total, world, threads = launch(jobs.sum_of_ranks, workers=3)
    assert (total, world) == (0 + 1 + 2, 3)
    assert threads == max(1, len(os.sched_getaffinity(0)) // 3)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("user", DataError, "^rank 1 has no such file.$"),
        ("bug", WorkerError, "worker 1 failed.\n(.*\n)*ZeroDivisionError: a bug"),
        ("exit", WorkerError, "worker 1 ended with exit code 3"),
    ],
)
def test_the_worker_that_failed_is_heard_and_nobody_waits_for_the_others(
    forked, kind, error, words
):
    begin = time.monotonic()
    with pytest.raises(error, match=words):
        launch(jobs.fail_on_rank_1, kind, workers=2)
    assert time.monotonic() - begin < 30


def test_workers_that_do_not_answer_are_ended():
    with pytest.raises(WorkerError, match="did not answer within 4 s"):
        launch(jobs.sleep, workers=1, timeout=4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_every_worker_as_a_flag_and_the_handlers_come_back(number):
    before = signal.getsignal(number)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), number))
    timer.start()
    assert launch(jobs.sleep, workers=2) == "stopped"
    assert signal.getsignal(number) is before


def test_a_hangup_that_nohup_ignores_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGHUP))
        timer.start()
        with pytest.raises(WorkerError, match="did not answer"):
            launch(jobs.sleep, workers=1, timeout=6)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_platform_without_a_hangup(monkeypatch):
    monkeypatch.delattr(signal, "SIGHUP")
    assert heard_signals() == [signal.SIGINT, signal.SIGTERM]


def test_more_workers_than_the_memory_holds_are_refused():
    with pytest.raises(GradwireError, match=r"^workers=1000000 need .* are free. Use at most \d+"):
        launch(jobs.sleep, workers=1_000_000)


def test_workers_do_not_outlive_a_parent_that_was_killed(tmp_path):
    call = f"launch(jobs.deaf, {str(tmp_path)!r}, workers=2)"
    code = (
        "from gradwire.workbench.train.launch import launch\n"
        f"from tests.workbench.train import jobs\n{call}"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    end = time.monotonic() + 60
    while len(found := [f.read_text() for f in tmp_path.iterdir()]) < 2 or "" in found:
        assert time.monotonic() < end, "the workers did not start"
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in found):
        assert time.monotonic() < end, "they are still there"
        time.sleep(0.1)


def test_replicas_that_differ_are_noticed(ranks):
    assert ranks.run(2, jobs.pooled, jobs.different_replicas) == [False, False]
    assert ranks.run(1, jobs.pooled, jobs.different_replicas) == [True]
