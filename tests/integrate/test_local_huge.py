"""Local steps: finite differences too large to add up stop one round, and the next is as ever."""

import pytest
import torch
from torch import nn

import gradwire
from gradwire.exchange import EXCHANGES
from gradwire.kernels.scan import LARGEST_U
from gradwire.ranks.virtual import VirtualRanks
from tests.exchange.cases import options

ENTRIES, K = 384, 39
WAYS = {
    "overlap and fragments": {"overlap": 1, "fragments": 2, "every": 2},
    "kept weights": {"outer": "average", "keep_unsent": True, "every": 1},
}
HUGE = {
    2: lambda rank, moved: 3e38 * moved.sign(),
    3: lambda rank, moved: moved if rank else 1e38 * moved,
}
"""By the number of ranks: all differences are huge, or those of rank 0."""


def rounds(world, second, **fields):
    """Every rank's weights and residuals after five rounds; `second` changes what moves in one."""
    ranks = VirtualRanks(world)

    def work(rank):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(17, 9), nn.Linear(9, 4))
        local = gradwire.local_steps(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1),
            group=ranks.groups[rank],
            method="topk",
            values="fp32",
            density=0.1,
            dense_below=0,
            **fields,
        )
        draw = torch.Generator().manual_seed(rank)
        for step in range(5 * fields["every"]):
            with torch.no_grad():
                for weight in net.parameters():
                    moved = torch.randn(weight.shape, generator=draw)
                    is_second = step == fields["every"]
                    weight.add_(second(rank, moved) if is_second else 0.01 * moved)
            local.step()
        local.exchange()
        kept = [local.residual(name) for name, _ in net.named_parameters()]
        return [*(w.detach() for w in net.parameters()), *kept], local.stats().skipped

    return ranks.run(work)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_huge_difference_is_as_an_infinite_one(exchange, way):
    fields = WAYS[way] | {"exchange": exchange, "options": options(exchange, ENTRIES, K)}
    for world, huge in HUGE.items():

        def infinite(rank, moved, huge=huge):
            big = huge(rank, moved)
            return torch.where(big.abs() > LARGEST_U, torch.inf, big)

        for found, expected in zip(
            rounds(world, huge, **fields), rounds(world, infinite, **fields), strict=True
        ):
            assert all(tensor.isfinite().all() for tensor in found[0])
            assert all(map(torch.equal, found[0], expected[0]))
            assert found[1] == expected[1] > 0
