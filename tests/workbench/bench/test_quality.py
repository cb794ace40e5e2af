"""The bench on vectors with a known answer: energy, recall, data and recorded gradients."""

import numpy as np
import pytest
import torch

from gradwire.errors import ConfigError
from gradwire.types import Entries, Sparse
from gradwire.workbench.bench import bench_compress
from gradwire.workbench.bench import compress as bench
from gradwire.workbench.bench.data import USUAL, draw_vector, read_gradient
from gradwire.workbench.bench.quality import selection_quality

CPU = torch.device("cpu")


def chosen(*indices):
    values, count = torch.ones(len(indices)), torch.tensor(len(indices), dtype=torch.int32)
    return Entries(Sparse(torch.tensor(indices, dtype=torch.int32), values, count, 5))


def test_energy_and_recall_of_a_known_choice():
    u = torch.tensor([1.0, -4, 3, 0, 2])
    assert selection_quality(chosen(1, 2), u, 2) == (1, 1)
    assert selection_quality(chosen(1, 4), u, 2) == (20 / 25, 0.5)
    assert selection_quality(chosen(3), u, 2) == (0, 0)
    assert selection_quality(chosen(0, 1, 2, 4), u, 2) == (30 / 25, 1)
    assert selection_quality(chosen(1, 5, 5), u, 2) == (16 / 25, 0.5)  # padding is not chosen


def test_ties_count_as_found():
    u = torch.tensor([1.0, 1, 1, 1])
    assert selection_quality(chosen(2, 3), u, 2) == (1, 1)


KURTOSES = {
    "gaussian": (2.8, 3.2),
    "shifted": (2.5, 3.5),
    "uniform": (1.7, 1.9),
    "laplace": (5, 7),
    "t5": (4, 60),
    "zeros": (25, 35),
}


@pytest.mark.parametrize("kind", [maker.__name__ for maker in USUAL])
def test_data_repeats_and_is_of_its_kind(kind):
    a, b, other = (draw_vector(kind, 40_000, CPU, seed) for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, other)
    assert a.dtype == torch.float32
    assert abs(float(a.mean()) - 0.3 * (kind == "shifted")) < 0.1 * float(a.std())
    kurtosis = float(a.double().pow(4).mean() / a.double().square().mean() ** 2)
    low, high = KURTOSES.get(kind, (7, 1e9))
    assert low < kurtosis < high


def test_the_largest_of_a_network_lie_together():
    for kind, few in (("gaussian", False), ("network", True)):
        u = draw_vector(kind, 4_000_000, CPU, 0).abs()
        groups = torch.unique(torch.topk(u, 4000).indices // 32)
        assert (len(groups) < 800) == few


def distinct(u):
    return len(torch.unique(u.abs()))


HARD = {
    "equal": lambda u: distinct(u) == 1,
    "two-values": lambda u: distinct(u) == 2 and 40 < (u.abs() > 1).sum() < 120,
    "sorted-up": lambda u: (u[1:] >= u[:-1]).all() and distinct(u) > 30_000,
    "one-layer": lambda u: torch.topk(u.abs(), 100).indices.sub(20_200).abs().max() <= 200,
    "powers": lambda u: distinct(u) == 40,
    "denormals": lambda u: 0 < u.abs().max() < torch.finfo(torch.float32).tiny,
    "few": lambda u: 0 < (u != 0).sum() < 40,
    "one-hot": lambda u: (torch.topk(u.abs(), 400).indices % 32 == 0).all(),
    "constant": lambda u: torch.equal(u, draw_vector("constant", 40_000, CPU, 1)),
}
"""What must hold of 40,000 entries of each hard kind."""


@pytest.mark.parametrize("kind", HARD)
def test_hard_data_is_of_its_kind(kind):
    assert HARD[kind](draw_vector(kind, 40_000, CPU, 0))


def rows(**arguments):
    return {
        (r.method, r.data): r
        for r in bench_compress([20_000], [0.01], repeat=2, device=CPU, warmup=1, **arguments)
    }


def test_topk_is_exact_and_randk_is_not():
    measured = rows(methods=["topk", "randk"], data=["gaussian", "layers"])
    for kind in ("gaussian", "layers"):
        best, drawn = measured["topk", kind], measured["randk", kind]
        assert (best.energy, best.recall, best.achieved) == (1, 1, 200)
        assert drawn.achieved == 200
        assert drawn.energy < 0.2
        assert drawn.recall < 0.1
        assert measured["floor", kind].energy is None


def test_what_the_timed_steps_choose_is_not_what_the_first_did():
    """Entries add up until they reach a threshold: 12 deviations, 21 after 36 steps."""
    arguments = {"methods": ["topk", "threshold"], "options": ["value=12"]}
    bench_rows = bench_compress([20_000], [0.01], device=CPU, warmup=36, **arguments)
    measured = {row.method: row for row in bench_rows}
    assert (measured["topk"].achieved, measured["topk"].timed) == (200, 200)
    assert measured["threshold"].achieved == 0
    assert 200 < measured["threshold"].timed <= 800


def test_a_recorded_gradient_takes_the_place_of_size_and_data(tmp_path):
    np.save(tmp_path / "own.npy", np.arange(-500, 500, dtype=np.float32))
    recorded = ("own", read_gradient(tmp_path / "own.npy"))
    measured = rows(methods=["topk"], recorded=recorded)
    assert measured["topk", "own"].size == 1000
    assert measured["topk", "own"].recall == 1


def test_options_go_to_the_methods_that_have_them():
    measured = rows(methods=["topk", "randk"], options=["seed=7"])
    assert measured["randk", "gaussian"].achieved == 200
    other = rows(methods=["topk", "randk"], options=["seed=8"])
    assert measured["randk", "gaussian"].energy != other["randk", "gaussian"].energy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": ["topq"]}, "Did you mean 'topk'"),
        ({"methods": ["topk"], "data": ["gausian"]}, "Did you mean 'gaussian'"),
        ({"methods": ["topk"], "options": ["colour=1"]}, "none of topk has an option 'colour'"),
        ({"methods": ["randk"], "options": ["seed"]}, "NAME=VALUE, got 'seed'"),
        ({"methods": ["topk:paper"]}, "no option"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        rows(**arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.zeros((2, 2), np.float32), "got float32 of shape"),
        (np.zeros(4), "got float64"),
        (np.zeros(0, np.float32), r"got float32 of shape \(0,\)"),
        (np.array([1, np.inf], np.float32), "not finite"),
        (np.array([1, np.nan], np.float32), "not finite"),
        (np.array([{}], dtype=object), "not a readable .npy"),
    ],
)
def test_a_file_that_is_no_gradient_is_refused(tmp_path, content, message):
    np.save(tmp_path / "x.npy", content)
    with pytest.raises(ConfigError, match=message):
        read_gradient(tmp_path / "x.npy")


def test_a_cut_off_or_missing_file_is_refused(tmp_path):
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01")
    for name in ("x.npy", "y.npy"):
        with pytest.raises(ConfigError, match="not a readable"):
            read_gradient(tmp_path / name)


@pytest.mark.parametrize("method", ["micro", "exdyna"])
def test_a_threshold_that_follows_its_count_has_caught_up_before_it_is_timed(monkeypatch, method):
    monkeypatch.setattr(bench, "ROTATED_BYTES", 1)
    kept = []

    def timed(steps, *_):
        kept.extend(steps)
        return bench.Timing(1.0, 1.0, 1.0, 1.0)

    monkeypatch.setattr(bench, "time_calls", timed)
    list(bench_compress([100_000], [0.01], [method], CPU))
    achieved = [step.achieved() for step in kept if isinstance(step, bench.CompressStep)]
    assert achieved
    # A message has room for 2 k, which the threshold of the first step fills from the third on.
    assert all(500 < n < 1500 for n in achieved), achieved
