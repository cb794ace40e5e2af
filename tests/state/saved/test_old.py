"""Checkpoints of the release before this one, made by its code: `old` has them and what is in them.

Two ranks took three steps of a small model, with plain DDP and momentum, with local steps, and
sharded as two replicas and as two shards. Parts name no run; sharded folders have no manifest.
"""

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.state.saved import forge

OLD = Path(__file__).parent / "old"
FIELDS = {"density": 0.2, "dense_below": 0}
SHAPES = {"sharded2x1": (2, 1), "sharded1x2": (1, 2)}


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3))


def sharded(shape):
    axes = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = fully_shard(net(), mesh=axes["shard"])
    group = axes["replicate"].get_group()
    return model, gradwire.attach(model, replicate_group=group, **FIELDS)


def kept(wire):
    return {name: wire.residual(name).reshape(-1) for name, _ in net().named_parameters()}


def step(model):
    model(torch.ones(4, 8)).square().mean().backward()


def same(found, wanted):
    return all(torch.equal(found[n], torch.tensor(wanted[n]).reshape(-1)) for n in wanted)


def loaded(rank, folder):
    """Return every checkpoint's content, and True if a run can go on from it and save it anew."""
    wanted = json.loads((OLD / f"rank{rank}.json").read_text())
    out, warned = {}, []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("gradwire").addHandler(handler)

    ddp = DistributedDataParallel(net())
    wire = gradwire.attach(ddp, momentum=0.9, **FIELDS)
    gradwire.load(wire, OLD / "plain")
    out["plain"] = wire.steps == 3 and same(kept(wire), wanted["plain"])
    step(ddp)
    gradwire.save(wire, f"{folder}/plain")
    gradwire.load(wire, f"{folder}/plain")
    out["plain anew"] = wire.steps == 4
    wire.close()

    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    local = gradwire.local_steps(model, optimizer, every=2, **FIELDS)
    gradwire.load(local, OLD / "local")
    weights = {n: p.detach().reshape(-1) for n, p in model.named_parameters()}
    out["local"] = local.inner_steps == 3 and same(kept(local), wanted["local"])
    out["weights"] = same(weights, wanted["weights"])
    gradwire.save(local, f"{folder}/local")
    local.close()

    for name, shape in SHAPES.items():
        for own in SHAPES.values():
            model, wire = sharded(own)
            gradwire.load(wire, OLD / name)
            if own == shape:
                out[name] = wire.steps == 3 and same(kept(wire), wanted[name])
            step(model)
            out[f"{name} on {own}"] = wire.steps == 4
            wire.close()
    out["warnings"] = len([text for text in warned if "has no gradwire.json" in text])
    return out


@pytest.fixture(scope="module")
def found(ranks, tmp_path_factory):
    return ranks.run(2, loaded, str(tmp_path_factory.mktemp("old")))


def test_old_checkpoints_are_loaded_to_the_bit(found):
    for out in found:
        assert out.pop("warnings") == 4
        assert len(out) == 10
        assert all(out.values()), out


def other_world(rank):
    """Two old parts, three ranks: the mean of both."""
    wire = gradwire.attach(DistributedDataParallel(net()), momentum=0.9, **FIELDS)
    gradwire.load(wire, OLD / "plain")
    residual = kept(wire)["0.weight"]
    wire.close()
    return residual.double().sum().item()


def test_an_old_checkpoint_of_another_number_of_ranks(ranks):
    parts = [json.loads((OLD / f"rank{rank}.json").read_text())["plain"] for rank in range(2)]
    mean = sum(torch.tensor(part["0.weight"]).double().sum().item() for part in parts) / 2
    assert ranks.run(3, other_world) == pytest.approx([mean] * 3, rel=1e-5, abs=1e-6)


def mixed(rank, folder):
    """An old sharded folder into which another one's part was copied, and nobody could know."""
    if rank == 0:
        path = forge.copied(OLD / "sharded2x1", Path(folder) / "steps")
        forge.change_rest(path, "replica1.shard0", lambda rest: rest.update(steps=2))
    torch.distributed.barrier()
    _, wire = sharded((2, 1))
    try:
        gradwire.load(wire, f"{folder}/steps")
    except gradwire.errors.StateError as error:
        return str(error), wire.steps
    finally:
        wire.close()
    return "loaded", wire.steps


def test_without_a_manifest_ranks_still_compare_their_steps(ranks, tmp_path):
    for text, steps in ranks.run(2, mixed, str(tmp_path)):
        assert text.endswith("ranks hold different checkpoints. Copy one to all.")
        assert steps == 0
