import torch

from gradwire.workbench.simulate.crew import Crew
from gradwire.workbench.simulate.graphs import Passes, twins
from tests.workbench.simulate.test_crew import load, options


def crew(**more):
    run = options(workers=3, model="resnet20", **more)
    return Crew(run, load(run))


def test_passes_are_those_of_the_workers_one_by_one():
    one, many = crew(), crew()
    batch = many.batches(0, 0)
    passes = Passes(twins(many.model, 3), many.options.task.loss, batch)
    for step in range(2):
        flat, losses = one._one_by_one(0, step)
        passes(many.batches(0, step))
        assert torch.equal(torch.stack(flat), passes.gradients)
        assert torch.equal(losses, passes.losses)
    for a, b in zip(one.model.buffers(), many.model.buffers(), strict=True):
        assert torch.equal(a, b)


def test_twins_share_weights_and_only_the_first_the_statistics():
    model = crew().model
    copies = twins(model, 3)
    for copy in copies:
        for p, q in zip(model.parameters(), copy.parameters(), strict=True):
            assert p.data_ptr() == q.data_ptr()
            assert p is not q
    ours = next(model.buffers()).data_ptr()
    assert [next(copy.buffers()).data_ptr() == ours for copy in copies] == [True, False, False]
