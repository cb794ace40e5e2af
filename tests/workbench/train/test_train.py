import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest

from gradwire.workbench import cli
from gradwire.workbench.train import RunLimits, TrainJob, checkpoint, train
from gradwire.workbench.train.folder import METRICS, read_json, write_config
from gradwire.workbench.train.metrics import read_records
from tests.workbench.data.files import write_mnist
from tests.workbench.train import jobs


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_mnist(tmp_path_factory.mktemp("mnist"), train=133, test=40)


@pytest.fixture(scope="module")
def broken_off(ranks, files, tmp_path_factory):
    """A run in one go, and the same in three sittings with checkpoints in the middle of epochs."""
    folder = tmp_path_factory.mktemp("runs")
    run = jobs.options(files)
    for name in ("whole", "parts", "begun"):
        write_config(folder / name, run)
    return folder, ranks.run(2, jobs.own, jobs.whole_and_in_parts, run, folder)[0]


def test_a_run_in_parts_ends_with_the_same_bits(broken_off):
    _, (whole, parts, _) = broken_off
    assert [part["steps"] for part in parts] == [4, 13, 80]
    assert [part["complete"] for part in parts] == [False, False, True]
    assert parts[-1]["parameters_sha256"] == whole["parameters_sha256"]
    assert parts[0]["parameters_sha256"] != whole["parameters_sha256"]


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": "adamw", "lr": 0.002},
        {"recipe": "plain-union", "lr": 0.002, "cosine": True, "follow_lr": True},
    ],
)
def test_a_run_of_another_kind_in_parts_too(ranks, files, tmp_path, more):
    run = jobs.options(files, epochs=2, **more)
    for name in ("whole", "parts", "begun"):
        write_config(tmp_path / name, run)
    whole, parts, _ = ranks.run(2, jobs.pooled, jobs.whole_and_in_parts, run, tmp_path)[0]
    assert [part["steps"] for part in parts] == [4, 13, 16]
    assert parts[-1]["parameters_sha256"] == whole["parameters_sha256"]
    assert whole["replicas_identical"] is True


def test_a_run_in_parts_has_the_same_metrics(broken_off):
    folder, _ = broken_off

    def lines(name):
        records = read_records(folder / name / METRICS)
        return [{k: v for k, v in r.items() if k != "seconds"} for r in records]

    assert lines("parts") == lines("whole")
    assert [r["step"] for r in lines("whole")][:5] == [3, 8, 11, 16, 19]
    assert [r["test_accuracy"] is not None for r in lines("whole")] == [0, 1] * 10


def test_fewer_bytes_than_dense_and_the_same_replicas(broken_off):
    _, (whole, *_) = broken_off
    assert whole["replicas_identical"] is True
    assert 0 < whole["bytes_sent"] < 0.2 * whole["bytes_dense"]
    assert whole["achieved_density"] == pytest.approx(0.05, rel=0.02)
    assert whole["residual_norm"] > 0


def test_only_the_last_checkpoint_is_kept(broken_off):
    folder, _ = broken_off
    names = sorted(p.name for p in (folder / "parts" / "checkpoint").iterdir())
    assert names == ["trainer.pt", "wire-00000080"]


def test_other_workers_go_on_and_more_epochs_too(broken_off, on_the_pool):
    folder, (_, _, begun) = broken_off
    assert (begun["steps"], begun["complete"]) == (3, False)
    job = TrainJob.resume(
        folder / "begun", {"workers": 1, "epochs": 11}, limits=RunLimits(quiet=True)
    )
    assert "workers was 2, is now 1" in job.notes
    result = train(job).results[0]
    assert result["complete"]
    # 3 of 8 steps by two workers are 6 of 16 by one, which goes on for 10 and ten more epochs.
    assert result["steps"] == 3 + 10 + 160


GIVEN = shlex.split(
    "--batch 8 --epochs 10 --workers 2 --log-every 3 --density 0.05 --lr 0.02 --device cpu"
)
COMMAND = [sys.executable, "-m", "gradwire", "train"]


def start(*args):
    return subprocess.Popen([*COMMAND, *args], stdout=subprocess.PIPE, text=True)


def stopped_by(number, files, out):
    """A run that a signal ends in its middle; the step that it saved, and the command it prints."""
    process = start("--data-dir", str(files), "--out", str(out), *GIVEN)
    until(lambda: len(read_records(out / METRICS)) > 0)
    os.kill(process.pid, number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    stopped = read_json(out / "result.json")
    assert stopped["stopped"]
    assert 3 <= stopped["steps"] < 80
    content, _ = checkpoint._read(out / "checkpoint" / "trainer.pt")
    assert content["position"]["step"] == stopped["steps"]
    return said.splitlines()[-1].split()


def test_a_signal_saves_and_the_printed_command_goes_on_bit_for_bit(
    files, tmp_path, broken_off, on_the_pool, monkeypatch
):
    """With SIGINT; that others reach the workers alike is seen in test_launch.py."""
    _, (whole, *_) = broken_off
    out = tmp_path / "run"
    command = stopped_by(signal.SIGINT, files, out)
    assert command == ["gradwire", "train", "--resume", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (0, None)
    assert read_json(out / "result.json")["parameters_sha256"] == whole["parameters_sha256"]
    assert (out / "report.html").is_file()


def test_comparison_runs_share_the_seed_and_the_report(files, tmp_path, on_the_pool):
    out = tmp_path / "run"
    choices = jobs.options(files, compare=("dense",), epochs=2).asdict()
    outcome = train(TrainJob.new(choices, out, limits=RunLimits(quiet=True)))
    sparse, dense = outcome.results
    assert dense["title"] == "dense"
    assert sparse["bytes_sent"] < dense["bytes_sent"]
    assert sparse["bytes_dense"] == dense["bytes_dense"]
    assert read_json(out / "compare-dense" / "config.json")["options"]["seed"] == 0
    finished = train(TrainJob.resume(out, {}, limits=RunLimits(quiet=True)))
    assert json.dumps(finished.results) == json.dumps(outcome.results)


def test_a_language_model_learns_and_its_perplexity_is_reported(ranks, tmp_path):
    run = jobs.options(None, model="lstm-ptb", batch=20, epochs=3, lr=2.0, workers=1)
    (result,) = ranks.run(1, jobs.pooled, jobs.train, run, tmp_path)
    assert run.data == "phrases"
    # 120 words, of which six may follow; better than that takes more than three epochs.
    assert 3.6 < result["test_perplexity"] < 40
    assert read_records(tmp_path / METRICS)[-1]["test_perplexity"] == result["test_perplexity"]
    assert result["parameters"] < 100_000


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)
