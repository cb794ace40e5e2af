import math

import pytest
import torch

from gradwire.workbench.study import theory

# p, (1 - p)^2, the closed forms, and what 10^6 draws gave, to the digits that they are good for.
VALUES = [
    (1e-4, 0.99980, 0.998297, 0.994737),
    (1e-3, 0.998001, 0.987304, 0.968234),
    (1e-2, 0.980100, 0.915508, 0.837910),
    (0.0625, 0.878906, 0.675296, 0.523987),
    (0.1, 0.81, 0.560714, 0.404647),
    (0.5, 0.25, 0.071326, 0.033313),
]


@pytest.mark.parametrize(("p", "bound", "gaussian", "laplace"), VALUES)
def test_closed_forms(p, bound, gaussian, laplace):
    assert theory.random_error(p) == 1 - p
    assert theory.paper_bound(p) == pytest.approx(bound, abs=5e-6)
    assert theory.gaussian_error(p) == pytest.approx(gaussian, abs=5e-7)
    assert theory.laplace_error(p) == pytest.approx(laplace, abs=5e-7)


def draw(kind, size=10**6):
    generator = torch.Generator().manual_seed(3)
    if kind == "gaussian":
        return torch.randn(size, generator=generator)
    return torch.empty(size).exponential_(generator=generator)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_draws_agree_with_the_closed_forms(kind):
    form = getattr(theory, f"{kind}_error")
    shares = [1e-3, 1e-2, 0.1, 0.5]
    found = theory.topk_errors(draw(kind), [round(p * 10**6) for p in shares])
    assert found == pytest.approx([form(p) for p in shares], abs=1e-3)


def test_the_error_is_what_the_operator_leaves():
    import gradwire

    u = draw("gaussian", 5000)
    left = u - gradwire.compress(u, k=37).dense()
    share = (left.square().sum() / u.square().sum()).item()
    assert theory.topk_errors(u, [37]) == pytest.approx([share], rel=1e-5)


@pytest.mark.parametrize(
    ("c", "random", "paper", "gaussian", "laplace"),
    [
        (1000, 1e6, 250_250, 6_204, 991),
        (250, 62_500, 15_688, 610, 132),
        (100, 10_000, 2_525, 140, 38),
    ],
)
def test_iterations_of_theorem_2(c, random, paper, gaussian, laplace):
    p = 1 / c
    assert theory.iterations(theory.random_error(p)) == pytest.approx(random)
    assert theory.iterations(theory.paper_bound(p)) == pytest.approx(paper, abs=0.6)
    assert c**4 / (2 * c - 1) ** 2 == pytest.approx(paper, abs=0.6)
    assert theory.iterations(theory.gaussian_error(p)) == pytest.approx(gaussian, abs=0.6)
    assert theory.iterations(theory.laplace_error(p)) == pytest.approx(laplace, abs=0.6)


@pytest.mark.parametrize(
    ("name", "p", "holds"),
    [
        ("normal", 1e-3, True),
        ("cut at 1", 1e-3, False),
        ("cut at 1.3", 1e-3, True),
        ("constant", 0.1, False),
        ("quartic", 0.1, False),
        ("off centre", 0.5, False),
        ("just convex", 0.5, True),
        ("just concave", 0.5, False),
    ],
)
def test_the_check_of_the_bound_agrees_with_the_bound(name, p, holds):
    normal = draw("gaussian", 200_000)
    flat = torch.rand(200_000, generator=torch.Generator().manual_seed(1))
    rms = {"cut at 1": 1.0, "cut at 1.3": 1.3}.get(name, math.inf)
    u = {
        "constant": torch.ones(200_000),
        "quartic": flat**0.25,
        "just convex": flat**0.55,
        "just concave": flat**0.45,
        "off centre": normal + 3,
    }.get(name, normal.clamp(-rms, rms))
    k = round(p * u.numel())
    assert theory.bound_holds(u, k) is holds
    assert (theory.topk_errors(u, [k])[0] <= theory.paper_bound(p)) is holds


def test_the_profile_falls_from_one():
    places, squares = theory.rank_profile(torch.tensor([1.0, -4.0, 2.0, 0.0, 3.0]), 5)
    assert places == [0, 0.25, 0.5, 0.75, 1]
    assert squares == pytest.approx([1, 9 / 16, 4 / 16, 1 / 16, 0])


@pytest.mark.parametrize("size", [120, 61_706, 2**24 + 4, 66_034_000])
def test_the_places_of_a_profile_end_with_the_last_entry(size):
    found = theory.spread_indices(size, 120)
    assert (int(found[0]), int(found[-1])) == (0, size - 1)
    assert bool((found.diff() > 0).all())
