"""What is said of a torch that nobody has tested."""

import sys
import warnings
from pathlib import Path

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


OPENERS = {
    "attach": lambda model, group: gradwire.attach(model, density=0.5),
    "fsdp": lambda model, group: gradwire.attach(model, replicate_group=group, density=0.5),
    "State": lambda model, group: gradwire.State(density=0.5),
    "local_steps": lambda model, group: gradwire.local_steps(
        model.module, torch.optim.SGD(model.parameters(), lr=0.1), every=2, density=0.5
    ),
}
LACKS = {
    "attach": (torch, "_foreach_copy_", "torch._foreach_copy_"),
    "fsdp": (FSDPModule, "_get_fsdp_state", "FSDPModule._get_fsdp_state"),
    "State": (torch, "_foreach_copy_", "torch._foreach_copy_"),
    "local_steps": (torch, "_foreach_copy_", "torch._foreach_copy_"),
}


def model_for(kind):
    if kind != "fsdp":
        return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 4)), None
    axes = sharded_models.mesh()
    model = sharded_models.sharded(sharded_models.model(), axes["shard"])
    return model, axes["replicate"].get_group()


def without(rank, kind):
    """What is said where torch lacks a name."""
    model = model_for(kind)
    home, name, _ = LACKS[kind]
    kept = getattr(home, name)
    delattr(home, name)
    try:
        OPENERS[kind](*model)
    except VersionError as error:
        return str(error)
    finally:
        setattr(home, name, kept)
    return "attached"


@pytest.mark.parametrize("kind", OPENERS)
def test_a_torch_without_a_name_is_one_line(ranks, kind):
    words = f"torch {torch.__version__} has no {LACKS[kind][2]}, which gradwire relies on"
    for said in ranks.run(2 if kind != "fsdp" else 4, without, kind):
        assert said.startswith(words)
        assert "2.11 to 2.15" in said
        assert "\n" not in said


def with_an_old_torch(rank, kind):
    """What is warned of, where torch says that it is old."""
    model, kept = model_for(kind), torch.__version__
    torch.__version__ = "2.10.1"
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wire = OPENERS[kind](*model)
    finally:
        torch.__version__ = kept
    wire.close()
    return [(str(w.message), Path(w.filename).name) for w in caught if "2.10.1" in str(w.message)]


@pytest.mark.parametrize("kind", OPENERS)
def test_an_old_torch_is_one_line_at_the_line_of_the_user(ranks, kind):
    for lines in ranks.run(2 if kind != "fsdp" else 4, with_an_old_torch, kind):
        [(words, file)] = lines
        assert words.startswith("torch 2.10.1 is not known to this gradwire")
        assert "\n" not in words
        assert file == Path(__file__).name


def without_fsdp2(rank):
    """A torch that is too old to have FSDP2: DDP goes on, and a sharded model is refused."""
    model, _ = model_for("attach")
    fsdp = sys.modules["torch.distributed.fsdp"]
    kept, ours = fsdp.FSDPModule, sys.modules.pop("gradwire.integrate.fsdp", None)
    del fsdp.FSDPModule
    try:
        gradwire.attach(model, density=0.5).close()
        gradwire.attach(model.module, replicate_group=torch.distributed.group.WORLD)
    except VersionError as error:
        return str(error)
    finally:
        fsdp.FSDPModule = kept
        if ours is not None:
            sys.modules["gradwire.integrate.fsdp"] = ours
    return "attached"


def test_a_torch_without_fsdp2_is_one_line(ranks):
    for said in ranks.run(2, without_fsdp2):
        assert "has no FSDP2 (ImportError: cannot import name 'FSDPModule'" in said
        assert "\n" not in said
