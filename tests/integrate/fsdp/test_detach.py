"""FSDP2 lets go of a model: units that a step does not use are waited for."""

import warnings

import pytest
import torch

import gradwire
from tests.integrate.fsdp import models


class Chosen(models.Net):
    """Uses the blocks it is told to."""

    use: tuple[int, ...] = (0, 1)

    def forward(self, x):
        x = self.first(x)
        for index in self.use:
            x = self.blocks[index](x)
        return self.last(x)


def attached(small=False):
    """With `small` block 1 trains one entry, of which shard 1 holds nothing."""
    axes = models.mesh()
    torch.manual_seed(0)
    net = Chosen()
    if small:
        net.blocks[1].requires_grad_(False)
        net.blocks[1].gain.requires_grad_(True)
    models.sharded(net, axes["shard"])
    group = axes["replicate"].get_group()
    return net, gradwire.attach(net, replicate_group=group, density=0.02, dense_below=0)


def norm(wire, index):
    names = (place.name for unit in wire.units for place in unit.shard_slots)
    return max(float(wire.residual(n).norm()) for n in names if n.startswith(f"blocks.{index}."))


def detached(rank, passes, small=False, skip=()):
    """What is kept for both blocks after each step that follows detach, steps, and what was said.

    passes: which blocks every backward pass of a step uses; all but the last are micro-batches.
    """
    net, wire = attached(small)
    models.train(net, 2)
    wire.detach()
    kept, said = [[norm(wire, i) for i in (0, 1)]], []
    for step, uses in enumerate(passes):
        net.zero_grad()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for part, use in enumerate(uses):
                net.use = use
                net.set_requires_all_reduce(part == len(uses) - 1)
                models.loss(net, models.data(10 * step + part)).backward()
        said += [str(w.message) for w in seen if "detach" in str(w.message)]
        if step in skip:
            wire.skip_step()
        kept.append([norm(wire, i) for i in (0, 1)])
    wire.close()
    return kept, wire.steps - 2, said


BOTH, FIRST, SECOND = (0, 1), (0,), (1,)


def test_detach_waits_for_units_that_are_not_used(ranks):
    for kept, steps, said in ranks.run(4, detached, [[FIRST], [FIRST], [BOTH], [BOTH]]):
        second = [k for _, k in kept]
        assert second[0] > 0
        assert second[1] == second[2] == second[0], "it waits where it is"
        assert second[3] == 0, "the first step that uses it sends it"
        assert steps == 3
        assert not said


def test_shards_that_hold_nothing_of_a_unit_wait_too(ranks):
    results = ranks.run(4, detached, [[FIRST], [FIRST], [BOTH], [BOTH]], True)
    assert [steps for _, steps, _ in results] == [3, 3, 3, 3]


def test_detach_says_what_it_drops_in_the_end(ranks):
    for kept, steps, said in ranks.run(4, detached, [[FIRST]] * 13):
        assert kept[-1][1] > 0
        assert steps == 11
        assert len(said) == 1
        assert "no rank has used blocks.1." in said[0]
        assert "blocks.0" not in said[0]


def test_a_unit_of_a_step_that_was_skipped_is_waited_for_again(ranks):
    passes = [[FIRST], [FIRST], [SECOND], [FIRST], [FIRST]]
    for kept, steps, said in ranks.run(4, detached, passes, False, (1,)):
        assert kept[1][0] == 0, "the first step sends what is kept for block 0"
        assert kept[2][0] == kept[3][0] > 0, "the second one was skipped"
        assert kept[4] == [0, 0]
        assert steps == 4
        assert not said


@pytest.mark.parametrize("passes", [[[BOTH, FIRST]], [[FIRST], [BOTH, FIRST]]])
def test_a_micro_batch_that_is_kept_is_waited_for(ranks, passes):
    for kept, steps, said in ranks.run(4, detached, [*passes, [BOTH], [BOTH]]):
        assert kept[len(passes)][1] > 0
        assert kept[-1] == [0, 0]
        assert steps == len(passes) + 1
        assert not said


def test_a_micro_batch_after_the_unit_was_sent_is_waited_for(ranks):
    passes = [[SECOND], [SECOND, FIRST], [BOTH], [BOTH]]
    for kept, steps, said in ranks.run(4, detached, passes):
        assert kept[1][1] == 0
        assert kept[2][0] == 0 < kept[2][1], "the second step sends block 0 and keeps block 1"
        assert kept[3] == [0, 0]
        assert steps == 3
        assert not said
