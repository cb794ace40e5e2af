import torch

from gradwire.workbench.simulate.graph_passes import GraphPasses, copy_per_worker
from gradwire.workbench.simulate.simulation import Simulation
from tests.workbench.simulate.test_simulation import load, options


def simulation(**more):
    run = options(workers=3, model="resnet20", **more)
    return Simulation(run, load(run))


def test_passes_are_those_of_the_workers_one_by_one():
    one, many = simulation(), simulation()
    batch = many.batches(0, 0)
    passes = GraphPasses(copy_per_worker(many.model, 3), many.options.task.loss, batch)
    for step in range(2):
        flat, losses = one._gradients_in_turn(0, step)
        passes(many.batches(0, step))
        assert torch.equal(torch.stack(flat), passes.gradients)
        assert torch.equal(losses, passes.losses)
    for a, b in zip(one.model.buffers(), many.model.buffers(), strict=True):
        assert torch.equal(a, b)


def test_twins_share_weights_and_only_the_first_the_statistics():
    model = simulation().model
    copies = copy_per_worker(model, 3)
    for copy in copies:
        for p, q in zip(model.parameters(), copy.parameters(), strict=True):
            assert p.data_ptr() == q.data_ptr()
            assert p is not q
    ours = next(model.buffers()).data_ptr()
    assert [next(copy.buffers()).data_ptr() == ours for copy in copies] == [True, False, False]
