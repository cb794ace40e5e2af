"""What is said of a torch that nobody has tested."""

import warnings

import pytest
import torch

from gradwire.errors import AttachError
from gradwire.integrate import fsdp, versions
from tests.integrate import sharded_models


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


def changed(rank):
    """What attach says where FSDP2 has renamed what gradwire reads."""
    axes = sharded_models.mesh()
    net = sharded_models.sharded(sharded_models.model(), axes["shard"])
    kept = fsdp.units_of
    fsdp.units_of = lambda model: model.no_such_thing
    try:
        fsdp.attach_sharded(net, None, axes["replicate"].get_group(), {})
    except AttachError as error:
        return str(error)
    finally:
        fsdp.units_of = kept
    return "attached"


def test_another_fsdp_is_one_line(ranks):
    for said in ranks.run(4, changed):
        assert "FSDP2 is not as gradwire knows it" in said
        assert "no_such_thing" in said
        assert "2.11 to 2.15" in said
        assert "\n" not in said
