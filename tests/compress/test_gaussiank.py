"""The variants of Gaussian_k count what the published ones count."""

import pytest
import torch

import gradwire
from gradwire.compress import METHODS
from gradwire.compress.gaussiank import (
    TESTS,
    _mean_and_deviations,
    _quantile,
    successive_thresholds,
)
from gradwire.types import Memory
from tests.compress.test_selectors import SIZE, choose, drawn

# count / k of the successive tests; the last is what is sent.
RELEASED = {
    ("gaussian", 0.001): [1.02],
    ("laplace", 0.001): [9.57, 0.96],
    ("t5", 0.001): [8.1, 1.42, 0.21],
    ("t3", 0.001): [9.9, 3.1, 0.95],
    ("gennormal", 0.001): [17, 5.4, 1.24],
    ("zeros", 0.001): [30, 12, 1.9],
    ("shifted", 0.001): [0.56, 85, 9.7],
    ("uniform", 0.001): [0, 50, 0],
    ("gaussian", 0.01): [1.00],
    ("laplace", 0.01): [2.63, 0.43, 6.50],
    ("t5", 0.01): [2.1, 0.41, 5.5],
    ("t3", 0.01): [1.9, 0.63, 4.1],
    ("gennormal", 0.01): [3.1, 1.12],
    ("zeros", 0.01): [4.2, 2.2, 0.67],
    ("shifted", 0.01): [0.58, 16.9, 3.9],
    ("uniform", 0.01): [0, 26, 0],
}
PAPER = {("gaussian", 0.001): [2.03, 0.004, 20.5, 0.53]}


def counts(variant, u, k):
    """n / k of each test until one is accepted."""
    p = 1 - k / SIZE / (1 if variant == "paper" else 2)
    start = _mean_and_deviations(u, SIZE, _quantile(p))
    tail = u.abs().sort(descending=True).values
    out = []
    for threshold in successive_thresholds(start, tail, k, TESTS[variant]):
        n = int((u.abs() > threshold).sum())
        out.append(n / k)
        if 2 / 3 <= n / k <= 4 / 3:
            break
    return out


@pytest.mark.parametrize(
    ("variant", "case", "expected"),
    [("released", *row) for row in RELEASED.items()] + [("paper", *row) for row in PAPER.items()],
    ids=str,
)
def test_counts_of_the_table(variant, case, expected):
    """The table is for 4 million entries; t3 and small counts are the noisiest at one million."""
    kind, density = case
    u, k = drawn(kind, SIZE), round(density * SIZE)
    found = counts(variant, u, k)
    if (kind, density) == ("t3", 0.01):
        # 0.63 is below two thirds, ours is 0.70 and accepted: the variance of t3 is that uncertain.
        assert found[:1] == pytest.approx(expected[:1], rel=0.15)
    else:
        assert found == pytest.approx(expected, rel=0.15, abs=0.03)
    sent = choose("gaussiank", u, k, variant=variant, capacity=100.0)
    assert int(sent.count) == round(found[-1] * k)


@pytest.mark.parametrize("variant", TESTS)
def test_a_bad_threshold_does_not_flood_the_wire(variant):
    """On Laplace data at 0.01 the released one would send 6.5 k: the largest 4 k go."""
    u, k = drawn("laplace", SIZE), 10**4
    whole = choose("gaussiank", u, k, variant=variant, capacity=100.0)
    sparse = choose("gaussiank", u, k, variant=variant)
    assert int(sparse.count) == min(int(whole.count), 4 * k)
    assert torch.equal(sparse.indices, choose("topk", u, int(sparse.count)).indices)


def test_the_message_has_room_for_what_the_variant_may_find():
    run = METHODS["gaussiank"].run
    u = torch.randn(6400)
    assert run(u, 64, Memory()).capacity == 64
    assert run(u, 64, Memory(), variant="paper").capacity == 256
    assert run(u, 64, Memory(), variant="released", capacity=2.5).capacity == 160
    paper = METHODS["gaussiank"].bind({"variant": "paper"})
    assert paper.capacity(64, 6400) == 256
    assert paper.capacity(64, 200) == 200
    g = [torch.randn(10_000) for _ in range(4)]
    for fields, capacity in (({}, 100), ({"variant": "paper"}, 400)):
        cluster = gradwire.VirtualCluster(4, method="gaussiank", density=0.01, **fields)
        cluster.average(g)
        assert cluster.stats().bytes_sent == 3 * (32 + 8 * capacity)


def test_a_capacity_that_sends_more_than_dense_goes_dense():
    g = [torch.randn(10_000) for _ in range(4)]
    for variant, dense in (("repaired", {}), ("paper", {"bytes": 1})):
        cluster = gradwire.VirtualCluster(4, method="gaussiank", density=0.1, variant=variant)
        cluster.average(g)
        assert cluster.stats().dense == dense


def test_padding_between_slots_does_not_change_the_fit():
    """Mean and deviation are over the entries of the parameters, not the zeros between them."""
    u = drawn("shifted", SIZE)[:6400]
    padded = torch.cat([u, torch.zeros(64 * 100)])
    for z in (0.0, 3.0):
        expected = float(u.mean() + z * u.std())
        assert float(_mean_and_deviations(padded, 6400, z)) == pytest.approx(expected, rel=1e-5)
