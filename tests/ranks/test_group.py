"""The ranks of torch.distributed: their trades, in the right order."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.errors import ExchangeError
from gradwire.ranks.distributed import LARGE, DistributedGroup
from gradwire.ranks.group import ROW, uncounted


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


def opened(posted):
    """A group of its own, with posted receives where that is wanted."""
    group = DistributedGroup(dist.new_group(), torch.device("cpu"))
    if posted:
        group.open_mailbox()
    return group


def early(rank, case, posted):
    """An agreement that has begun, and then a collective in which the ranks do not fit."""
    group = opened(posted)
    fits = rank != group.size - 1 or case == "fits"
    try:
        group.agree_soon("step", entries=100 if fits else 200)
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


@pytest.mark.parametrize("posted", [True, False])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", ["rows", "gathered", "reduced"])
def test_an_early_agreement_stops_messages_of_other_sizes(ranks, world, case, posted):
    for said in ranks.run(world, early, case, posted):
        assert f"step: rank {world - 1} has entries 200, rank 0 has 100" in said


def elsewhere(rank, posted):
    """One rank begins a step, another saves."""
    group = opened(posted)
    try:
        if rank:
            group.agree("save", step=3)
        else:
            group.agree_soon("step", step=3, entries=100)
            group.all_to_all(torch.zeros(group.size, 100))
    except ExchangeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("posted", [True, False])
def test_an_early_agreement_meets_another_operation(ranks, posted):
    for said in ranks.run(2, elsewhere, posted):
        assert "rank 1 is in save at step 3, rank 0 is in step at step 3" in said


@pytest.mark.parametrize("posted", [True, False])
def test_an_early_agreement_costs_no_message_of_its_own_size(ranks, posted):
    for sent in ranks.run(2, early, "fits", posted):
        assert sent == ROW + 400 + ROW


def forgotten(rank):
    """An agreement that has begun and that no collective ended before the next."""
    group = opened(True)
    group.agree_soon("step", entries=100 + rank)
    try:
        group.agree_soon("step", entries=1)
    except ExchangeError as error:
        return str(error)
    return None


def test_an_early_agreement_ends_at_the_next(ranks):
    for said in ranks.run(2, forgotten):
        assert "step: rank 1 has entries 101, rank 0 has 100" in said


def together(rank, entries):
    """What arrives with a row, and the sends and receives that it took."""
    group = opened(True)
    arrived = []
    for step in (1, 2):
        order: list[str] = []
        with noting(order, "irecv"), noting(order, "isend"):
            group.agree_soon("step", step=step)
            rows = group.all_gather(torch.full((entries,), 10.0 * step + rank))
        arrived.append((rows[:, ::entries].tolist(), rows.std(1).tolist(), order))
    return arrived


def test_a_small_message_of_two_ranks_goes_with_the_row(ranks):
    values = [[[10.0 * step], [10.0 * step + 1]] for step in (1, 2)]
    for arrived in ranks.run(2, together, 300):
        # The receive is the next one's: this message met one that was posted before.
        assert arrived == [(value, [0, 0], ["isend", "irecv"]) for value in values]
    for arrived in ranks.run(2, together, 1 << 16):
        order = ["irecv", "isend"]
        assert arrived == [(value, [0, 0], ["isend", "irecv", *order]) for value in values]


def unlike(rank):
    """Rows that are alike before messages that are not; then ranks that agree again."""
    group = opened(True)
    group.agree_soon("step", entries=7)
    try:
        group.all_gather(torch.zeros(7 + rank))
    except ExchangeError as error:
        said = str(error)
    group.agree("save", step=1)
    return said


def test_messages_of_two_lengths_are_an_error_on_both_ranks(ranks):
    for said in ranks.run(2, unlike):
        assert "step: rank 1 has message_bytes 32, rank 0 has 28" in said


def left(rank):
    """A rank that cannot post the next receive has what the last one brought."""
    group = opened(True)
    real = dist.irecv
    group.agree_soon("step")
    try:
        dist.irecv = refuse
        rows = group.all_gather(torch.tensor([float(rank)])).tolist()
    finally:
        dist.irecv = real
    try:
        group.agree("save")
    except ExchangeError as error:
        return rows, str(error)
    return rows, ""


def refuse(*args, **fields):
    raise RuntimeError("Connection closed by peer")


def test_a_receive_that_cannot_be_posted_fails_the_next_comparison(ranks):
    for rank, (rows, said) in enumerate(ranks.run(2, left)):
        assert rows == [[0.0], [1.0]]
        assert f"rank {rank} of 2: comparison of {ROW} bytes failed in stage exchange" in said
        assert "Connection closed by peer" in said
