"""What is said of a torch that nobody has tested."""

import warnings

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import gradwire
from gradwire.errors import VersionError
from gradwire.integrate import versions
from tests.integrate.fsdp import models as sharded_models


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("2.10.1", False),
        ("2.11.0", True),
        ("2.13.0+cpu", True),
        ("2.15.3", True),
        ("2.16.0.dev20261101+cu132", False),
        ("3.0.0", False),
    ],
)
def test_a_torch_that_is_not_known(monkeypatch, version, known):
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions.note_torch()
    lines = [str(w.message) for w in caught]
    assert len(lines) == (not known)
    assert all(version in line and "2.11 to 2.15" in line for line in lines)


def without(rank, kind):
    """What attach says where torch lacks a name: in a step of DDP, or for FSDP2's records."""
    if kind == "ddp":
        model, group, home, name = ddp_model(), None, torch, "_foreach_copy_"
    else:
        axes = sharded_models.mesh()
        model = sharded_models.sharded(sharded_models.model(), axes["shard"])
        group, home, name = axes["replicate"].get_group(), FSDPModule, "_get_fsdp_state"
    kept = getattr(home, name)
    delattr(home, name)
    try:
        gradwire.attach(model, replicate_group=group, density=0.5)
    except VersionError as error:
        return str(error)
    finally:
        setattr(home, name, kept)
    return "attached"


def ddp_model():
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 4))


@pytest.mark.parametrize(
    ("kind", "name"), [("ddp", "torch._foreach_copy_"), ("fsdp", "FSDPModule._get_fsdp_state")]
)
def test_a_torch_without_a_name_is_one_line_at_attach(ranks, kind, name):
    for said in ranks.run(4, without, kind):
        assert said.startswith(f"torch {torch.__version__} has no {name}, which gradwire relies on")
        assert "2.11 to 2.15" in said
        assert "\n" not in said
