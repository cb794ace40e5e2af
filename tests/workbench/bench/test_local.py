"""Local steps in `gradwire bench step`: names, whole rounds, bits, bounds, islands."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.errors import ConfigError
from gradwire.workbench.bench.job import NEVER, Job, split_methods
from gradwire.workbench.bench.laps import round_means
from gradwire.workbench.bench.local import LocalContender, rounds_between
from gradwire.workbench.bench.show_step import step_tables
from gradwire.workbench.bench.step import _affordable, _share_of_turn, measure_steps
from gradwire.workbench.bench.step_row import Series
from gradwire.workbench.bench.task import Task
from gradwire.workbench.bench.watchdog import Watchdog
from gradwire.workbench.train.worker import Worker

CPU = torch.device("cpu")
OVERLAP = "muon:overlap=2:fragments=3"
METHODS = ("noop", "never", "muon", OVERLAP)


def test_fields_may_be_separated_by_commas():
    text = "noop,dense, muon:exchange=owner,back=int4,topk:bundle_mb=3,muon-wan"
    assert split_methods(text) == (
        "noop", "dense", "muon:exchange=owner:back=int4", "topk:bundle_mb=3", "muon-wan",
    )  # fmt: skip


def test_a_method_names_a_recipe_and_what_differs_from_it():
    job = Job("gpt-tiny", (*METHODS, "muon-wan/owner:back=int4"))
    assert job.rounds("noop") is job.rounds(NEVER) is job.config(NEVER) is None
    assert (job.rounds("muon").every, job.rounds("muon").overlap) == (5, 0)
    assert (job.rounds(OVERLAP).overlap, job.rounds(OVERLAP).fragments) == (2, 3)
    config = job.config(job.methods[-1])
    assert (config.exchange, config.options["back"], config.values) == ("owner", "int4", "sign")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"methods": ("noop", "muon")}, "local steps are compared with never"),
        ({"methods": ("noop", "never", "muon:overlap=5")}, "overlap=5 is not below every=5"),
        ({"methods": ("noop", "never", "moun")}, "unknown method 'moun'. Did you mean 'muon'"),
        ({"optimizer": "adam"}, "unknown optimizer 'adam'. Did you mean 'adamw'"),
        ({"islands": 1}, "islands must be at least 2, got 1"),
    ],
)
def test_a_mistake_is_refused_before_a_rank_starts(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        Job(**{"model": "gpt-tiny", "methods": METHODS, **fields})


def test_memory_counts_what_local_steps_hold():
    plain, more = (Job("gpt-tiny", methods).memory for methods in (("noop",), METHODS))
    # never's own weights, twice six copies, and the moments of Muon.
    assert more - plain == 4 * 393_888 * (1 + 2 * 6 + 2)


def test_turns_share_the_rounds():
    steps = [_share_of_turn(1, 25, turn, 3) for turn in range(3)]
    assert steps == [10, 10, 5]
    assert [_share_of_turn(5, 50, turn, 5) for turn in range(5)] == [2] * 5
    assert sum(_share_of_turn(30, 50, turn, 5) for turn in range(5)) == 3, "at least three"
    series = Series(None, period=30, pace=0.1)
    assert _affordable(series, 3, 7.0) == 2
    series.times = [0.1]
    assert _affordable(series, 3, 7.0) == 1
    assert _affordable(series, 0, 7.0) == 0


def test_a_row_is_of_the_mean_steps_of_rounds():
    assert round_means([1.0, 1.0, 4.0, 2.0, 2.0, 2.0], 3) == [2.0, 2.0]


def test_a_fragment_is_its_share_of_a_round():
    sizes = {"a": 10, "b": 30}
    local = SimpleNamespace(
        fragments=2,
        every=4,
        fragment_of={"a": 0, "b": 1},
        parts=SimpleNamespace(sizes=lambda: sizes),
    )
    # a at steps 2, 6, 10, and b at 4, 8.
    assert rounds_between(local, 0, 4) == 1
    assert rounds_between(local, 0, 2) == 0.25
    assert rounds_between(local, 2, 9) == 0.25 + 2 * 0.75


def rows_on_a_rank(rank, job):
    worker = Worker(rank, dist.get_world_size(), 0, CPU, lambda: False, own_workers=False)
    worker.control = dist.group.WORLD
    return measure_steps(worker, job, Watchdog(100.0, print))


@pytest.fixture(scope="module")
def rows(ranks):
    """Rows of a small network on two ranks, whose link is said to be very slow."""
    job = Job("gpt-micro", METHODS, batch=1, iterations=10, rate=2e5, measured=1e5)
    first, second = ranks.run(2, rows_on_a_rank, job)
    assert [row["seconds"] for row in first] == [row["seconds"] for row in second]
    return {row["method"]: row for row in first}


def bits_of_an_exchange():
    """Bits that one of two workers sends in a round of the recipe."""

    def work(rank):
        model = gradwire.workbench.models.build("gpt-micro")
        local = gradwire.local_steps(
            model, gradwire.optim.muon(model), recipe="muon", group=cluster.groups[rank]
        )
        local.exchange()
        return 8 * local.stats().bytes_sent

    cluster = gradwire.ranks.virtual.VirtualRanks(2)
    return cluster.run(work)[0]


def test_bits_and_the_bound_are_those_of_a_round(rows):
    muon = rows["muon"]
    assert muon["bits_per_round"] == pytest.approx(bits_of_an_exchange(), rel=0.02)
    assert muon["bytes"] == pytest.approx(muon["bits_per_round"] / 8 / 5, abs=1)
    least = muon["bits_per_round"] / 1e5 / 5
    assert muon["bound_seconds"] == pytest.approx(max(least, muon["never_seconds"]), rel=1e-3)
    assert muon["of_bound"] == pytest.approx(
        muon["seconds"]["median"] / muon["bound_seconds"], rel=1e-3
    )
    assert rows[OVERLAP]["bits_per_round"] == pytest.approx(muon["bits_per_round"], rel=0.05)


def test_local_steps_are_compared_with_never(rows):
    never = rows["never"]
    assert (never["bytes"], never["optimizer"], rows["noop"]["optimizer"]) == (0, "muon", "sgd")
    assert never["bits_per_round"] is None
    for name in ("muon", OVERLAP):
        row = rows[name]
        assert row["iterations"] == 15, "three rounds of five steps"
        assert row["never_seconds"] == never["seconds"]["median"]
        exposed = row["seconds"]["median"] - row["never_seconds"]
        assert row["exposed"] == pytest.approx(exposed, abs=2e-7)
        assert sum(row["stages"].values()) == pytest.approx(exposed + row["hidden"], abs=1e-6)
        tokens = 2 * 32 / row["seconds"]["median"]
        assert row["tokens_per_second"] == pytest.approx(tokens, abs=0.1)


def test_the_table_has_a_line_for_each(rows):
    from rich.console import Console

    console = Console(width=120)
    with console.capture() as shown:
        console.print(step_tables(list(rows.values())))
    assert re.search(r"\nmuon +5 +[\d.]+k +[\d,.]+ +[\d.]+ +[\d,]+", shown.get())
    assert re.search(r"\nnever +[\d,]+", shown.get())


def kept_weights(rank):
    task = Task(Job("gpt-micro", METHODS, batch=1), CPU, rank)
    contender = LocalContender.build_local(OVERLAP, Job("gpt-micro", METHODS), task)
    contender.begin_turn()
    for _ in range(4):
        contender.step(task)
    contender.end_turn()
    mine = [p.detach().clone() for p in task.model.parameters()]
    with torch.no_grad():
        for p in task.model.parameters():
            p.zero_()
    contender.begin_turn()
    same = all(map(torch.equal, mine, task.model.parameters()))
    contender.close()
    return same, contender.lead


def test_a_contender_has_its_own_weights(ranks):
    assert ranks.run(2, kept_weights) == [(True, 3), (True, 3)]


def test_islands_exchange_what_an_island_is_made_of(ranks):
    """Two islands of two ranks: each rank sends its half of the model to one other rank."""
    job = Job("gpt-micro", ("noop", "never", "muon"), batch=1, iterations=1, islands=2)
    row = {row["method"]: row for row in ranks.run(4, rows_on_a_rank, job)[0]}["muon"]
    assert (row["islands"], row["why"]) == (2, "")
    assert row["bits_per_round"] == pytest.approx(bits_of_an_exchange() / 2, rel=0.05)
    assert row["bound_seconds"] is None, "no link was measured"


def test_a_gpt_of_bytes_reads_tokens():
    task = Task(Job("gpt-tiny", ("noop",), batch=2), CPU, 0)
    assert task.tokens == task.inputs.numel() == 2 * 128
    assert 0 <= int(task.inputs.min()) < int(task.inputs.max()) < 256
