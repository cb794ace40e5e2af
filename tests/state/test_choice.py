"""The choice for a bundle in a step, and the reasons to send it whole."""

import pytest
import torch

import gradwire
from gradwire.accumulate import Bundle
from gradwire.config import Config
from gradwire.errors import ConfigError
from gradwire.exchange import EXCHANGES
from gradwire.ranks.virtual import VirtualRanks
from gradwire.state.choice import REASONS, choose, prepare
from gradwire.types import Slot

SIZE = 64_000


def bundle(size=SIZE, dense=False):
    slot = Slot("w", (size,), (1,), torch.float32, 0, size)
    return Bundle([slot], torch.device("cpu"), rank=0, index=0, dense=dense)


def chosen(b=None, step=0, ranks=4, flush=False, **fields):
    return choose(b or bundle(), Config(**{"density": 0.01, **fields}), step, ranks, flush)


def test_k_entries_by_the_exchange_asked_for():
    choice = chosen(method="topk/gtopk")
    assert (choice.k, choice.exchange, choice.reason) == (640, "gtopk", "")
    assert choice.selects
    assert choice.block == 32
    assert choice.maxima16


WHOLE = {
    "method": (None, {"method": "dense"}),
    "rule": (bundle(dense=True), {}),
    "small": (bundle(640), {}),
    "schedule": (None, {"dense_steps": 1}),
    "bytes": (None, {"density": 0.4}),
}


@pytest.mark.parametrize("reason", WHOLE)
def test_every_reason_sends_all_by_an_exchange_that_sends_all(reason):
    b, fields = WHOLE[reason]
    choice = chosen(b, **fields)
    assert choice.reason == reason
    assert choice.exchange == "dense"
    assert choice.k == (b or bundle()).size
    assert not choice.selects
    assert reason in REASONS


def test_dense_with_values_of_a_message_is_encoded_whatever_the_density():
    for density in (0.01, 1.0):
        fields = {"method": "dense/allgather", "values": "two-bit", "density": density}
        choice = chosen(**fields)
        assert (choice.k, choice.exchange, choice.reason) == (SIZE, "allgather", "")
    assert chosen(method="dense/allgather", values="int8", ranks=16).reason == "bytes"
    assert chosen(method="dense/allgather").reason == "method", "fp32 is dense's"
    assert chosen(flush=True, **fields).exchange == "dense"


@pytest.mark.parametrize(("values", "bits"), [("sign", 1.125), ("two-bit", 2.125), ("int4", 4.125)])
def test_dense_sends_the_bits_of_its_values(values, bits):
    cluster = gradwire.VirtualCluster(2, method="dense/allgather", values=values)
    g = [torch.randn(SIZE) for _ in range(2)]
    update = cluster.average(g)
    assert 8 * cluster.stats().bytes_sent / SIZE == pytest.approx(bits, abs=0.01)
    kept = torch.stack([cluster.residual(rank) for rank in range(2)])
    assert 0 < kept.square().mean() < 0.5
    torch.testing.assert_close(update + kept.mean(0), torch.stack(g).mean(0))


def test_a_flush_is_in_fp32_whatever_was_asked_for():
    fields = {"method": "dense", "exchange": "dense-bf16"}
    assert chosen(**fields).exchange == "dense-bf16"
    assert chosen(method="topk/dense-bf16", flush=True).exchange == "dense"
    assert chosen(method="topk", flush=True).reason == "flush"


def test_the_density_follows_the_schedule():
    fields = {"dense_steps": 2, "warmup": (0.1, 0.05), "warmup_steps": 3, "exchange": "gtopk"}
    assert [chosen(step=s, **fields).k for s in range(10)] == [
        64_000, 64_000, 6400, 6400, 6400, 3200, 3200, 3200, 640, 640,
    ]  # fmt: skip


def test_more_ranks_make_an_all_gather_dearer_than_dense():
    assert [chosen(ranks=ranks, density=0.06).reason for ranks in (2, 8, 32)] == ["", "", "bytes"]


def test_an_exchange_that_chooses_needs_no_maxima():
    choice = chosen(method="topk/gs-sgd")
    assert not choice.selects
    assert choice.block == 0


def test_an_exchange_may_refuse_before_the_first_step(monkeypatch):
    asked = []
    exchange = EXCHANGES["hierarchical"]

    def refuse(group, size, capacity, **options):
        asked.append((size, capacity))
        raise ConfigError("no")

    monkeypatch.setitem(EXCHANGES, "hierarchical", exchange.__class__(
        exchange.run, exchange.bytes, exchange.rounds, chooses=True, prepare=refuse
    ))  # fmt: skip
    config = Config(method="topk/hierarchical", density=0.01)
    with pytest.raises(ConfigError, match=r"^no$"):
        prepare([bundle()], config, VirtualRanks(2).groups[0])
    assert asked == [(SIZE, 640)]
    prepare([bundle()], Config(), VirtualRanks(2).groups[0])
