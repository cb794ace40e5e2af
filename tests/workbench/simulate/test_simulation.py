from functools import cache

import pytest
import torch

from gradwire.workbench import data, models
from gradwire.workbench.simulate.simulation import Simulation
from gradwire.workbench.train.evaluate import parameters_digest
from gradwire.workbench.train.options import resolve
from gradwire.workbench.train.trainer import RunLimits, Trainer
from tests.workbench.train.jobs import pooled

STEPS = 20


def options(**more):
    choices = {"model": "lenet5", "workers": 4, "batch": 4, "density": 0.01, "device": "cpu"}
    return resolve(choices | {"lr": 0.05, "momentum": 0.9} | more)


@cache
def load(run):
    return data.load_dataset(run.data, None, models.model_spec(run.model).shape)


def real_ranks(worker, run, folder):
    trainer = Trainer(run, folder, load(run), worker, RunLimits(max_steps=STEPS, quiet=True))
    return trainer.run()["parameters_sha256"]


RECIPE = {"recipe": "plain-union", "cosine": True, "follow_lr": True, "epochs": 1, "lr": 0.02}
RECIPE["values"] = "fp32"
"""In bf16 what the mean of a union loses stays with the rank whose part it was, and parts go by the
order of parameters, which for DDP is the reverse."""


@pytest.mark.parametrize("more", [{}, RECIPE])
def test_virtual_workers_end_with_the_bits_of_real_ranks(ranks, tmp_path, more):
    run = options(**more)
    simulation = Simulation(run, load(run))
    losses = [simulation.step() for _ in range(STEPS)]
    assert losses[-1] < losses[0]
    assert set(ranks.run(4, pooled, real_ranks, run, tmp_path)) == {
        parameters_digest(simulation.model)
    }


def test_u_is_gradient_and_residual():
    simulation = Simulation(options(workers=2), load(options()))
    simulation.step(watch=(0,))
    first = simulation.u()
    assert torch.equal(first, simulation.gradients[0])
    kept = simulation.cluster.residual(0)
    simulation.step(watch=(0,))
    torch.testing.assert_close(simulation.u(), simulation.gradients[0] + kept)
    assert kept.abs().sum() > 0


def test_batch_norm_keeps_the_first_workers_statistics():
    run = options(model="resnet20", workers=2, method="dense")
    both = Simulation(run, load(run))
    alone = Simulation(options(model="resnet20", workers=2), load(run))
    both.step()
    alone.shards = alone.shards[:1]
    alone._gradients(0, 0)
    for a, b in zip(both.model.buffers(), alone.model.buffers(), strict=True):
        assert torch.equal(a, b)


def test_bytes_and_memory_are_of_all_workers():
    run = options(density=0.01)
    simulation = Simulation(run, load(run))
    simulation.step()
    k = round(0.01 * 61_706)
    message = -(-(32 + 8 * k) // 16) * 16
    assert simulation.bytes_sent == 4 * 3 * message
    assert simulation.residual_bytes == 4 * 4 * 61_706


@pytest.mark.parametrize("clip", [0.0, 1e-3])
def test_the_averaged_gradient_is_clipped(clip):
    run = options(method="dense", momentum=0.0, lr=1.0, clip=clip)
    simulation = Simulation(run, load(run))
    before = torch.cat([p.detach().flatten() for p in simulation.parameters])
    simulation.step()
    moved = (torch.cat([p.detach().flatten() for p in simulation.parameters]) - before).norm()
    assert bool(moved <= 1.01e-3) is bool(clip)


def test_weights_decay_with_momentum_correction_as_with_momentum():
    """SGD's momentum makes ten times its decay; where gradwire has the momentum SGD has to."""
    norms = []
    for more in ({"method": "dense"}, {"density": 1.0, "momentum_correction": True}):
        run = options(weight_decay=0.01, **more)
        simulation = Simulation(run, load(run))
        for _ in range(60):
            simulation.step()
        norms.append(float(torch.cat([p.detach().flatten() for p in simulation.parameters]).norm()))
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
