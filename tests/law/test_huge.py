"""Finite gradients too large to add up: the step does not happen, and the next one is as ever."""

import pytest
import torch

import gradwire
from gradwire.compress import METHODS
from gradwire.exchange import EXCHANGES
from gradwire.kernels.scan import LARGEST_U
from tests.exchange.cases import allowed, options, owned_after
from tests.law.cases import NOTHING, violation
from tests.law.test_law import CASES

SIZE, K = 300, 30


def gradients(world, step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(SIZE, generator=generator) for _ in range(world)]


def cluster(world, method, exchange, values="fp32", **fields):
    more = options(exchange, SIZE, K)
    return gradwire.VirtualCluster(
        world, method=method, exchange=exchange, values=values, density=0.1, options=more, **fields
    )


HUGE = {
    "1e38": lambda gs: [1e38 * g for g in gs],
    "3e38": lambda gs: [3e38 * g.sign() for g in gs],
    "one rank": lambda gs: [1e38 * gs[0], *gs[1:]],
}


def around(second, *args, **fields):
    """What a second step that does not happen leaves, and what two more steps then bring."""
    world = len(second)
    wires = cluster(world, *args, **fields)
    wires.average(gradients(world, 0))
    assert wires.average(second).isnan().all()
    out = [wires.residual(rank) for rank in range(world)]
    out += [wires.average(gradients(world, step)) for step in (2, 3)]
    return out + [wires.residual(rank) for rank in range(world)]


def check(world, kind, *args, **fields):
    huge = HUGE[kind](gradients(world, 1))
    infinite = [torch.where(g.abs() > LARGEST_U, torch.inf, g) for g in huge]
    for found, expected in zip(
        around(huge, *args, **fields), around(infinite, *args, **fields), strict=True
    ):
        assert found.isfinite().all()
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("method", "exchange", "values"), CASES)
def test_a_huge_gradient_is_as_an_infinite_one(method, exchange, values):
    check(2, "1e38", method, exchange, values)
    check(3, "one rank", method, exchange, values)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("kind", HUGE)
def test_with_every_exchange(exchange, kind):
    for world in (2, 3):
        check(world, kind, "topk", exchange)


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_momentum(nesterov):
    for kind in HUGE:
        check(3, kind, "topk", "gtopk", momentum=0.9, nesterov=nesterov)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.filterwarnings("ignore:a sketch of")
def test_the_largest_that_gets_in_does_no_harm(exchange):
    wires, old, before = cluster(4, "topk", exchange), [torch.zeros(SIZE)] * 4, NOTHING
    for step in range(4):
        g = gradients(4, step)
        if step == 0:
            for rank, own in enumerate(g):
                own[-K:] = LARGEST_U if rank < 2 else 0
                own[:K] = 0 if rank < 2 else LARGEST_U
        update, new = wires.average(g), [wires.residual(rank) for rank in range(4)]
        after = owned_after(wires._states, SIZE)
        u = [a + b for a, b in zip(g, old, strict=True)]
        assert violation(u, update, new, before, after) <= 4
        if step == 0 and exchange == "gtopk":
            # Two ranks' entries were cut and wait with one of them: more than gets in.
            assert new[0].amax() == 2 * LARGEST_U
        old, before = new, after


def test_momentum_does_not_stop_all_later_steps():
    wires = cluster(2, "topk", "gtopk", momentum=0.9)
    wires.average([torch.full((SIZE,), 0.9 * LARGEST_U)] * 2)
    for step in range(3):
        assert wires.average(gradients(2, step)).isfinite().all()
    assert wires.average([torch.full((SIZE,), LARGEST_U)] * 2).isnan().all()
    assert wires.average(gradients(2, 4)).isfinite().all()


@pytest.mark.parametrize(
    ("method", "exchange"), [(m, e) for m, e, values in allowed() if values == "fp32"]
)
def test_size_does_not_matter(method, exchange):
    """A power of two changes no digit, if nothing on the way overflows; squares would."""
    small, large = (cluster(2, method, exchange) for _ in range(2))
    for step in range(3):
        g = gradients(2, step)
        expected = small.average(g) * 2.0**90
        assert torch.equal(large.average([x * 2.0**90 for x in g]), expected)


def test_every_method_has_its_turn():
    assert {method for method, _, _ in CASES} >= set(METHODS) - {"dense", "randk"}
