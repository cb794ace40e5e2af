"""The methods choose what loops written after their papers choose, and not what top-k chooses."""

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

import gradwire
from gradwire.compress.dgc import sample_runs
from gradwire.compress.draws import next_number
from gradwire.types import Memory
from tests.compress.test_selectors import choose
from tests.distributions import MAKERS, draw

SIZE = 64_000
CASES = [(kind, k) for kind in MAKERS for k in (64, 640, 6400)]


def beyond(u, threshold):
    return np.flatnonzero(np.abs(u.numpy()) > np.float32(threshold)).tolist()


def indices_of(sparse):
    return sparse.indices.tolist()


def dgc_loop(u, k, memory):
    """The published loop on the same sample; also how often the threshold fell, and if it cut."""
    sampled = sample_runs(u, max(SIZE // 100, 2 * SIZE // k), next_number(memory, u.device))
    rank = math.ceil(sampled.numel() * k / SIZE)
    threshold, magnitude = sampled.sort(descending=True).values[rank - 1], u.abs()
    rounds = 0
    threshold = threshold.clamp(min=1e-45)  # zeros are not sent
    while int((magnitude >= threshold).sum()) < 0.8 * k and rounds < 10:
        threshold, rounds = threshold * 0.8, rounds + 1
    many = int((magnitude >= threshold).sum()) > 1.3 * k
    if many:
        threshold = magnitude.sort(descending=True).values[k - 1]
    return (magnitude >= threshold).nonzero().flatten().tolist(), rounds, many


def test_dgc_is_the_published_loop():
    rounds, cuts, differs = set(), 0, 0
    kinds = ("gaussian", "t3", "layers", "zeros", "uniform")
    for kind, k in ((kind, k) for kind in kinds for k in (64, 640, 6400)):
        for rank in range(2):
            u = draw(kind, SIZE, seed=rank)
            expected, fell, many = dgc_loop(u, k, Memory(rank))
            assert indices_of(choose("dgc", u, k, Memory(rank))) == expected, (kind, k, rank)
            rounds.add(fell)
            cuts += many
            differs += len(expected) != k
    assert {0, 1} <= rounds, "some thresholds were too high"
    assert cuts, "and some too low"
    assert differs > 10, "top-k would not have done"


@pytest.mark.parametrize(("n", "sent"), [(100, 100), (130, 130), (131, 130)])
def test_dgc_accepts_thirteen_tenths(n, sent):
    """k = 100 of a whole sample: equal entries pass together, and 1.3 k of them fit."""
    u = torch.ones(SIZE)
    u[:n] = 5
    assert indices_of(choose("dgc", u, 100, sample=1.0)) == list(range(sent))


@pytest.mark.parametrize(("size", "sent"), [(11.0, 647), (10.5, 7)])
def test_dgc_lowers_its_threshold_ten_times(size, sent):
    """The sample sees seven entries of 100; 0.8^10 of that is 10.7."""
    u, k = torch.ones(SIZE), 640
    order = torch.arange(float(SIZE))
    seen = sample_runs(order, SIZE // 100, next_number(Memory(), u.device)).long()
    unseen = torch.ones(SIZE, dtype=torch.bool)
    unseen[seen] = False
    u[unseen.nonzero().flatten()[:640]] = size
    u[seen[:7]] = 100
    assert int(choose("dgc", u, k).count) == sent


def test_another_sample_of_dgc_chooses_other_entries():
    """Also the next one; a checkpoint that knows the draws goes on with the same."""
    u = draw("gaussian", SIZE)
    memory, again = Memory(), Memory()
    first = [indices_of(choose("dgc", u, 640, memory, sample=0.2)) for _ in range(6)]
    assert len({len(found) for found in first}) > 2
    assert first == [indices_of(choose("dgc", u, 640, again, sample=0.2)) for _ in range(6)]
    assert int(memory["draws"]) == 6
    counts = {int(choose("dgc", u, 640, Memory(), sample=s).count) for s in (0.1, 0.2, 0.5)}
    assert len(counts) == 3
    assert int(choose("dgc", u, 640, Memory(), sample=1.0).count) == 640


@pytest.mark.parametrize(("kind", "k"), CASES)
def test_trimmed_is_the_published_loop(kind, k):
    """What 4 k cannot hold is top-k's business: the loop's entries are those beyond 4 k."""
    u = drawn_once(kind)
    magnitude = u.abs()
    mean, largest = float(magnitude[::3].mean()), float(magnitude.max())
    ratio = 0.8
    while len(expected := beyond(u, max(0.0, mean + ratio * (largest - mean)))) < k:
        ratio -= 0.2
    found = choose("trimmed", u, k, capacity=1000.0)
    assert abs(int(found.count) - len(expected)) <= 2
    capped = choose("trimmed", u, k)
    assert int(capped.count) == min(4 * k, int(found.count))
    assert torch.equal(capped.indices, choose("topk", u, int(capped.count)).indices)


def drawn_once(kind):
    return draw(kind, SIZE, seed=1)


def test_trimmed_is_not_top_k():
    assert all(int(choose("trimmed", drawn_once(kind), 640).count) > 640 for kind in MAKERS)


def mstopk_loop(u, k, rounds, memory):
    """The published loop: t1, which at most k pass, t2, which more pass, and a run between."""
    magnitude = u.abs()
    every = 3
    mean, largest = float(magnitude[::every].double().mean()), float(magnitude.max())
    low, high, t1, t2, k1, k2 = 0.0, 1.0, largest, 0.0, 0, u.numel()
    for _ in range(rounds):
        ratio = (low + high) / 2
        t = np.float32(np.float32(mean) + ratio * (largest - float(np.float32(mean))))
        n = len(beyond(u, t))
        if n <= k:
            high = ratio
            if n > k1:
                k1, t1 = n, t
        else:
            low = ratio
            if n < k2:
                k2, t2 = n, t
    sure = beyond(u, t1)
    band = [i for i in beyond(u, t2) if i not in set(sure)]
    wanted = k - len(sure)
    start = int(next_number(memory, u.device)) % max(1, len(band) - wanted + 1)
    return sorted(sure + band[start : start + wanted]), len(band)


@pytest.mark.parametrize("rounds", [8, 25])
def test_mstopk_is_the_published_loop(rounds):
    differs = 0
    for kind in MAKERS:
        u, k = drawn_once(kind), 640
        expected, band = mstopk_loop(u, k, rounds, Memory(2))
        if len(expected) + band > 2 * k:
            continue  # the run is then drawn among 2 k
        found = indices_of(choose("mstopk", u, k, Memory(2), rounds=rounds))
        assert found == expected, kind
        differs += found != indices_of(choose("topk", u, k))
    assert differs or rounds == 25


def test_equal_entries_of_mstopk_are_a_random_run():
    """Top-k would take the first ones."""
    u = torch.cat([torch.full((200,), 2.0), torch.ones(800)])
    starts = set()
    for rank in range(6):
        found = indices_of(choose("mstopk", u, 300, Memory(rank)))
        assert found[:200] == list(range(200))
        run = found[200:]
        assert run == list(range(run[0], run[0] + 100))
        starts.add(run[0])
    assert len(starts) > 1


# --- gaussiank ---


def fit(u, k):
    """z sqrt(mean u^2) of the sample."""
    sampled = u[::3].double()
    return NormalDist().inv_cdf(1 - k / SIZE / 2) * float(sampled.square().mean().sqrt())


@pytest.mark.parametrize("k", [640, 6400])
def test_gaussiank_sends_what_passes_its_fit(k):
    """On normal entries the first test is accepted, and its count is not k."""
    u = draw("gaussian", SIZE, seed=3)
    expected = beyond(u, fit(u, k))
    assert len(expected) != k
    assert indices_of(choose("gaussiank", u, k)) == expected


def peaks(n):
    """`n` large entries of different sizes among 6000 that are alike."""
    u = torch.ones(6000)
    u[:n] = 100 + 0.01 * torch.arange(n).float()
    return u


@pytest.mark.parametrize(("n", "accepted"), [(19, False), (20, True), (40, True), (41, False)])
def test_gaussiank_accepts_two_thirds_to_four_thirds(n, accepted):
    """k = 30: 20 to 40 entries. The fit lies between the large entries and the rest."""
    found = choose("gaussiank", peaks(n), 30)
    if accepted:
        assert indices_of(found) == list(range(n))
    else:
        assert int(found.count) != n
    assert 20 <= int(found.count) <= 40


TIES = {
    "three sizes": lambda: torch.randint(0, 3, (SIZE,), generator=seeded()).float(),
    "signs": lambda: torch.randint(0, 2, (SIZE,), generator=seeded()).float() * 2 - 1,
    "one hot": lambda: (torch.arange(SIZE) == 77) * 5.0,
    "few": lambda: torch.cat([torch.zeros(SIZE - 50), torch.arange(50).float()]),
    "bf16": lambda: draw("laplace", SIZE).bfloat16().float(),
    "outlier": lambda: torch.cat([torch.full((1,), 1e30), draw("gaussian", SIZE - 1)]),
    "tiny": lambda: draw("t3", SIZE) * 1e-38,
    "heavy": lambda: draw("gaussian", SIZE) / torch.rand(SIZE, generator=seeded()) ** 3,
}


def seeded():
    return torch.Generator().manual_seed(11)


@pytest.mark.parametrize("k", [1, 7, 64, 640, 6400])
@pytest.mark.parametrize("kind", [*MAKERS, *TIES])
def test_gaussiank_is_within_its_band_on_any_data(kind, k):
    """A capacity of 4k/3 cuts ties, so only too few entries that are not zero leave the band."""
    u = TIES[kind]() if kind in TIES else drawn_once(kind)
    for found in (choose("gaussiank", u, k), gradwire.compress(u, "gaussiank", k=k)):
        least = min(2 * k / 3, int((u != 0).sum()))
        assert least <= int(found.count) <= max(1, 4 * k // 3)


def test_what_gaussiank_chooses_is_no_exact_selection(monkeypatch):
    """No body that asks for the k largest could send so many different numbers."""
    counts = {int(choose("gaussiank", drawn_once(kind), 640).count) for kind in MAKERS}
    assert len(counts) >= 7


@pytest.mark.parametrize("method", ["gaussiank", "dgc", "trimmed", "mstopk"])
def test_the_exact_cut_makes_top_k_of_each(method):
    for kind in ("gaussian", "t3", "uniform", "layers"):
        u = drawn_once(kind)
        assert indices_of(choose(method, u, 640, exact=True)) == indices_of(choose("topk", u, 640))
