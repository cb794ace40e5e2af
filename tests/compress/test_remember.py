"""Methods that remember go on after a checkpoint as if nothing had happened; randk forgets."""

import pytest
import torch

import gradwire
from gradwire.compress import METHODS
from gradwire.types import Memory
from tests.distributions import draw


def gradients(step, size=6400):
    return [draw("t3", size, seed=10 * step + rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("method", "options", "kept"),
    [
        ("sidco", {}, {"stages", "calls", "ratios"}),
        ("threshold", {}, {"threshold"}),
        ("randk", {"feedback": False}, {"draws"}),
        ("gaussiank", {"variant": "paper"}, set()),
        ("gaussiank", {}, set()),
        ("dgc", {"sample": 0.3}, {"draws"}),
        ("mstopk", {"rounds": 6}, {"draws"}),
    ],
)
def test_resumed_is_bit_equal(method, options, kept):
    def fresh():
        return gradwire.VirtualCluster(2, method=method, density=0.01, **options)

    whole, first, second = fresh(), fresh(), fresh()
    second.average(gradients(99))
    for step in range(3):
        whole.average(gradients(step))
        first.average(gradients(step))
    for old, new in zip(first._states, second._states, strict=True):
        assert set(old.bundles[0].memory) == kept
        new.load_state_dict(old.state_dict())
    for step in range(3, 7):
        expected, found = whole.average(gradients(step)), second.average(gradients(step))
        assert torch.equal(expected, found)
    for rank in range(2):
        assert torch.equal(whole.residual(rank), second.residual(rank))


@pytest.mark.parametrize("options", [{"feedback": False}, {"unbiased": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_randk_without_feedback_forgets(options, dtype):
    cluster = gradwire.VirtualCluster(4, method="randk", density=0.1, shared=True, **options)
    for step in range(3):
        g = [torch.randn(1000).to(dtype) for _ in range(4)]
        update = cluster.average(g)
        assert not any(cluster.residual(rank).any() for rank in range(4))
        drawn = update != 0
        assert 90 <= int(drawn.sum()) <= 100
        mean = torch.stack(g).float().mean(0) * (10 if "unbiased" in options else 1)
        near = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(update.float()[drawn], mean[drawn], **near)
        if step == 1:
            cluster.skip_step()
    assert cluster.stats().achieved_density == pytest.approx(0.1)


def test_flush_sends_the_gradient_alone():
    cluster = gradwire.VirtualCluster(2, method="randk", density=0.1, unbiased=True)
    cluster.average([torch.randn(1000)] * 2)
    g = torch.randn(1000)
    cluster.flush()
    assert torch.equal(cluster.average([g, g]), g)


def test_unbiased_is_right_on_average():
    """sum of C(u) over many draws -> sum of u, within 4 standard errors."""
    u, memory, k, draws = draw("laplace", 2000), Memory(), 200, 400
    run = METHODS["randk"].run
    mean = sum(run(u, k, memory, unbiased=True).dense() for _ in range(draws)) / draws
    deviation = u.abs() * ((2000 / k - 1) / draws) ** 0.5
    z = ((mean - u) / deviation)[u != 0]
    assert abs(float(z.square().mean()) - 1) < 4 * (2 / 2000) ** 0.5 + 0.1
    plain = run(u, k, Memory())
    scaled = run(u, k, Memory(), unbiased=True)
    assert torch.equal(scaled.indices, plain.indices)
    assert torch.equal(scaled.values, plain.values * 10)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("gaussiank", {"variant": "paper"}),
        ("gaussiank", {"variant": "released"}),
        ("gaussiank", {}),
        ("dgc", {"exact": True}),
        ("trimmed", {"capacity": 1.0}),
        ("mstopk", {"rounds": 5}),
        ("threshold", {"value": 1.0, "capacity": 2}),
        ("chunked", {"chunk": 100}),
        ("dgc", {"sample": 0.5}),
        ("randk", {"shared": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("exchange", ["allgather", "union", "gtopk"])
def test_law_of_the_variants(method, options, exchange):
    cluster = gradwire.VirtualCluster(
        3, method=method, exchange=exchange, density=0.05, values="bf16", **options
    )
    total, updates = torch.zeros(700).double(), torch.zeros(700).double()
    for step in range(4):
        g = [draw("layers", 700, seed=3 * step + rank) for rank in range(3)]
        total += torch.stack(g).double().mean(0)
        updates += cluster.average(g).double()
        kept = torch.stack([cluster.residual(rank) for rank in range(3)]).double().mean(0)
        torch.testing.assert_close(updates + kept, total, rtol=1e-5, atol=1e-5)
    assert updates.any()


@pytest.mark.parametrize("method", ["dgc", "mstopk", "randk"])
def test_a_state_of_an_older_release_loads(method):
    """dgc and mstopk kept no draws, randk had shared=True by default, stats no length exchanges."""
    cluster, fresh = (gradwire.VirtualCluster(2, method=method, density=0.01) for _ in range(2))
    cluster.average(gradients(0))
    fresh.average(gradients(1))
    for old, new in zip(cluster._states, fresh._states, strict=True):
        saved = old.state_dict()
        del saved["counts"]["length_exchanges"]
        if method != "randk":
            for memory in saved["memory"]:
                del memory["draws"]
        new.load_state_dict(saved)
    fresh.average(gradients(2))
    assert [int(s.bundles[0].memory["draws"]) for s in fresh._states] == [
        1 + (method == "randk")
    ] * 2
    assert fresh.stats().length_exchanges == 0
