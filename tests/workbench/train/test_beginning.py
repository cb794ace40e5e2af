"""A run whose checkpoint is gone is refused, and so is a second run in a folder in use."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from gradwire.errors import ConfigError, StateError
from gradwire.workbench import cli
from gradwire.workbench.train import RunLimits, TrainJob, beginning, train
from gradwire.workbench.train.folder import open_new, read_json, write_config
from gradwire.workbench.train.metrics import read_records
from tests.workbench.data.files import write_mnist
from tests.workbench.train import jobs

QUIET = RunLimits(quiet=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_mnist(tmp_path_factory.mktemp("mnist"), train=133, test=40)


@pytest.fixture(scope="module")
def begun(ranks, files, tmp_path_factory):
    """A run that took three steps and saved."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    run = jobs.options(files, epochs=1)
    write_config(folder, run)
    ranks.run(2, jobs.own, jobs.train, run, folder, RunLimits(max_steps=3, quiet=True))
    return folder


@pytest.fixture
def copy(begun, tmp_path):
    return shutil.copytree(begun, tmp_path / "run")


@pytest.fixture
def no_launch(monkeypatch):
    def launch(*_, **__):
        raise AssertionError("ranks were started")

    monkeypatch.setattr("gradwire.workbench.train.run.launch", launch)


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def resume(folder, **choices):
    return train(TrainJob.resume(folder, choices, limits=QUIET))


def refused(folder, **choices):
    """What is said; nothing is changed, and no lock stays."""
    before = content(folder)
    with pytest.raises(StateError) as caught:
        resume(folder, **choices)
    assert content(folder) == before
    return str(caught.value)


def take_all(folder):
    shutil.rmtree(folder / "checkpoint")


def take_trainer(folder):
    (folder / "checkpoint" / "trainer.pt").unlink()


def empty(folder):
    take_all(folder)
    (folder / "checkpoint").mkdir()


@pytest.mark.parametrize(
    ("take", "missing"),
    [
        (take_all, "checkpoint"),
        (take_trainer, "checkpoint/trainer.pt"),
        (empty, "checkpoint/trainer.pt"),
    ],
)
@pytest.mark.parametrize("lost", ["saved.json", "result.json", "neither"])
def test_a_checkpoint_that_is_gone_is_refused_before_ranks_start(
    copy, no_launch, take, missing, lost
):
    take(copy)
    (copy / lost).unlink(missing_ok=lost == "neither")
    assert refused(copy) == (
        f"{copy / missing} is missing, but the run has saved a checkpoint at step 3. "
        f"Put it back, or start again with --out {copy} --overwrite."
    )


def test_a_checkpoint_that_is_put_back_goes_on(copy, tmp_path, on_the_pool):
    shutil.move(copy / "checkpoint", tmp_path / "elsewhere")
    refused(copy)
    shutil.move(tmp_path / "elsewhere", copy / "checkpoint")
    assert resume(copy).results[0]["steps"] == 8
    assert read_json(copy / "saved.json") == {"step": 8}


def test_a_finished_run_needs_its_checkpoint_only_for_more_epochs(copy, no_launch):
    take_all(copy)
    result = read_json(copy / "result.json")
    (copy / "result.json").write_text(json.dumps(result | {"epochs": 1, "steps": 8}))
    assert resume(copy).results[0]["steps"] == 8
    assert "saved a checkpoint at step 8" in refused(copy, epochs=2)


def test_a_step_after_the_end_of_an_epoch_shows_a_checkpoint(tmp_path):
    """For folders that have neither saved.json nor result.json."""

    def saved(*records):
        lines = [json.dumps({"step": s, "test_accuracy": a}) + "\n" for s, a in records]
        (tmp_path / "metrics.jsonl").write_text("".join(lines))
        return beginning.saved_step(tmp_path)

    assert beginning.saved_step(tmp_path) == 0
    assert saved((3, None), (6, None)) == 0
    assert saved((3, None), (8, 0.5)) == 0  # the disk may have been full when it was to be saved
    assert saved((3, None), (8, 0.5), (11, None)) == 8
    assert saved((8, 0.5), (16, 0.6)) == 8
    assert saved((8, 0.5), (16, 0.6), (19, None)) == 16


def test_a_run_that_died_before_its_first_checkpoint_starts_again_and_says_so(
    files, tmp_path, on_the_pool, capfd
):
    write_config(tmp_path, jobs.options(files, epochs=1))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 2.0}) + "\n")
    (tmp_path / "checkpoint" / "wire-00000008").mkdir(parents=True)  # its save was broken off
    assert resume(tmp_path).results[0]["steps"] == 8
    assert capfd.readouterr().out.splitlines() == [
        f"note: {tmp_path} is not known to have saved a checkpoint: it starts again at step 0."
    ]
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [3, 8]
    resume(tmp_path, epochs=2)
    assert capfd.readouterr().out == ""


def test_a_comparison_without_its_checkpoint_is_refused_alone(copy, files, on_the_pool, capfd):
    options = jobs.options(files, epochs=1, compare=("dense",))
    write_config(copy, options)
    part = copy / "compare-dense"
    shutil.copytree(copy, part)
    take_all(part)
    assert refused(copy) == (
        f"{part}/checkpoint is missing, but the run has saved a checkpoint at step 3. "
        f"Put it back, or remove {part} to start it again."
    )
    shutil.rmtree(part)
    assert [result["steps"] for result in resume(copy).results] == [8, 8]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("text", ["[3]", '{"step": "three"}', "{"])
def test_a_trace_that_cannot_be_read_is_one_line(copy, text):
    take_all(copy)
    (copy / "saved.json").write_text(text)
    said = refused(copy)
    assert "saved.json" in said
    assert "\n" not in said


def test_the_trace_alone_is_a_run_and_goes_with_it(tmp_path):
    write_config(tmp_path, jobs.options(None))
    (tmp_path / "saved.json").write_text('{"step": 3}')
    with pytest.raises(ConfigError, match="already holds a run"):
        open_new(tmp_path)
    open_new(tmp_path, overwrite=True)
    assert list(tmp_path.iterdir()) == []


def test_torchruns_ranks_are_all_refused(ranks, copy):
    job = TrainJob.resume(copy, {}, limits=QUIET)
    for take, words in ((take_trainer, "trainer.pt is missing"), (take_all, "checkpoint is mis")):
        take(copy)
        for said in ranks.run(2, jobs.pooled, jobs.refusal, job):
            assert words in said
        assert not (copy / "lock").exists()


def test_torchruns_first_rank_holds_the_lock_to_the_end(ranks, copy):
    job = TrainJob.resume(copy, {}, limits=QUIET)
    for pid, folder, found, outcome in ranks.run(2, jobs.pooled, jobs.seen_lock, job):
        assert [line["pid"] for line in found] == [pid]
        assert folder == str(copy)
        assert outcome.results[0]["steps"] == 8
    assert not (copy / "lock").exists()
    (copy / "lock").write_text(json.dumps({"host": "elsewhere", "pid": 7, "started": 1}))
    for said in ranks.run(2, jobs.pooled, jobs.refusal, job):
        assert f"{copy} is in use by a run, pid 7 on host elsewhere." in said


def test_a_failure_before_the_first_step_leaves_neither_lock_nor_folder(files, tmp_path):
    out = tmp_path / "run"
    choices = jobs.options(files).asdict() | {"data_dir": str(tmp_path)}
    with pytest.raises(Exception, match=str(tmp_path)):
        train(TrainJob.new(choices, out, limits=QUIET))
    assert not out.exists()


def main(monkeypatch, capsys, *args):
    """What the command line says, and how it exits."""
    monkeypatch.setattr(sys, "argv", ["gradwire", "train", *map(str, args)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code or 0, capsys.readouterr().err


def test_a_second_run_is_refused_until_the_first_is_dead(
    files, tmp_path, on_the_pool, monkeypatch, capsys
):
    out = tmp_path / "run"
    choices = ("--data-dir", str(files), "--out", str(out), "--device", "cpu", "--workers", "2")
    choices = (*choices, "--batch", "8", "--log-every", "3", "--quiet")
    command = [sys.executable, "-m", "gradwire", "train", *choices, "--epochs", "100000"]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until(lambda: (out / "saved.json").exists())
        pids = [json.loads(line)["pid"] for line in (out / "lock").read_text().splitlines()]
        assert pids[0] == first.pid
        assert len(pids) == 2
        before = (out / "config.json").read_bytes()
        for args in (("--resume", out), (*choices, "--overwrite"), choices):
            code, said = main(monkeypatch, capsys, *args)
            assert code == 2
            assert said.startswith(f"error: {out} is in use by a run, pid {first.pid} on host ")
            assert said.count("\n") == 1
        assert first.poll() is None
        assert (out / "config.json").read_bytes() == before
    finally:
        first.kill()
        first.wait()
    assert (out / "lock").exists()
    until(lambda: not is_running(pids[1]))  # saves, as its launcher is gone
    steps = read_json(out / "saved.json")["step"]
    code, said = main(monkeypatch, capsys, "--resume", out, "--max-steps", str(steps + 3))
    assert (code, said) == (0, "")
    assert read_json(out / "result.json")["steps"] == steps + 3
    assert not (out / "lock").exists()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)
