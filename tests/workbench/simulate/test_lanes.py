import pytest
import torch

from gradwire.workbench.simulate import lanes
from gradwire.workbench.simulate.crew import Crew
from tests.workbench.simulate.test_crew import load, options


def crew():
    run = options(workers=3, model="lstm-an4", momentum=0.0)
    return Crew(run, load(run))


@pytest.mark.parametrize("at_once", [8, 2])
def test_lanes_find_what_the_workers_find_one_by_one(at_once, monkeypatch):
    """Also with fewer lanes than workers."""
    monkeypatch.setattr(lanes, "LANES", at_once)
    one, many = crew(), crew()
    for step in range(2):
        flat, losses = one._one_by_one(0, step)
        beside, also = many._side_by_side(0, step)
        assert len({float(loss) for loss in losses}) == 3
        assert torch.equal(losses, also)
        for a, b in zip(flat, beside, strict=True):
            assert torch.equal(a, b)
    for a, b in zip(one.model.buffers(), many.model.buffers(), strict=True):
        assert torch.equal(a, b)


def test_what_goes_wrong_in_a_lane_is_raised():
    many = crew()
    many._side_by_side(0, 0)

    def loss(model, rank):
        raise ValueError(f"rank {rank}")

    with pytest.raises(ValueError, match="rank 0"):
        many.lanes(loss)
