"""The ranks of torch.distributed: their trades, in the right order."""

import torch
import torch.distributed as dist

import gradwire
from gradwire.ranks.distributed import LARGE, DistributedGroup
from gradwire.ranks.group import uncounted


def traded(rank):
    group = DistributedGroup(dist.group.WORLD, torch.device("cpu"))
    gathered = group.all_gather(torch.arange(3) + 10 * rank)
    rows = (torch.arange(2 * group.size).view(2, group.size).t() + 100 * rank)[:, :2]
    assert not rows.is_contiguous()
    received = group.all_to_all(rows)
    sent = group.bytes_sent
    order: list[str] = []
    whole = dist.batch_isend_irecv

    def noted(moves):
        order.extend(move.op.__name__ for move in moves)
        return whole(moves)

    dist.batch_isend_irecv = noted
    try:
        group.swap(torch.zeros(1), (rank + 1) % group.size, (rank - 1) % group.size)
    finally:
        dist.batch_isend_irecv = whole
    large = torch.full((group.size, 2 * LARGE), rank) + torch.arange(group.size).view(-1, 1) * 10
    turned = group.all_to_all(large)[:, ::LARGE].tolist()
    return gathered.tolist(), received.tolist(), sent, order, turned


def test_rows_go_to_their_ranks_and_are_asked_for_before_others_are_sent(ranks):
    for world in (2, 3):
        for rank, (gathered, received, sent, order, turned) in enumerate(ranks.run(world, traded)):
            assert gathered == [[10 * r, 10 * r + 1, 10 * r + 2] for r in range(world)]
            assert received == [[100 * r + rank, 100 * r + rank + world] for r in range(world)]
            assert sent == (world - 1) * (3 * 8 + 2 * 8)
            assert order == ["irecv", "isend"]
            assert turned == [[10 * rank + r] * 2 for r in range(world)]


def counted(rank, folder):
    """Bytes and rounds after what is no gradient, then after one that is."""
    group = DistributedGroup(dist.group.WORLD, torch.device("cpu"))
    group.all_gather(torch.zeros(3))
    before = group.bytes_sent, group.rounds
    with uncounted(group):
        group.all_gather(torch.zeros(5))
    group.split(1)
    after = group.bytes_sent, group.rounds
    state = gradwire.State(density=0.1)
    gradwire.average([torch.randn(100)], state)
    sent = state.stats().bytes_sent
    gradwire.save(state, folder)
    saved = state.stats().bytes_sent
    gradwire.load(state, folder)
    return before, after, sent, saved, state.stats().bytes_sent


def test_only_gradients_are_counted(ranks, tmp_path):
    for before, after, sent, saved, loaded in ranks.run(2, counted, tmp_path):
        assert before == after == (12, 1)
        assert sent == saved == loaded > 0
