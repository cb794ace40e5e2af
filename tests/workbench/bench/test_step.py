"""`gradwire bench step` on ranks without a lab: refused jobs, rows and timelines."""

import itertools
import json
import re
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gradwire.errors import ConfigError
from gradwire.stages import STAGES
from gradwire.workbench.bench.contender import Contender
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.laps import lap_seconds, time_quantiles
from gradwire.workbench.bench.step import _affordable, measure_steps
from gradwire.workbench.bench.step_row import Series
from gradwire.workbench.bench.task import Task
from gradwire.workbench.bench.trace import COMPUTE, Span, chrome_trace, trace_file_stem
from gradwire.workbench.bench.watchdog import Watchdog
from gradwire.workbench.train.worker import Worker

CPU = torch.device("cpu")
NAMES = ("noop", "barrier", "dense", "bf16", "powersgd-1", "topk", "topk/union:bundle_mb=0.16")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "resnet5"}, "unknown model 'resnet5'. Did you mean 'resnet50'"),
        ({"model": "lstm-an4"}, "learns from sound"),
        ({"methods": ()}, "name at least one method"),
        ({"methods": ("topk",)}, "must begin with noop"),
        ({"methods": ("noop", "powersgd-3")}, "unknown method 'powersgd-3'. Did you mean 'powers"),
        ({"methods": ("noop", "topk/unoin")}, "unknown exchange 'unoin'. Did you mean 'union'"),
        ({"methods": ("noop", "topk:bundle")}, "'bundle' must be FIELD=VALUE"),
        ({"methods": ("noop", "topk:bundle_mb=0")}, "bundle_mb must be a number above 0"),
        ({"methods": ("noop", "topk/union"), "values": "int8"}, "adds values on the way"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"autocast": "fp8"}, "unknown autocast 'fp8'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_rank_starts(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Job(**{"model": "fnn3", "methods": ("noop", "topk"), **fields})


def test_a_job_travels_and_names_its_configs():
    job = Job("fnn3", ("noop", "topk:bundle_mb=0.3:values=fp32", "dgc"), values="bf16")
    assert Job.from_json(job.to_json()) == job
    assert job.config("noop") is None
    config = job.config(job.methods[1])
    assert (config.method, config.bundle_mb, config.values) == ("topk", 0.3, "fp32")
    assert job.config("dgc").values == "bf16"
    assert job.config("dense/dense-bf16").values == "fp32"


def test_a_method_that_takes_too_long_gets_fewer_steps():
    series = Series(None, pace=2.0)
    assert _affordable(series, 10, 0.0) == 10
    assert _affordable(series, 10, 7.0) == 3
    assert _affordable(series, 10, 1.0) == 1  # one row says more than none
    series.times = [2.0, 2.0, 2.0]
    assert _affordable(series, 10, 7.0) == 0


def limited(rank, job):
    """Rows under a limit, by a clock that says a second more at every look."""
    from gradwire.workbench.bench import step

    seconds = itertools.count()
    step.time = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    try:
        return rows_on_a_rank(rank, job)
    finally:
        step.time = time


def test_a_limit_leaves_the_rows_there_are(ranks):
    methods = ("noop", "dense", "topk", "dgc")
    # Three looks are before half of the time: the last method is not made ready. Three more are
    # before its end, a round each. The others are compared with noop, which has all of its rounds.
    job = Job("fnn3", methods, batch=2, iterations=30, at_most=7.0)
    for rows in ranks.run(2, limited, job):
        assert [row["iterations"] for row in rows] == [30, 20, 10, 0]
        assert rows[-1]["why"] == "at_most=7 s were over"


def test_laps_leave_the_first_step_out():
    taken = []
    assert len(lap_seconds(lambda: taken.append(0), 3, CPU)) == 3
    assert len(taken) == 4
    assert time_quantiles([1.0, 2, 3, 4, 5, 6]) == {"p20": 2.0, "median": 3.5, "p80": 5.0}


def rows_on_a_rank(rank, job):
    worker = Worker(rank, dist.get_world_size(), 0, CPU, lambda: False, own_workers=False)
    worker.control = dist.group.WORLD
    return measure_steps(worker, job, Watchdog(100.0, print))


@pytest.fixture(scope="module")
def measured(ranks, tmp_path_factory):
    """Rows of a tiny network on two ranks, and the folder of its timelines."""
    folder = tmp_path_factory.mktemp("trace")
    fields = {"batch": 2, "iterations": 12, "density": 0.01, "trace": str(folder), "alone": True}
    rows_of_ranks = ranks.run(2, rows_on_a_rank, Job("fnn3", NAMES, **fields))
    return rows_of_ranks, folder


def test_every_method_has_a_row_and_all_ranks_the_same_times(measured):
    (rows, other), _ = measured
    assert tuple(row["method"] for row in rows) == NAMES
    assert [row["seconds"] for row in rows] == [row["seconds"] for row in other]
    for row in rows:
        assert (row["model"], row["ranks"], row["batch"], row["dtype"]) == ("fnn3", 2, 2, "fp32")
        assert (row["link"]["asked"], row["link"]["measured"]) == (None, None)
        assert 0 < row["link"]["latency"] < 1
        if row["method"] == "bf16":
            assert "NCCL" in row["why"]
            assert not row["seconds"]
            continue
        assert row["why"] == ""
        assert row["iterations"] == 12
        assert 0 < row["seconds"]["p20"] <= row["seconds"]["median"] <= row["seconds"]["p80"]
        assert row["exposed"] == pytest.approx(
            row["seconds"]["median"] - row["noop_seconds"], abs=2e-7
        )
        ratio = row["noop_seconds"] / row["seconds"]["median"]
        assert row["efficiency"] == pytest.approx(ratio, abs=1e-3)
    json.dumps(rows)


def test_bytes_and_stages_of_our_own(measured):
    rows = {row["method"]: row for row in measured[0][0]}
    assert rows["noop"]["bytes"] == 0
    assert rows["dense"]["bytes"] == 4 * 199_210
    assert rows["powersgd-1"]["bytes"] is None
    topk, cut = rows["topk"], rows["topk/union:bundle_mb=0.16"]
    # 1992 entries of bf16 and about 9 bits of index, and the round that compares the step.
    assert 5000 < topk["bytes"] < 7500
    assert (topk["bundles"], cut["bundles"]) == (1, 2)
    assert (topk["bundle_bytes"], cut["bundle_bytes"]) == (25_000_000, 160_000)
    assert (topk["exchange"], topk["values"], topk["indices"]) == ("allgather", "bf16", "packed")
    assert cut["exchange"] == "union"
    for row in (topk, cut):
        assert set(row["stages"]) == set(STAGES)
        assert all(seconds > 0 for seconds in row["stages"].values())
        assert row["hidden"] == pytest.approx(
            sum(row["stages"].values()) - row["exposed"], abs=1e-6
        )
    assert rows["dense"]["stages"] == {}
    assert rows["dense"]["hidden"] is None


def test_what_a_method_does_alone(measured):
    rows = {row["method"]: row for row in measured[0][0]}
    assert rows["noop"]["alone"] == rows["barrier"]["alone"] == {}
    assert set(rows["dense"]["alone"]) == set(rows["powersgd-1"]["alone"]) == {"step"}
    for name in NAMES[-2:]:
        alone = rows[name]["alone"]
        assert set(alone) == set(STAGES) - {"exchange"} | {"step"}
        assert all(alone[name] > 0 for name in STAGES if name != "exchange")
    assert measured[0][0][-1]["alone"] == measured[0][1][-1]["alone"]


def test_a_timeline_of_every_method(measured):
    folder = measured[1]
    assert (folder / "timeline.png").read_bytes()[:4] == b"\x89PNG"
    events = json.loads((folder / "topk-union-bundle_mb=0.16.trace.json").read_text())[
        "traceEvents"
    ]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(lanes.values()) == ["bundle 0", "bundle 1", COMPUTE]
    seen = {}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            seen.setdefault(lanes[event["tid"]], []).append(event)
    assert [e["name"] for e in seen[COMPUTE]] == ["forward", "backward", "wait", "optimizer"]
    for a, b in zip(seen[COMPUTE], seen[COMPUTE][1:], strict=False):
        assert b["ts"] == pytest.approx(a["ts"] + a["dur"])
    for lane in ("bundle 0", "bundle 1"):
        assert {e["name"] for e in seen[lane]} - {"wait"} == set(STAGES)
    # A bundle is not begun before its gradients are there: the last one is when backward ends.
    backward = seen[COMPUTE][1]
    first = min(e["ts"] for e in seen["bundle 1"])
    assert first == pytest.approx(backward["ts"] + backward["dur"], abs=1.0)


def test_ranges_of_our_thread_in_the_profile(measured):
    text = (measured[1] / "topk.profile.json").read_text()
    assert {f"gradwire::{name}" for name in STAGES} <= set(re.findall(r"gradwire::\w+", text))


def shared_model(rank):
    """Contenders on one model: each averages, noop does not, whichever was there before."""
    task = Task(Job("fnn3", ("noop", "topk"), batch=2), CPU, rank)
    out = {}
    for name in ("noop", "dense", "topk"):
        Contender.build("topk", Job("fnn3", ("noop",), density=0.01), task)
        contender = Contender.build(name, Job("fnn3", ("noop",), density=0.01), task)
        task.forward(contender.model).backward()
        grads = [p.grad for p in task.model.parameters()]
        out[name] = torch.cat([g.flatten() for g in grads]).clone()
        task.optimizer.zero_grad()
    return out


def test_only_the_contender_that_ran_forward_averages(ranks):
    a, b = ranks.run(2, shared_model)
    assert not torch.equal(a["noop"], b["noop"])
    assert torch.equal(a["topk"], b["topk"])
    assert torch.allclose(a["dense"], (a["noop"] + b["noop"]) / 2, atol=1e-6)
    assert int((a["topk"] != 0).sum()) <= 2 * 1992


def test_spans_for_chrome():
    spans = [Span("forward", COMPUTE, 0, 1e-3), Span("encode", "0", 2e-3, 5e-3)]
    events = [e for e in chrome_trace("topk", spans)["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events] == [
        ("forward", 0, 0, 1000),
        ("encode", 1, 2000, pytest.approx(3000)),
    ]
    assert trace_file_stem("topk/union:bundle_mb=100") == "topk-union-bundle_mb=100"
