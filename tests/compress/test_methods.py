"""The operators: what they choose, how well, and what they refuse."""

import math

import pytest
import torch

import gradwire
from gradwire.accumulate.layout import assign_offsets, size_of
from gradwire.compress import METHODS
from gradwire.kernels.draw import permuted
from gradwire.types import Memory, Slot


@pytest.mark.parametrize("method", METHODS)
def test_sparse_is_what_it_says(method):
    u = torch.randn(1003)
    sparse = gradwire.compress(u, method=method, density=0.05)
    n = sparse.indices.numel()
    assert sparse.indices.dtype == torch.int32
    assert n == int(sparse.count)
    assert n <= (1003 if method == "dense" else METHODS[method].bind({}).capacity(50, 1003))
    assert torch.equal(sparse.indices, sparse.indices.unique())
    assert torch.equal(sparse.values, u[sparse.indices.long()])
    assert sparse.size == 1003
    kept = u - sparse.dense()
    assert int((kept == 0).sum()) == n
    assert torch.equal(kept + sparse.dense(), u)


def test_k_and_density():
    u = torch.randn(1000)
    assert gradwire.compress(u, density=0.0001).indices.numel() == 1
    assert gradwire.compress(u, density=0.0125).indices.numel() == 13
    assert gradwire.compress(u, k=0).indices.numel() == 0
    assert gradwire.compress(u, k=1000).indices.numel() == 1000
    assert gradwire.compress(u).indices.numel() == 1


def test_topk_error_is_the_closed_form():
    """1 - p - 2 z phi(z) for Gaussian data, 1 - p (1 + L + L^2/2) for Laplace."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(10**6, generator=generator)
    laplace = -torch.log(torch.rand(10**6, generator=generator)) * normal.sign()
    for p, z in ((0.001, 3.2905267), (0.01, 2.5758293)):
        gauss = 1 - p - 2 * z * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        log = math.log(1 / p)
        for u, expected in ((normal, gauss), (laplace, 1 - p * (1 + log + log * log / 2))):
            kept = u - gradwire.compress(u, density=p).dense()
            measured = float(kept.square().sum() / u.square().sum())
            assert measured == pytest.approx(expected, abs=1.5e-3)


def test_randk_error_is_one_minus_p():
    u = torch.randn(10**5, generator=torch.Generator().manual_seed(1))
    memory = Memory()
    errors = [
        float(
            (u - METHODS["randk"].run(u, 10**4, memory).dense()).square().sum() / u.square().sum()
        )
        for _ in range(20)
    ]
    mean = sum(errors) / 20
    spread = (sum((e - mean) ** 2 for e in errors) / 19 / 20) ** 0.5
    assert abs(mean - 0.9) < 4 * spread + 1e-4


def test_randk_draws_are_uniform():
    """Each entry and each pair of neighbours equally often; chi-square within five sigma."""
    size, k, draws = 97, 10, 1500
    singles, pairs = torch.zeros(size), torch.zeros(size)
    memory = Memory(bundle=3)
    for _ in range(draws):
        chosen = METHODS["randk"].run(torch.ones(size), k, memory).dense()
        singles += chosen
        pairs += chosen * chosen.roll(1)
    for counts, p in ((singles, k / size), (pairs, k * (k - 1) / size / (size - 1))):
        expected = draws * p
        statistic = float(((counts - expected) ** 2 / (expected * (1 - p))).sum())
        assert abs(statistic - size) < 5 * math.sqrt(2 * size)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 97, 1000, 1001, 65537])
def test_permuted_is_a_permutation(size):
    for key in (0, 1, -(2**62)):
        out = permuted(torch.arange(size), size, torch.tensor(key))
        assert torch.equal(out.sort().values, torch.arange(size))


def draw(rank=0, bundle=0, skip=0, **options):
    memory = Memory(rank, bundle)
    u = torch.ones(1000)
    for _ in range(skip):
        METHODS["randk"].run(u, 20, memory, **options)
    return METHODS["randk"].run(u, 20, memory, **options).indices.tolist()


def test_randk_seeds():
    assert draw(rank=0, shared=True) == draw(rank=1, shared=True)
    assert draw(rank=0) != draw(rank=1), "every rank draws its own entries"
    assert draw(seed=1) != draw(seed=2)
    assert draw(bundle=1) != draw(bundle=2)
    assert draw(skip=1) != draw(skip=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"density": 0}, r"density must be in \(0, 1\], got 0\."),
        ({"density": -0.1}, r"density must be in \(0, 1\], got -0.1"),
        (
            {"density": 4.0},
            r"density must be in \(0, 1\], got 4.0. For a fixed number of entries use k=4.",
        ),
        ({"density": float("nan")}, r"density must be in \(0, 1\], got nan"),
        ({"density": "1%"}, r"density must be in \(0, 1\], got '1%'"),
        ({"k": 11}, r"k must be a whole number in 0..10, the size of u; got 11"),
        ({"k": -1}, r"k must be a whole number in 0..10"),
        ({"k": 2.5}, "got 2.5"),
        ({"k": 2, "density": 0.5}, "give density or k, not both"),
        ({"method": "topc"}, "unknown method 'topc'. Did you mean 'topk'"),
        ({"method": "randk", "sead": 3}, "unknown option of randk 'sead'. Did you mean 'seed'"),
        ({"method": "randk", "seed": "x"}, "option seed of randk must be int, got 'x'"),
        ({"seed": 3}, "method 'topk' has no options, got 'seed'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        gradwire.compress(torch.randn(10), **arguments)


@pytest.mark.parametrize(
    ("u", "message"),
    [
        (torch.zeros(2, 5), r"u must be flat, got shape \(2, 5\): pass u.reshape\(-1\)"),
        (torch.zeros(0), "u must have 1 to"),
        (torch.zeros(5, dtype=torch.int32), "floating-point dtype, got torch.int32"),
        (torch.tensor([1.0, float("nan"), float("inf")]), "u has 2 entries that are not finite"),
        ([1.0], "u must be a tensor, got list"),
    ],
)
def test_bad_vectors(u, message):
    with pytest.raises(ValueError, match=message):
        gradwire.compress(u, k=0)


def test_randk_never_draws_the_padding_between_slots():
    slots = assign_offsets(
        [Slot(str(n), (n,), (1,), torch.float32, numel=n) for n in (5, 64, 1, 70)]
    )
    memory = Memory()
    memory.lay_out(slots, torch.device("cpu"))
    u = torch.zeros(size_of(slots))
    for slot in slots:
        u[slot.offset : slot.offset + slot.numel] = 1
    drawn = METHODS["randk"].run(u, 140, memory)
    assert torch.equal(drawn.dense(), u)
    assert float(METHODS["randk"].run(u, 70, memory).values.sum()) == 70
