"""How many entries each selector finds, on every kind of data, and which."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from gradwire.compress import METHODS
from gradwire.kernels.select import block_size
from gradwire.types import Memory, Scan
from tests.distributions import MAKERS, draw

SIZE = 10**6
CUT = ("gaussiank", "dgc", "trimmed", "mstopk")
"""Selectors with an exact cut as an option: they then find what topk finds."""
CHOOSING = (*CUT, "bisect", "sidco", "threshold", "chunked")

drawn = functools.cache(draw)


def scanned(u, k):
    """What the pipeline's scan would leave for this u."""
    group = block_size(u.numel(), k)
    padded = torch.nn.functional.pad(u, (0, -u.numel() % 64))
    maxima = padded.abs().view(-1, group).amax(1) if group else None
    return padded, Scan(torch.tensor(True), maxima, group)


def choose(method, u, k, memory=None, **options):
    padded, scan = scanned(u, k)
    memory = Memory() if memory is None else memory
    return METHODS[method].run(padded, k, memory, scan, **options).trim()


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("density", [0.1, 0.01, 0.001, 0.0001])
def test_count_and_choice(kind, density):
    u, k = drawn(kind, SIZE), round(density * SIZE)
    exact = choose("topk", u, k)
    for method in CUT:
        sparse = choose(method, u, k, exact=True)
        n = int((exact.values != 0).sum())
        assert int(sparse.count) == n, method
        assert abs(n / k - 1) <= 0.05
        assert torch.equal(sparse.indices, exact.indices[exact.values != 0]), method
    bands = {"gaussiank": (2 / 3, 4 / 3), "dgc": (0.8, 1.3), "trimmed": (1, 4)}
    nonzero = int((u != 0).sum())
    for method, (low, high) in bands.items():
        assert min(low * k, nonzero) <= int(choose(method, u, k).count) <= high * k, method
    assert int(choose("mstopk", u, k).count) == int((exact.values != 0).sum())
    n = int(choose("bisect", u, k).count)
    assert k / 2 <= n < 2 * k
    n = int(choose("chunked", u, k).count)
    whole, share = divmod(SIZE, 4096)[0], max(1, round(4096 * k / SIZE))
    assert n == pytest.approx(whole * share, rel=0.005)
    assert abs(n / k - 1) <= 0.03 or density == 0.0001


@pytest.mark.parametrize("kind", ["gaussian", "t3", "layers", "zeros"])
def test_what_a_threshold_leaves_is_smaller_than_what_it_takes(kind):
    u, k = drawn(kind, SIZE), 1000
    for method in CHOOSING[:-1]:
        if method == "mstopk":
            continue  # its run is random
        sparse = choose(method, u, k)
        if int(sparse.count):
            assert sparse.values.abs().min() >= (u - sparse.dense()[:SIZE]).abs().max()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    method=st.sampled_from(CHOOSING),
    kind=st.sampled_from(list(MAKERS)),
    size=st.integers(1, 9000),
    share=st.sampled_from([0.0, 0.001, 0.03, 0.3, 1.0]),
    seed=st.integers(0, 99),
    scan=st.booleans(),
)
def test_any_size(method, kind, size, share, seed, scan):
    u, k = draw(kind, size, seed), round(share * size)
    sparse = choose(method, u, k) if scan else gradwire.compress(u, method=method, k=k)
    n, padded = sparse.indices.numel(), size + -size % 64
    assert n <= METHODS[method].bind({}).capacity(k, padded if scan else size)
    assert torch.equal(sparse.indices, sparse.indices.unique())
    inside = sparse.indices < size
    assert inside.all() or not sparse.values[~inside].any()
    assert torch.equal(sparse.values[inside], u[sparse.indices[inside].long()])
    if method in CUT:
        sparse = choose(method, u, k, exact=True)
        exact = gradwire.compress(u, k=k)
        assert torch.equal(sparse.indices, exact.indices[exact.values != 0])


def closed_form(kind, p):
    """What the n largest of iid entries leave of the energy: Gaussian, Laplace."""
    if kind == "laplace":
        log = math.log(1 / p)
        return 1 - p * (1 + log + log * log / 2)
    z = math.sqrt(2) * float(torch.erfinv(torch.tensor(1 - p, dtype=torch.float64)))
    return 1 - p - 2 * z * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_contraction_is_the_closed_form(kind, density):
    """Within 4 standard errors; any threshold that finds n entries is top-n."""
    u, k = drawn(kind, SIZE), round(density * SIZE)
    squares = u.double().square()
    for method in ("topk", *CUT, "bisect", "sidco"):
        sparse = choose(method, u, k)
        error = 1 - float(sparse.values.double().square().sum() / squares.sum())
        edge = float(sparse.values.double().abs().min()) ** 2
        influence = (squares - edge).clamp(min=0) - (1 - error) * squares
        standard = float(influence.std() / squares.mean()) / SIZE**0.5
        expected = closed_form(kind, int(sparse.count) / SIZE)
        assert abs(error - expected) <= 4 * standard, method


def test_contraction_of_randk():
    u, k = drawn("laplace", SIZE), 10**5
    squares = u.double().square()
    sparse = choose("randk", u, k)
    error = 1 - float(sparse.values.double().square().sum() / squares.sum())
    standard = math.sqrt(k * 0.9) * float(squares.std() / squares.sum())
    assert abs(error - 0.9) <= 4 * standard
