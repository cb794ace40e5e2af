"""A bundle: u = gradient + residual, and residual = u - delivered when the next step begins."""

import pytest
import torch

from gradwire.accumulate import Bundle, Correction
from gradwire.accumulate.delivery import subtract_delivered
from gradwire.accumulate.layout import assign_offsets
from gradwire.types import Entries, Everything, Rounded, Slot, Sparse

TAKEN, SKIPPED = torch.tensor(False), torch.tensor(True)
OK = torch.tensor(True)


def bundle(dtype=torch.float32, **fields):
    slots = assign_offsets(
        [Slot(name, (n,), (1,), dtype, numel=n) for name, n in (("a", 70), ("b", 5))]
    )
    return Bundle(slots, torch.device("cpu"), rank=0, index=0, dense=False, **fields)


def pieces(b, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(s.offset, torch.randn(s.numel, generator=generator)) for s in b.slots]


def some(u, *indices):
    at = torch.tensor(indices, dtype=torch.int32)
    return Sparse(at, u[at.long()].clone(), torch.tensor(len(indices)), u.numel())


def test_slots_are_padded_and_padding_stays_zero():
    b = bundle()
    assert (b.size, b.entries) == (192, 75)
    b.accumulate(pieces(b), 64, TAKEN)
    assert not b.u[70:128].any()
    assert not b.u[133:].any()


DELIVERIES = {
    "everything": lambda u: (Everything(), u),
    "rounded": lambda u: (Rounded(u.bfloat16().float()), u.bfloat16().float()),
    "entries": lambda u: (Entries(some(u, 3, 69, 128)), some(u, 3, 69, 128).dense()),
}


@pytest.mark.parametrize("kind", DELIVERIES)
@pytest.mark.parametrize("skipped", [TAKEN, SKIPPED], ids=["taken", "skipped"])
def test_the_residual_is_u_less_what_was_delivered(kind, skipped):
    b = bundle()
    b.accumulate(pieces(b), 64, TAKEN)
    u = b.u.clone()
    delivered, values = DELIVERIES[kind](u)
    b.deliver(delivered, OK)
    wanted = u if bool(skipped) else u - values
    assert torch.equal(b.residual(skipped), wanted)
    assert torch.equal(b.u, u), "settled only when the next step begins"
    b.accumulate([], 64, skipped)
    assert torch.equal(b.u, wanted)
    assert b.pending is None


def test_padding_indices_touch_nothing_but_the_spare_entry():
    b = bundle()
    b.accumulate(pieces(b), 0, TAKEN)
    before = b.buffer.clone()
    at = torch.tensor([2, b.size, b.size], dtype=torch.int32)
    sparse = Sparse(at, torch.tensor([1.0, 0, 0]), torch.tensor(1), b.size)
    subtract_delivered(b.buffer, Entries(sparse), TAKEN)
    before[2] -= 1
    assert torch.equal(b.buffer, before)


def test_what_rounding_the_mean_took_away_is_added_unless_the_step_was_skipped():
    for skipped in (TAKEN, SKIPPED):
        b = bundle(torch.bfloat16)
        b.accumulate(pieces(b), 0, TAKEN)
        u, rounding = b.u.clone(), torch.full((b.size + 1,), 0.25)
        b.deliver(Everything(), OK, mean_rounding=rounding)
        left = b.residual(skipped)
        assert torch.equal(left, u if bool(skipped) else torch.full((b.size,), 0.25))


def test_an_infinite_rounding_of_a_skipped_step_stays_out():
    b = bundle(torch.bfloat16)
    b.accumulate(pieces(b), 0, TAKEN)
    b.deliver(Everything(), ~OK, mean_rounding=torch.full((b.size + 1,), float("inf")))
    b.accumulate([], 0, SKIPPED)
    assert b.u.isfinite().all()


def test_the_residual_of_an_unused_parameter_is_put_aside_and_comes_back():
    b = bundle()
    b.accumulate(pieces(b), 0, TAKEN)
    b.deliver(Entries(some(b.u, 3)), OK)
    kept = b.residual(TAKEN)
    b.accumulate([], 64, TAKEN, unused=[b.slots[1]])
    assert not b.u[128:133].any()
    b.deliver(Everything(), OK)
    ((offset, withheld),) = b.withheld
    assert (offset, withheld.tolist()) == (128, kept[128:133].tolist())
    left = b.residual(TAKEN)
    assert torch.equal(left[128:133], kept[128:133])
    assert not left[:128].any()


def test_without_feedback_nothing_stays_even_of_a_skipped_step():
    b = bundle()
    b.accumulate(pieces(b), 0, TAKEN)
    b.deliver(Entries(some(b.u, 3)), OK, forget=True)
    assert not b.residual(SKIPPED).any()


def test_momentum_is_masked_when_the_step_is_known_to_have_happened():
    for skipped in (TAKEN, SKIPPED):
        b = bundle(correction=Correction(momentum=0.5))
        b.accumulate(pieces(b), 0, TAKEN)
        before = b.velocity.clone()
        masked = torch.tensor([3, 69], dtype=torch.int32)
        b.deliver(Entries(some(b.u, 3, 69)), OK, masked=masked)
        assert torch.equal(b.velocity, before)
        after = b.momentum(skipped)
        if not bool(skipped):
            before[[3, 69]] = 0
        assert torch.equal(after, before[: b.size])


def test_a_parameter_moves_with_its_strides():
    slots = assign_offsets([Slot("w", (2, 3), (3, 1), torch.float32, numel=6)])
    b = Bundle(slots, torch.device("cpu"), rank=0, index=0, dense=False)
    b.u[:6] = torch.arange(6.0)
    old, new = b.slots[0], Slot("w", (2, 3), (1, 2), torch.float32, 0, 6)
    before = b.view(b.buffer, old).clone()
    b.reorder(old, new)
    assert torch.equal(b.view(b.buffer, new), before)
    assert b.u[:6].tolist() == [0, 3, 1, 4, 2, 5]
    assert b.slots == [new]


def test_reweigh_settles_first():
    b = bundle()
    b.accumulate(pieces(b), 0, TAKEN)
    u = b.u.clone()
    b.deliver(Everything(), OK)
    b.reweigh(2.0, SKIPPED)
    assert torch.equal(b.u, 2 * u)


def test_what_is_counted_is_added_up_between_steps():
    b = bundle()
    values = torch.tensor([3.0, 4.0])
    b.tally.note_rounding(values, values - torch.tensor([0.0, 1.0]))
    b.tally.note_sent(torch.tensor(2))
    assert (b.tally.energy.tolist(), int(b.tally.sent)) == ([0, 0], 0)
    b.tally.add_up()
    b.tally.add_up()
    assert (b.tally.energy.tolist(), int(b.tally.sent)) == ([25, 1], 2)
