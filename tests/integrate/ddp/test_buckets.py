"""Buckets become pieces of bundles: as few as there can be, with the same result."""

import pytest
import torch
from torch import nn

from gradwire.accumulate import Bundle
from gradwire.accumulate.layout import assign_offsets
from gradwire.integrate.ddp.buckets import RESETS_WITHOUT_CUTS, Buckets, runs_of
from gradwire.types import Slot
from tests.integrate import models


def bundle_of(index, *lengths):
    slots = [Slot(f"{index}.{n}", (n,), (1,), torch.float32, numel=n) for n in lengths]
    return Bundle(assign_offsets(slots), torch.device("cpu"), rank=0, index=index, dense=False)


def homes_of(*bundles):
    return [(bundle, slot) for bundle in bundles for slot in bundle.slots]


def test_parameters_that_follow_each_other_are_one_run():
    homes = homes_of(bundle_of(0, 64, 128, 100, 64), bundle_of(1, 64, 0, 64))
    assert runs_of(homes, True) == [(0, 0, 0, 292), (0, 320, 292, 64), (1, 0, 356, 128)]
    assert len(runs_of(homes, False)) == 7


def test_in_another_order_they_are_not():
    homes = homes_of(bundle_of(0, 64, 128, 256))
    assert runs_of(homes[::-1], True) == [(0, 192, 0, 256), (0, 64, 256, 128), (0, 0, 384, 64)]
    assert runs_of([homes[1], homes[2], homes[0]], True) == [(0, 64, 0, 384), (0, 0, 384, 64)]


def steps(rank, options, fields):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(31, 128), nn.ReLU(), nn.Linear(128, 64), nn.Linear(64, 5))
    ddp, wire = models.wrapped(net=net, ddp=options, **fields)
    seen = []
    replace = wire.replace
    wire.replace = lambda b, pieces, *more: (seen.append(len(pieces)), replace(b, pieces, *more))
    models.train(ddp, rank, 6)
    return models.flat(ddp).numpy().tobytes(), sum(seen[-len(wire.bundles) :])


@pytest.mark.parametrize("fields", [{}, {"exchange": "union"}, {"values": "bf16"}], ids=str)
def test_merged_or_not_the_weights_are_the_same(ranks, fields):
    fields = {"bundle_mb": 1.0, **fields}
    merged = ranks.run(2, steps, {}, fields)
    single = ranks.run(2, steps, {"find_unused_parameters": True}, fields)
    assert merged[0][0] == merged[1][0] == single[0][0] == single[1][0]
    assert merged[0][1] < single[0][1] == 6


class Bucket:
    """What DDP hands over, as far as it is asked."""

    def __init__(self, index, buffer, parameters):
        self.index, self.buffer = (lambda: index), (lambda: buffer)
        self.parameters = lambda: parameters


class Home:
    """As much of a State as buckets ask for."""

    def __init__(self, *bundles):
        self.bundles = list(bundles)

    def home(self, name):
        return next((b, s) for b in self.bundles for s in b.slots if s.name == name)


def sorted_into(buckets, *arrivals):
    """The pieces of bundle 0 after a step."""
    buckets.reset()
    done = [bundle for arrival in arrivals for bundle in buckets.add_bucket(arrival, None)]
    assert [b.index for b in done] == [0]
    pieces = buckets.pieces(done[0])
    buckets.finish_bundle(done[0])
    return pieces


def test_a_bucket_that_comes_again_is_not_cut_again():
    state = Home(bundle_of(0, 64, 128))
    parameters = [torch.zeros(64), torch.zeros(128)]
    names = {id(p): s.name for p, s in zip(parameters, state.bundles[0].slots, strict=True)}
    buckets = Buckets(state, names, merge=True)
    first, second = (Bucket(i, torch.randn(p.numel()), [p]) for i, p in enumerate(parameters))
    for _ in range(RESETS_WITHOUT_CUTS):
        # DDP builds them anew after the first step, perhaps where the old ones were.
        pieces = sorted_into(buckets, first, second)
    assert [place for place, _ in pieces] == [0, 64]
    assert sorted_into(buckets, first, second) is pieces
    # In another order they are the same entries, in the same places.
    again = sorted_into(buckets, second, first)
    assert [(p, t.data_ptr()) for p, t in again] == [(p, t.data_ptr()) for p, t in pieces]
    # Another buffer, or other parameters in it.
    moved = sorted_into(buckets, Bucket(0, torch.randn(64), [parameters[0]]), second)
    assert moved[0][1].data_ptr() != pieces[0][1].data_ptr()
    assert moved[1][1].data_ptr() == pieces[1][1].data_ptr()
    whole = Bucket(0, torch.randn(192), [parameters[1], parameters[0]])
    flat = whole.buffer()
    assert [(p, t.data_ptr()) for p, t in sorted_into(buckets, whole)] == [
        (0, flat[128:].data_ptr()),
        (64, flat.data_ptr()),
    ]
    # Bucket 1 is no more: nor is its memory kept.
    buckets.reset()
    assert list(buckets._cuts) == [0]
    state.bundles = [bundle_of(0, 64, 128)]
    assert sorted_into(buckets, whole) is not moved
