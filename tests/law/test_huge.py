"""Finite gradients too large to add up: the step does not happen, and the next one is as ever."""

import pytest
import torch

import gradwire
from gradwire import path
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


def test_what_fp16_has_no_room_for_waits_in_the_residual():
    """Momentum outgrows fp16: without a loss scale, which could fall, every step was NaN."""
    wires, largest = cluster(2, "topk", "allgather", momentum=0.9), 0.0
    for step in range(20):
        huge = [g.sign() * 6e4 if step == 1 else g for g in gradients(2, step)]
        update = wires.average([g.half() for g in huge])
        assert update.isfinite().all(), step
        largest = max(largest, float(update.abs().max()))
    assert largest == torch.finfo(torch.float16).max


def test_with_a_loss_scale_an_overflow_stays_one():
    _, ok, _ = path.to_gradient(
        torch.tensor([1e5]), torch.tensor(True), torch.float16, torch.tensor(1.0)
    )
    assert not ok


def test_an_infinite_mean_is_no_large_one():
    for value in (torch.inf, torch.nan):
        mean = torch.tensor([1.0, value])
        update, ok, _ = path.to_gradient(mean, torch.tensor(True), torch.float16, None)
        assert not ok
        assert update.isnan().all()


def test_the_rest_of_a_large_fp16_mean_is_the_rounding():
    mean = torch.tensor([1e5, -7e4, 3.0])
    update, ok, rest = path.to_gradient(mean, torch.tensor(True), torch.float16, None)
    assert ok
    assert torch.equal(update.float() + rest, mean)
    assert update.tolist() == [65504, -65504, 3]
