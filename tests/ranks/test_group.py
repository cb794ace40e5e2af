"""The ranks of torch.distributed: their trades, in the right order."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.errors import ExchangeError
from gradwire.ranks.distributed import LARGE, DistributedGroup
from gradwire.ranks.group import uncounted


@contextlib.contextmanager
def noting(order, name):
    """Note each call of a function of torch.distributed by its name."""
    real = getattr(dist, name)

    def noted(*args, **keywords):
        order.append(name)
        return real(*args, **keywords)

    setattr(dist, name, noted)
    try:
        yield
    finally:
        setattr(dist, name, real)


def traded(rank):
    group = DistributedGroup(dist.group.WORLD, torch.device("cpu"))
    gathered = group.all_gather(torch.arange(3) + 10 * rank)
    rows = (torch.arange(2 * group.size).view(2, group.size).t() + 100 * rank)[:, :2]
    assert not rows.is_contiguous()
    received = group.all_to_all(rows)
    sent = group.bytes_sent
    order: list[str] = []
    with noting(order, "irecv"), noting(order, "isend"):
        group.swap(torch.zeros(1), (rank + 1) % group.size, (rank - 1) % group.size)
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


def early(rank, case):
    """An agreement that has begun, and then a collective in which the ranks do not fit."""
    group = DistributedGroup(dist.new_group(), torch.device("cpu"))
    fits = rank != group.size - 1 or case == "fits"
    group.agree_soon("step", entries=100 if fits else 200)
    try:
        if case == "gathered":
            group.all_gather(torch.zeros(100 if fits else 200))
        elif case == "reduced":
            group.all_reduce(torch.zeros(100 if fits else 200))
        else:
            rows = torch.zeros(group.size, 100 if fits else 200)
            group.all_to_all(rows)
        group.compare("next")
    except ExchangeError as error:
        return str(error)
    return group.bytes_sent


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", ["rows", "gathered", "reduced"])
def test_an_early_agreement_stops_messages_of_other_sizes(ranks, world, case):
    for said in ranks.run(world, early, case):
        assert f"step: rank {world - 1} has entries 200, rank 0 has 100" in said


def elsewhere(rank):
    """One rank begins a step, another saves."""
    group = DistributedGroup(dist.new_group(), torch.device("cpu"))
    try:
        if rank:
            group.agree("save", step=3)
        else:
            group.agree_soon("step", step=3, entries=100)
            group.all_to_all(torch.zeros(group.size, 100))
    except ExchangeError as error:
        return str(error)
    return None


def test_an_early_agreement_meets_another_operation(ranks):
    for said in ranks.run(2, elsewhere):
        assert "rank 1 is in save at step 3, rank 0 is in step at step 3" in said


def test_an_early_agreement_costs_no_message_of_its_own_size(ranks):
    row = 72
    for sent in ranks.run(2, early, "fits"):
        assert sent == row + 400 + row


def forgotten(rank):
    """An agreement that has begun and that no collective ended before the next."""
    group = DistributedGroup(dist.new_group(), torch.device("cpu"))
    group.agree_soon("step", entries=100 + rank)
    try:
        group.agree_soon("step", entries=1)
    except ExchangeError as error:
        return str(error)
    return None


def test_an_early_agreement_ends_at_the_next(ranks):
    for said in ranks.run(2, forgotten):
        assert "step: rank 1 has entries 101, rank 0 has 100" in said
