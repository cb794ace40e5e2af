"""Steps that never end: the watchdog that reports them, and batch norms that prevent some."""

import os
import socket
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from gradwire.workbench.bench import step_rank
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.task import Task, without_cudnn
from gradwire.workbench.bench.watchdog import Watchdog

STUCK = """
import sys, time
from gradwire.workbench.bench import contender, step_rank

step_rank.PATIENCE = 1.0
contender.Contender.step = lambda self, task: time.sleep(60)
step_rank.main(*sys.argv[1:])
"""


def test_a_step_that_does_not_end_ends_the_rank(tmp_path):
    job_file, answer = tmp_path / "job.json", tmp_path / "rows.json"
    job_file.write_text(Job("fnn3", ("noop", "topk"), batch=2, iterations=1).to_json())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-c", STUCK, str(job_file), str(answer)]
    ended = subprocess.run(
        command,
        env={**os.environ, **rank},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    why = answer.with_suffix(".error").read_text()
    assert why.startswith("rank 0 of 1: a step of noop, getting ready, did not end in 1 s")
    assert "docs/lab.md" in why
    assert "most recent call first" in ended.stderr


def test_a_watchdog_waits_while_there_is_progress():
    reasons = []
    watchdog = Watchdog(0.5, reasons.append)
    with watchdog.during("a walk"):
        for _ in range(10):
            time.sleep(0.1)
            watchdog.note_progress()
    time.sleep(0.8)
    watchdog.note_progress()
    assert reasons == []
    with watchdog.during("a sleep"):
        time.sleep(0.8)
    assert reasons == ["a sleep did not end in 0.5 s"]


class Seeing(nn.BatchNorm2d):
    """A batch norm that notes whether cuDNN is allowed."""

    def forward(self, x):
        self.seen = torch.backends.cudnn.enabled
        return super().forward(x)


def test_batch_norms_do_without_cudnn_and_nothing_else_does():
    norm = Seeing(3)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), norm)
    model(torch.randn(2, 3, 4, 4))
    assert norm.seen
    without_cudnn(model)
    model(torch.randn(2, 3, 4, 4))
    assert not norm.seen
    assert torch.backends.cudnn.enabled
    with pytest.raises(ValueError, match="expected 4D"):
        norm(torch.randn(2, 3))
    assert torch.backends.cudnn.enabled


@pytest.mark.parametrize("shares", [False, True])
def test_only_ranks_that_share_a_gpu_leave_cudnn_out(shares):
    task = Task(Job("resnet20", ("noop",), batch=2), torch.device("cpu"), 0, shares)
    hooks = {
        bool(m._forward_pre_hooks) for m in task.model.modules() if isinstance(m, nn.BatchNorm2d)
    }
    assert hooks == {shares}


@pytest.mark.parametrize(
    ("world", "local", "one_machine", "sharing"),
    [(4, 1, True, 2), (4, 2, False, 1), (16, 8, False, 4), (2, 1, False, 1)],
    ids=["the lab's four on two GPUs", "two nodes", "eight on two GPUs", "one a node"],
)
def test_how_many_ranks_share_a_gpu(monkeypatch, world, local, one_machine, sharing):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(step_rank, "joined", lambda place, timeout: nullcontext(place))
    monkeypatch.setattr(step_rank, "measure_steps", lambda *arguments: arguments[-1])
    job = Job("fnn3", ("noop",), device="cuda")
    assert step_rank.measure_rank(job, one_machine=one_machine) == sharing
