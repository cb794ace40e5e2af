"""The variants of Gaussian_k count what the published ones count."""

import pytest
import torch

import gradwire
from gradwire.compress import METHODS
from gradwire.compress.gaussiank_published import TESTS, mean_and_deviations, successive_tests
from gradwire.compress.thresholds import normal_quantile
from gradwire.encode import Encoding, nbytes
from gradwire.types import Memory
from tests.compress.test_selectors import SIZE, choose, drawn
from tests.distributions import draw

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
    start = mean_and_deviations(u, SIZE, normal_quantile(p))
    out = []
    for n in successive_tests(u, start, k, TESTS[variant])[1]:
        out.append(int(n) / k)
        if 2 / 3 <= out[-1] <= 4 / 3:
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
    sent = choose("gaussiank", u, k, variant=variant)
    assert int(sent.count) == round(found[-1] * k)


@pytest.mark.parametrize("variant", TESTS)
def test_nothing_is_cut_from_what_a_variant_finds(variant):
    """On Laplace data at 0.01 the released one sends 6.5 k."""
    u, k = drawn("laplace", SIZE), 10**4
    start = mean_and_deviations(
        u, SIZE, normal_quantile(1 - k / SIZE / (1 if variant == "paper" else 2))
    )
    last = successive_tests(u, start, k, TESTS[variant])[0][-1]
    expected = (u.abs() > last).nonzero().flatten()
    assert torch.equal(choose("gaussiank", u, k, variant=variant).indices.long(), expected)
    assert variant == "paper" or expected.numel() > 4 * k


def test_the_room_in_a_message():
    run, u = METHODS["gaussiank"].run, torch.randn(6400)
    assert run(u, 66, Memory()).capacity == 88
    assert run(u, 66, Memory(), exact=True).capacity == 66
    memory = Memory()
    memory.longest = lambda count: int(count) + 5
    found = run(u, 64, memory, variant="paper")
    assert found.capacity == int(found.count) + 5
    assert METHODS["gaussiank"].bind({}).capacity(64, 70) == 70


@pytest.mark.parametrize("variant", TESTS)
def test_a_message_of_a_variant_is_as_long_as_the_longest(variant):
    """And 8 bytes say how long that is."""
    g = [draw("laplace", 10_000, seed=rank) * (1 + rank) for rank in range(4)]
    sent = [gradwire.compress(x, "gaussiank", k=100, variant=variant).indices.numel() for x in g]
    assert len(set(sent)) > 1
    cluster = gradwire.VirtualCluster(4, method="gaussiank", density=0.01, variant=variant)
    cluster.average(g)
    stats = cluster.stats()
    assert stats.bytes_sent == 3 * (nbytes(max(sent), Encoding(), 10_048) + 8)
    assert stats.length_exchanges == 1
    assert [cluster.stats(rank).achieved_density for rank in range(4)] == [n / 10_000 for n in sent]
    for rank, x in enumerate(g):
        expected = x - gradwire.compress(x, "gaussiank", k=100, variant=variant).dense()
        assert torch.equal(cluster.residual(rank), expected)


def test_the_repaired_variant_never_asks_how_long_messages_are():
    g = [torch.randn(10_000) for _ in range(4)]
    for method in ("gaussiank", "dgc", "trimmed", "mstopk"):
        cluster = gradwire.VirtualCluster(4, method=method, density=0.01)
        cluster.average(g)
        assert cluster.stats().length_exchanges == 0


def test_a_graph_cannot_capture_a_length(monkeypatch):
    class OnDevice(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    u = torch.randn(100).as_subclass(OnDevice)
    with pytest.raises(ValueError, match=r"variant 'released' asks the host .* no CUDA graph"):
        METHODS["gaussiank"].run(u, 5, Memory(), variant="released")


def test_padding_between_slots_does_not_change_the_fit():
    """Mean and deviation are over the entries of the parameters, not the zeros between them."""
    u = drawn("shifted", SIZE)[:6400]
    padded = torch.cat([u, torch.zeros(64 * 100)])
    for z in (0.0, 3.0):
        expected = float(u.mean() + z * u.std())
        assert float(mean_and_deviations(padded, 6400, z)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("variant", TESTS)
def test_four_thirds_are_accepted_at_the_first_test(variant):
    """k = 30 and 40 large entries; at a later test, 1.5^2 times as high, none would pass."""
    u = torch.ones(600)
    u[:40] = 100 + 0.01 * torch.arange(40).float()
    start = mean_and_deviations(u, 600, normal_quantile(0.95 if variant == "paper" else 0.975))
    assert 2.25 * start > 101
    found = gradwire.compress(u, "gaussiank", k=30, variant=variant)
    assert found.indices.tolist() == list(range(40))
