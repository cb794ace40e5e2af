"""Sharded checkpoints: resumed is bit-equal to unbroken; other numbers of ranks keep the law."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gradwire
from gradwire.errors import StateError
from tests.integrate.fsdp import models

CASES = {
    "randk, own seeds": {"method": "randk", "options": {"shared": False}, "density": 0.05},
    "exdyna": {"method": "exdyna", "density": 0.05},
    "topk, momentum, warm-up, small bundles": {
        "momentum": 0.9,
        "nesterov": True,
        "dense_steps": 1,
        "bundle_mb": 0.001,
    },
}


def everything(net, optimizer, wire):
    weights, moments = get_state_dict(net, optimizer)
    return {"model": weights, "optimizer": moments, "wire": wire}


def unbroken(rank, fields, folder):
    """Six steps; after three of them a checkpoint of everything, and one of the wire alone."""
    net, wire = models.wrapped(**fields)
    optimizer = models.train(net, 3)
    dcp.save(everything(net, optimizer, wire), checkpoint_id=f"{folder}/all")
    gradwire.save(wire, f"{folder}/wire")
    models.train(net, 3, start=3, optimizer=optimizer)
    stats = wire.stats()
    wire.close()
    return models.flat(net), stats.bytes_sent, stats.steps, stats.achieved_density


def resumed(rank, fields, folder, how):
    # New bundles, other residuals: nothing of that may show.
    net, wire = models.wrapped(seed=7, **{**fields, "bundle_mb": 25.0})
    optimizer = models.train(net, 2, start=50)
    state = everything(net, optimizer, wire)
    if how == "gradwire.load":
        del state["wire"]
    dcp.load(state, checkpoint_id=f"{folder}/all")
    set_state_dict(
        net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    if how == "gradwire.load":
        gradwire.load(wire, f"{folder}/wire")
    models.train(net, 3, start=3, optimizer=optimizer)
    stats = wire.stats()
    wire.close()
    return models.flat(net), stats.bytes_sent, stats.steps, stats.achieved_density


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_resumed_is_bit_equal(ranks, tmp_path, fields):
    whole = ranks.run(4, unbroken, fields, str(tmp_path))
    for how in ("dcp.load", "gradwire.load"):
        for one, other in zip(
            whole, ranks.run(4, resumed, fields, str(tmp_path), how), strict=True
        ):
            assert torch.equal(one[0], other[0]), how
            assert one[1:] == other[1:], "counters do not continue"


def whole_residuals(wire):
    """Every parameter's residual and momentum of this rank's replica, unsharded."""
    (part,) = wire.state_dict().values()
    return {
        f"{what} {name}": tensor.full_tensor()
        for what in ("residual", "velocity")
        for name, tensor in part.get(what, {}).items()
    }


def saved(rank, folder, replicas, momentum):
    axes = models.mesh(replicas=replicas)
    net, wire = models.wrapped(axes, momentum=momentum)
    optimizer = models.train(net, 3)
    dcp.save(everything(net, optimizer, wire), checkpoint_id=folder)
    kept = whole_residuals(wire)
    wire.close()
    return kept


def loaded(rank, folder, replicas, momentum):
    axes = models.mesh(replicas=replicas)
    net, wire = models.wrapped(axes, seed=3, momentum=momentum)
    gradwire.load(wire, folder)
    kept = whole_residuals(wire)
    models.train(net, 2)
    steps = wire.steps
    wire.close()
    return kept, steps


@pytest.mark.parametrize(
    ("old", "new", "momentum"), [(2, 4, 0.0), (4, 2, 0.9), (2, 1, 0.0), (1, 2, 0.9)]
)
def test_other_numbers_of_replicas_and_shards_keep_the_mean(ranks, tmp_path, old, new, momentum):
    before = ranks.run(4, saved, str(tmp_path), old, momentum)
    after = ranks.run(4, loaded, str(tmp_path), new, momentum)
    assert len(before[0]) == (28 if momentum else 14)
    for name in before[0]:
        then = torch.stack([part[name] for part in before]).double().mean(0)
        now = torch.stack([part[name] for part, _ in after]).double().mean(0)
        torch.testing.assert_close(now, then, rtol=1e-6, atol=1e-9)
        assert old == 1 or "gain" in name or then.norm() > 0
    assert {steps for _, steps in after} == {5}


def damaged(rank, folder, change):
    kw = {"momentum": 0.9} if change == "momentum" else {}
    net, wire = models.wrapped(**kw)
    models.train(net, 1)
    if change != "nothing saved":
        gradwire.save(wire, folder)
    state = wire.state_dict()
    wire.close()
    axes = models.mesh()
    other = models.model()
    if change == "parameters":
        other.last = torch.nn.Identity()
    if change == "shape":
        other.last = torch.nn.Linear(22, 6)
    if change == "wrapping":
        torch.distributed.fsdp.fully_shard(other.blocks[1].up, mesh=axes["shard"])
    models.sharded(other, axes["shard"])
    wire = gradwire.attach(other, replicate_group=axes["replicate"])
    try:
        if change == "another rank's":
            wire.load_state_dict({"replica7": state[f"replica{wire.group.rank}"]})
        else:
            gradwire.load(wire, folder)
    except StateError as error:
        return str(error)
    finally:
        wire.close()
        dist.barrier()
    return "loaded"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nothing", "loaded"),
        ("nothing saved", "holds no checkpoint: gradwire.json is not there"),
        ("parameters", "differ in parameters: ['last.bias', 'last.weight']"),
        ("shape", "residual of 'last.weight' has shape (5, 22), the model's is (6, 22)"),
        ("momentum", "this is momentum=0: attach with momentum=0.9"),
        ("wrapping", "the state was saved with other modules sharded"),
        ("another rank's", "the state has no replica"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(ranks, tmp_path, change, message):
    assert all(message in m for m in ranks.run(4, damaged, str(tmp_path), change))
