"""Every exchange with every method and encoding it takes, any number of ranks."""

import pytest
import torch

import gradwire
from gradwire.accumulate.schedule import entry_count
from gradwire.encode import Encoding
from gradwire.exchange import EXCHANGES
from gradwire.types import align
from tests.exchange.cases import SKETCHES, Hand, allowed, options
from tests.law.cases import NOTHING, gradients, violation

WORLDS = [1, 2, 3, 4, 5, 6, 8]
KINDS = ["independent", "correlated", "identical", "heavy", "one worker", "zeros", "layers"]
SIZES = [1, 64, 129, 500]
CASES = allowed(("topk", "randk"))


def extra(exchange, size, k, world):
    out = options(exchange, size, k)
    if exchange == "hierarchical":
        out["local"] = {4: 2, 6: 3, 8: 4}.get(world, 0)
    return out


@pytest.mark.parametrize(("method", "exchange", "values"), CASES)
def test_law_and_equal_bits(method, exchange, values):
    """A worker with nothing to send is among them: "one worker" leaves the others zeros."""
    generator = torch.Generator().manual_seed(len(exchange + values))
    for i, world in enumerate(WORLDS):
        # Exchanges see no method, so the second one needs no second kind of data.
        for j in range(2 * i, 2 * i + (2 if method == "topk" else 1)):
            kind, size = KINDS[j % len(KINDS)], SIZES[(i + j) % len(SIZES)]
            k = max(1, size // (3, 10, 40)[j % 3])
            indices = ("int32", "packed", "auto")[(i + j) % 3]
            more = extra(exchange, size, k, world)
            hand = Hand(exchange, world, method, values, indices, **more)
            old, before = [torch.zeros(size)] * world, NOTHING
            for _ in range(2):
                g = gradients(kind, world, size, torch.float32, generator)
                u = [a + b for a, b in zip(g, old, strict=True)]
                out = hand.step(u, k)
                assert all(out.ok)
                assert len({x.numpy().tobytes() for x in out.updates}) == 1
                error = violation(u, out.updates[0], out.residuals, before, out.kept)
                assert error <= 4, (world, kind, size, k)
                old, before = out.residuals, out.kept


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_all_entries_are_the_dense_mean(exchange, world):
    for size in (1, 333):
        generator = torch.Generator().manual_seed(world)
        u = gradients("independent", world, size, torch.float32, generator)
        more = {"ratio": 1.0} if exchange in SKETCHES else {}
        if exchange == "oktopk":
            # A region has room for 1.5 k / P entries: equal regions have k / P.
            more = {"refresh": 1}
        if exchange == "owner":
            more = {"back": "fp32"}
        out = Hand(exchange, world, **more).step(u, size)
        exact = torch.stack(u).mean(0)
        tolerance = 2**-7 if exchange == "dense-bf16" else 1e-6
        torch.testing.assert_close(out.updates[0], exact, rtol=tolerance, atol=tolerance)
        if exchange != "dense-bf16":
            assert all(float(kept.abs().max()) == 0 for kept in out.residuals)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_one_rank_that_is_not_finite(exchange):
    u = [torch.randn(200) for _ in range(6)]
    more = extra(exchange, 200, 9, 6)
    for broken in (0, 4, 5):
        out = Hand(exchange, 6, **more).step(u, 9, [rank != broken for rank in range(6)])
        assert not any(out.ok)
        assert all(bool(x.isnan().all()) for x in out.updates)


COSTS = [
    ("allgather", {}),
    ("union", {}),
    ("gtopk", {}),
    ("gtopk", {"merge": "paper"}),
    ("oktopk", {}),
    ("sketched", {}),
    ("sketched", {"rows": 3, "columns": 400, "candidates": 2}),
    ("gs-sgd", {"ratio": 4.0}),
    ("owner", {}),
    ("owner", {"back": "two-bit", "room": 1.0}),
    ("hierarchical", {}),
    ("hierarchical", {"local": 2}),
    ("dense", {}),
    ("dense-bf16", {}),
]


@pytest.mark.parametrize(("exchange", "more"), COSTS, ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_predicted_bytes_and_rounds_are_counted(exchange, more, world):
    if world % more.get("local", 1):
        return
    for values in sorted({"fp32", "bf16", "int8"} & set(EXCHANGES[exchange].values)):
        indices = "packed" if values == "int8" else "int32"
        size, k = align(3001), entry_count(0.01, 3001)
        u = [torch.randn(size) for _ in range(world)]
        out = Hand(exchange, world, values=values, indices=indices, **more).step(u, k)
        cost = EXCHANGES[exchange]
        assert out.sent == cost.bytes(world, size, k, Encoding(values, indices), **more)
        assert out.rounds == cost.rounds(world, **more)


REAL = [
    (2, "oktopk", {"values": "int8", "indices": "packed", "refresh": 3}),
    (3, "oktopk", {"refresh": 3}),
    (2, "sketched", {"values": "bf16", "ratio": 5.0}),
    (3, "sketched", {"ratio": 5.0}),
    (2, "gs-sgd", {"ratio": 5.0}),
    (3, "gs-sgd", {"values": "bf16", "ratio": 5.0}),
    (2, "hierarchical", {}),
    (3, "hierarchical", {"local": 1, "values": "int4"}),
    (4, "hierarchical", {"local": 2}),
    (3, "gtopk", {"merge": "paper"}),
    (2, "owner", {"values": "two-bit", "indices": "auto"}),
    (3, "owner", {"values": "sign", "indices": "packed", "back": "two-bit"}),
]


def real(rank, world, exchange, fields):
    state = gradwire.State(exchange=exchange, density=0.01, dense_below=0, **fields)
    out = b""
    for step in range(5):
        g = gradients("heavy", world, 3001, torch.float32, torch.Generator().manual_seed(step))
        gradwire.average({"gradient": g[rank]}, state)
        out += g[rank].numpy().tobytes()
    stats = state.stats()
    return out, stats.bytes_sent, stats.dense, stats.residual_norm


@pytest.mark.parametrize(("world", "exchange", "fields"), REAL, ids=str)
def test_virtual_workers_equal_real_ranks_bit_for_bit(ranks, world, exchange, fields):
    cluster = gradwire.VirtualCluster(world, exchange=exchange, density=0.01, **fields)
    out = b""
    for step in range(5):
        g = gradients("heavy", world, 3001, torch.float32, torch.Generator().manual_seed(step))
        out += cluster.average(g).numpy().tobytes()
    stats = [cluster.stats(rank) for rank in range(world)]
    assert stats[0].bytes_sent < stats[0].bytes_dense
    updates, *numbers = zip(*ranks.run(world, real, world, exchange, fields), strict=True)
    assert set(updates) == {out}
    assert numbers == [
        tuple(s.bytes_sent for s in stats),
        ({},) * world,
        tuple(s.residual_norm for s in stats),
    ]


@pytest.mark.parametrize("exchange", ["oktopk", "gs-sgd", "owner"])
def test_what_an_exchange_remembers_is_saved(exchange):
    """A run that goes on from its state is bit-equal; one that forgets its memory is not."""

    def run(cluster, steps):
        updates = []
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            updates.append(cluster.average(gradients("heavy", 3, 3001, torch.float32, generator)))
        return torch.stack(updates)

    fields = {"exchange": exchange, "density": 0.01, "ratio": 5.0}
    if exchange == "oktopk":
        fields = {"exchange": exchange, "density": 0.01, "refresh": 8}
    if exchange == "owner":
        fields = {"exchange": exchange, "density": 0.01}
    whole = gradwire.VirtualCluster(3, **fields)
    run(whole, range(3))
    saved = whole.state_dict()
    expected = run(whole, range(3, 6))
    for _ in range(2):  # neither going on nor loading changes what was saved
        other = gradwire.VirtualCluster(3, **fields)
        other.load_state_dict(saved)
        assert torch.equal(run(other, range(3, 6)), expected)
    forgetful = gradwire.VirtualCluster(3, **fields)
    forgetful.load_state_dict(saved)
    for state in forgetful._states:
        state.bundles[0].memory.clear()
    assert not torch.equal(run(forgetful, range(3, 6)), expected)
