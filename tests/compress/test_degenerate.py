"""Inputs on which fits fail: top-k's answer, or the documented empty selection; bad options."""

import pytest
import torch

import gradwire
from gradwire.compress import METHODS
from gradwire.types import Memory
from tests.compress.test_selectors import CHOOSING, CUT, choose

SIZE, K = 9600, 96


def one_hot():
    u = torch.zeros(SIZE)
    u[4321] = -2.0
    return u


INPUTS = {
    "zeros": torch.zeros(SIZE),
    "constant": torch.full((SIZE,), 0.5),
    "two signs": torch.full((SIZE,), 0.5) * (1 - 2 * (torch.arange(SIZE) % 2)),
    "one hot": one_hot(),
    "fewer than k": torch.where(torch.arange(SIZE) % 200 == 7, torch.arange(SIZE) - 5000.0, 0.0),
    "denormal": torch.full((SIZE,), 1e-42),
    "huge": torch.randn(SIZE, generator=torch.Generator().manual_seed(0)) * 1e37,
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("scan", [True, False])
def test_exact_cuts_give_the_answer_of_topk(name, scan):
    u = INPUTS[name]
    expected = gradwire.compress(u, k=K)
    real = expected.values != 0
    for method in CUT:
        more = {"exact": True}
        found = choose(method, u, K, **more) if scan else gradwire.compress(u, method, k=K, **more)
        assert torch.equal(found.indices, expected.indices[real]), method


COUNTS = {
    "gaussiank": {"zeros": 0, "constant": 4 * K // 3, "two signs": 4 * K // 3, "one hot": 1},
    "dgc": {"zeros": 0, "constant": 124, "two signs": 124, "one hot": 1},
    "trimmed": {"zeros": 0, "constant": 4 * K, "two signs": 4 * K, "one hot": 1},
    "mstopk": {"zeros": 0, "constant": K, "two signs": K, "one hot": 1},
    "bisect": {"zeros": 0, "constant": 2 * K, "two signs": 2 * K, "one hot": 1},
    "sidco": {"zeros": 0, "constant": 0, "two signs": 0},
    "threshold": {"zeros": 0, "constant": 0, "two signs": 0, "one hot": 1},
    "chunked": {"zeros": 96, "constant": 96, "one hot": 96},
    "paper": {"zeros": 0, "one hot": 1},
    "released": {"zeros": 0, "one hot": 1},
}


@pytest.mark.parametrize("method", COUNTS)
def test_documented_counts(method):
    options = {"variant": method} if method in ("paper", "released") else {}
    for name, n in COUNTS[method].items():
        found = choose("gaussiank" if options else method, INPUTS[name], K, **options)
        assert int(found.count) == n, name


@pytest.mark.parametrize("method", CHOOSING)
def test_never_a_full_send(method):
    for u in INPUTS.values():
        found = choose(method, u, K)
        assert int(found.count) <= METHODS[method].bind({}).capacity(K, SIZE) <= 4 * K
        assert torch.isfinite(found.values).all()


def test_threshold_value_is_a_magnitude_that_counts():
    u = torch.tensor([0.5, -1.0, 0.99, 2.0, 0.0])
    chosen = gradwire.compress(u, method="threshold", k=2, value=1)
    assert chosen.indices.tolist() == [1, 3]
    assert gradwire.compress(
        u, method="threshold", k=1, value=0.1, capacity=2.0
    ).indices.tolist() == [
        1,
        3,
    ]


def test_threshold_comes_from_the_first_u_that_is_not_zero():
    memory, u = Memory(), torch.randn(SIZE)
    for scale, expected in ((0, 0), (3, 3), (100, 3)):
        choose("threshold", scale * u, K, memory)
        norm = float(u.norm()) * expected / (2 * K**0.5)
        assert float(memory["threshold"]) == pytest.approx(norm, rel=1e-5)


def test_dgc_never_cuts_by_position():
    """The larger entries are at the end, and they are chosen, however many."""
    u = torch.linspace(1, 2, SIZE)
    found = choose("dgc", u, K).indices.tolist()
    assert found == list(range(SIZE - len(found), SIZE))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"method": "gaussiank", "variant": "papr"},
            "unknown variant of gaussiank 'papr'. Did you",
        ),
        ({"method": "gaussiank", "variant": "paper", "exact": True}, "sends what passes"),
        ({"method": "trimmed", "capacity": 0.5}, "capacity must be at least 1"),
        ({"method": "trimmed", "capacity": 2.0, "exact": True}, "capacity has no effect"),
        ({"method": "sidco", "capacity": float("nan")}, "capacity must be at least 1"),
        ({"method": "threshold", "value": -1.0}, "value of threshold must be a magnitude above 0"),
        ({"method": "threshold", "value": "x"}, "option value of threshold must be float, got 'x'"),
        ({"method": "chunked", "chunk": 0}, "chunk must be at least 1 entry, got 0"),
        ({"method": "dgc", "sample": 1.5}, r"sample of dgc must be a share in \(0, 1\]"),
        (
            {"method": "randk", "unbiased": True, "feedback": True},
            "unbiased=True excludes feedback",
        ),
        ({"method": "mstopk", "rounds": 31}, "rounds of mstopk must be in 1..30, got 31"),
    ],
    ids=str,
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        gradwire.compress(torch.randn(100), **options)
    with pytest.raises(ValueError, match=message):
        gradwire.Config(
            method=options["method"], options={k: v for k, v in options.items() if k != "method"}
        )


def test_a_sample_too_small_for_the_density_names_the_smallest():
    u = torch.randn(10_000)
    message = r"sample=0.01 takes 100 of 10,000 entries.* k=10: at least 0.2, or 0"
    with pytest.raises(ValueError, match=message):
        gradwire.compress(u, method="dgc", k=10, sample=0.01)
    assert 8 <= gradwire.compress(u, method="dgc", k=10, sample=0.2).indices.numel() <= 13
    assert gradwire.compress(u, method="dgc", k=1, sample=1.0).indices.numel() == 1
