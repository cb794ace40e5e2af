import pytest
import torch

from gradwire.workbench.simulate import threaded_passes
from gradwire.workbench.simulate.simulation import Simulation
from tests.workbench.simulate.test_simulation import load, options


def simulation():
    run = options(workers=3, model="lstm-an4", momentum=0.0)
    return Simulation(run, load(run))


@pytest.mark.parametrize("at_once", [8, 2])
def test_lanes_find_what_the_workers_find_one_by_one(at_once, monkeypatch):
    """Also with fewer lanes than workers."""
    monkeypatch.setattr(threaded_passes, "STREAMS", at_once)
    one, many = simulation(), simulation()
    for step in range(2):
        flat, losses = one._gradients_in_turn(0, step)
        beside, also = many._gradients_on_threads(0, step)
        assert len({float(loss) for loss in losses}) == 3
        assert torch.equal(losses, also)
        for a, b in zip(flat, beside, strict=True):
            assert torch.equal(a, b)
    for a, b in zip(one.model.buffers(), many.model.buffers(), strict=True):
        assert torch.equal(a, b)


def test_what_goes_wrong_in_a_lane_is_raised():
    many = simulation()
    many._gradients_on_threads(0, 0)

    def loss(model, rank):
        raise ValueError(f"rank {rank}")

    with pytest.raises(ValueError, match="rank 0"):
        many.threaded(loss)
