"""dense-bf16: which entries travel, and rounded to what."""

import torch

import gradwire
from tests.exchange.cases import Hand


def test_one_rank_gets_its_own_entries_as_bf16():
    """Also those that fp16 could not hold; the loss stays."""
    u = torch.tensor([1.0, 1.00390625, 3e38, -3e38, -1e-30, 65537.0, 0.1])
    out = Hand("dense-bf16", 1).step([u], u.numel())
    assert torch.equal(out.updates[0], u.bfloat16().float())
    assert torch.equal(out.residuals[0], u - u.bfloat16().float())
    assert float(out.residuals[0].abs().sum()) > 0


def test_of_a_method_that_chooses_only_what_it_chose_is_sent():
    u = [torch.tensor([4.0, 1.0, 0.0, 2.0]), torch.tensor([0.5, 1.0, -6.0, 0.25])]
    out = Hand("dense-bf16", 2).step(u, 1)
    assert out.updates[0].tolist() == [2.0, 0.0, -3.0, 0.0]
    assert [kept.tolist() for kept in out.residuals] == [
        [0.0, 1.0, 0.0, 2.0],
        [0.5, 1.0, 0.0, 0.25],
    ]


def test_of_a_dense_method_everything():
    cluster = gradwire.VirtualCluster(2, method="dense", exchange="dense-bf16")
    g = [torch.tensor([1.5, -2.0, 0.0]), torch.tensor([0.5, 6.0, 1.0])]
    assert cluster.average(g).tolist() == [1.0, 2.0, 0.5]
    assert cluster.stats().dense == {"method": 1}
