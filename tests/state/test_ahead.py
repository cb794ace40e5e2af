"""Kernels are compiled once per machine, beside the first steps, and never stop a wire."""

import json
import logging
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from gradwire.config import Config
from gradwire.kernels.dispatch import on_references
from gradwire.state import ahead
from gradwire.state.ahead import Job, KernelsAhead, compile_ahead, compile_once
from gradwire.types import Slot


def job(**fields):
    slots = [Slot("w", (300, 40), (40, 1), torch.float32, 0, 12_000)]
    config = Config(**{"density": 0.01, **fields})
    described = [{"slots": [ahead.asdict(s) | {"dtype": "torch.float32"} for s in slots],
                  "dense": False}]  # fmt: skip
    return Job(config.asdict(), described, 4, (9, 0), 132, "versions")


def test_another_config_is_another_job():
    assert job().digest == job().digest
    assert job().digest != job(density=0.02).digest


def test_two_processes_compile_once(monkeypatch, tmp_path):
    runs, made = [], []

    def run(_):
        runs.append(1)
        time.sleep(0.3)
        return 7

    monkeypatch.setattr(ahead, "_run", run)
    threads = [
        threading.Thread(target=lambda: made.append(compile_once(job(), tmp_path)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs == [1]
    assert sorted(made) == [0, 7]
    (marker,) = tmp_path.glob("*.done")
    assert marker.read_text() == "versions"


def test_a_lock_that_stays_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(ahead, "PATIENCE", 0.3)
    monkeypatch.setattr(ahead, "_lock", lambda file: False)
    with pytest.raises(TimeoutError, match="another process"):
        compile_once(job(), tmp_path)
    assert not list(tmp_path.glob("*.done"))


def test_the_wait_ends_with_the_kernels(monkeypatch, tmp_path, caplog):
    go = threading.Event()
    monkeypatch.setattr(ahead, "_run", lambda _: go.wait(10) and 5)
    caplog.set_level(logging.INFO, "gradwire")
    wait = KernelsAhead(job(), tmp_path)
    assert on_references()
    assert not wait.done.is_set()
    go.set()
    assert wait.done.wait(10)
    assert not on_references()
    while not caplog.records:
        time.sleep(0.01)
    assert "5 were compiled" in caplog.text


def test_what_fails_is_one_line_and_no_wait(monkeypatch, tmp_path, caplog):
    def fail(_):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(ahead, "_run", fail)
    wait = KernelsAhead(job(), tmp_path)
    assert wait.done.wait(10)
    assert not on_references()
    assert "could not be compiled ahead: RuntimeError: no compiler here" in caplog.text
    assert not list(tmp_path.glob("*.done"))


def test_a_closed_wire_waits_for_nothing(monkeypatch, tmp_path):
    go = threading.Event()
    monkeypatch.setattr(ahead, "_run", lambda _: go.wait(10) and 5)
    wait = KernelsAhead(job(), tmp_path)
    wait.close()
    assert not on_references()
    go.set()


def test_a_cpu_has_no_kernels():
    assert compile_ahead(Config(), [], 2, torch.device("cpu")) is None


def test_a_job_that_cannot_be_read_names_the_reason(monkeypatch):
    bad = Job({"method": "nothing"}, [], 4, (9, 0), 132, "")
    with pytest.raises(RuntimeError, match="nothing"):
        ahead._run(bad)


CAN_PRETEND = torch.version.cuda is not None


@pytest.mark.skipif(not CAN_PRETEND, reason="needs a torch that was built for CUDA; no GPU")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"method": "dgc", "values": "int8"},
        # It asks for its counts in the middle of a step.
        {"method": "gaussiank", "options": {"variant": "paper"}},
    ],
    ids=str,
)
def test_a_rehearsal_compiles_what_steps_launch(tmp_path, fields):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "gradwire.state.rehearsal"],
        input=job(**fields).text, text=True, capture_output=True, check=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    names = {path.name.rpartition(".")[0] for path in tmp_path.glob("*/*.cubin")}
    if "options" in fields:
        assert names
        return
    assert int(done.stdout) >= len(names) > 3
    assert "winners" in names
    assert any("scan" in name for name in names)
    assert json.loads(job().text)["ranks"] == 4
