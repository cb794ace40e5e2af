"""`gradwire bench step` as a command: tables, JSON, one line for a mistake, ranks on loopback."""

import json
import os
import re
import sys

import pytest

pytest.importorskip("typer")

from gradwire.errors import ConfigError
from gradwire.stages import STAGES
from gradwire.workbench import cli
from gradwire.workbench.bench import start, step_rank
from gradwire.workbench.bench.job import Job
from gradwire.workbench.lab import lab

ROW = {
    "model": "fnn3", "ranks": 2, "method": "topk", "batch": 2, "dtype": "fp32", "device": "cpu",
    "cores": 2, "link": {"asked": 1e8, "measured": 9.5e7}, "iterations": 50, "efficiency": 0.5,
    "seconds": {"p20": 0.1, "median": 0.2, "p80": 0.3}, "bytes": 10, "wire_bytes": 1234,
    "stages": dict.fromkeys(STAGES, 0.001), "exposed": 0.1, "hidden": -0.095, "bundles": 3,
    "why": "", "islands": 0, "bits_per_round": None,
}  # fmt: skip


@pytest.fixture
def main(monkeypatch, capfd):
    """Runs `gradwire bench step ARGS`; exit code, stdout, stderr."""
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["gradwire", "bench", "step", *args])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code
        return (code, *capfd.readouterr())

    return run


def answering(*rows, code=0, error=""):
    """In place of the ranks: what they leave behind."""

    def run(network, command):
        answer = command[-1]
        if error:
            with open(answer.replace(".json", ".error"), "w") as file:
                file.write(error)
        elif not code:
            with open(answer, "w") as file:
                json.dump(rows, file)
        return code

    return run


def test_json_is_one_object_a_row(main, monkeypatch):
    monkeypatch.setattr(start, "run_ranks", answering(ROW, {**ROW, "method": "dense"}))
    code, out, _ = main("--model", "fnn3", "--ranks", "2", "--json", "--device", "cpu")
    assert code == 0
    assert [json.loads(line)["method"] for line in out.splitlines()] == ["topk", "dense"]


def test_the_tables(main, monkeypatch):
    failed = {**ROW, "method": "bf16", "seconds": {}, "stages": {}, "why": "needs NCCL"}
    slow = dict.fromkeys(ROW["seconds"], 12.345)
    long = {**ROW, "method": "dense:bundle_mb=1000", "seconds": slow}
    monkeypatch.setattr(start, "run_ranks", answering(ROW, failed, long))
    code, out, _ = main("--model", "fnn3", "--ranks", "2", "--device", "cpu")
    assert code == 0
    assert "100 Mbit/s" in out
    assert "bf16: needs NCCL" in out
    assert re.search(r"topk +200 +100 +300 +50 +0\.500 +1\.234k +100 +-95", out)
    assert re.search(r"topk +3 +1 +1 +1 +1 +1", out)
    assert "dense:bundle_mb=1000 12,345 12,345 12,345" in re.sub(" +", " ", out)  # nothing is cut


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (answering(code=2, error="no memory"), "error: no memory\n"),
        (answering(code=134), "error: a rank ended with exit code 134; what it said is above\n"),
    ],
)
def test_ranks_that_fail_are_one_line(main, monkeypatch, answer, message):
    monkeypatch.setattr(start, "run_ranks", answer)
    assert main("--model", "fnn3", "--ranks", "2", "--device", "cpu") == (2, "", message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "vgg61"], "error: unknown model 'vgg61'. Did you mean 'vgg16'?"),
        (["--link", "fast"], "error: link must be a number and kbit"),
        (["--latency", "5ms"], "error: latency=0.005 s is the lab's: give a link too"),
        (["--islands", "2"], "error: islands must be ISLANDSxRANKS, at least 2x2, got '2'"),
        (["--ranks", "0"], "error: ranks must be at least 1, got 0"),
        (["--model", "vgg16", "--ranks", "4000"], "error: ranks=4000 need "),
    ],
)
def test_a_mistake_is_one_line(main, args, message):
    code, out, err = main("--device", "cpu", *args)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_without_root_a_link_is_refused(main, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, _, err = main("--link", "1gbit", "--device", "cpu")
    assert (code, err.startswith("error: the lab needs root")) == (2, True)


def test_under_torchrun_there_is_no_lab(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="under torchrun"):
        start.bench_step(Job("fnn3", ("noop",), link="1gbit"), 4, print)


def test_more_than_fits_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(lab, "RANK_BYTES", 0)
    job = Job("vgg16", ("noop", "topk"))
    assert job.memory == 4 * 138_357_544 * 8
    with pytest.raises(lab.LabError, match=r"ranks=5000 need 20616.9 GiB, .* Use at most \d+\.$"):
        start.bench_step(job, 5000, print)


def test_a_rank_says_why_it_was_refused(tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", lambda code: ended.append(code) or sys.exit(code))

    def refuse(*_, **__):
        raise ConfigError("too much\nand more")

    monkeypatch.setattr(step_rank, "measure_rank", refuse)
    job_file = tmp_path / "job.json"
    job_file.write_text(Job("fnn3", ("noop",)).to_json())
    with pytest.raises(SystemExit):
        step_rank.main(str(job_file), str(tmp_path / "rows.json"))
    assert ended == [2]
    assert (tmp_path / "rows.error").read_text() == "too much"


def test_two_ranks_on_loopback(monkeypatch, capsys):
    """From the command's side to the rows, by real processes."""
    monkeypatch.delenv("RANK", raising=False)
    job = Job("fnn3", ("noop", "topk"), batch=2, iterations=2)
    rows = start.bench_step(job, 2, print)
    assert [(row["method"], row["iterations"], row["ranks"]) for row in rows] == [
        ("noop", 2, 2),
        ("topk", 2, 2),
    ]
    assert all(row["wire_bytes"] is None for row in rows)
    lines = capsys.readouterr().err.splitlines()
    steps = ["noop: getting ready, 1 of 2", "topk: getting ready, 2 of 2", "turn 1 of 1"]
    assert [line for line in lines if "ready" in line or "turn" in line] == [
        f"[0] {step}" for step in steps
    ]
