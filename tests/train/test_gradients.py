"""`train --record-gradients`: what a worker chose from, in files that bench reads."""

import numpy as np
import pytest
import torch

import gradwire
from gradwire.bench.data import read_gradient
from gradwire.train import Sitting
from gradwire.train.folder import GRADIENTS, open_new, write_config
from gradwire.train.gradients import record_gradient
from gradwire.train.launch import launch
from tests.data.files import write_mnist
from tests.train import jobs


def test_every_so_many_steps_a_file(tmp_path):
    run = jobs.options(write_mnist(tmp_path, train=40, test=10), workers=1, density=0.01)
    write_config(tmp_path / "run", run)
    sitting = Sitting(max_steps=5, record_gradients=2, quiet=True)
    result = launch(jobs.train, run, tmp_path / "run", sitting, workers=1)
    files = sorted((tmp_path / "run" / GRADIENTS).iterdir())
    assert [file.name for file in files] == ["step-000002.npy", "step-000004.npy"]
    for file in files:
        u = read_gradient(file)
        assert u.numel() == result["parameters"]
        assert float(u.abs().max()) > 0
    open_new(tmp_path / "run", overwrite=True)
    assert not (tmp_path / "run" / GRADIENTS).exists()


@pytest.mark.parametrize("method", ["topk", "dense"])
def test_it_is_u_without_the_padding(tmp_path, method):
    """The second file is gradient + residual; of a dense run just the gradient."""
    cluster = gradwire.VirtualCluster(1, method=method, density=0.1)
    kept = torch.zeros(103)
    for step in (1, 2):
        gradient = torch.randn(103, generator=torch.Generator().manual_seed(step))
        cluster.average([gradient])
        path = record_gradient(tmp_path, step, cluster._states[0])
        assert np.array_equal(np.load(path), (gradient + kept).numpy())
        kept = cluster.residual(0)
    assert (float(kept.abs().sum()) > 0) == (method == "topk")
    assert not list(tmp_path.rglob("*.tmp"))
