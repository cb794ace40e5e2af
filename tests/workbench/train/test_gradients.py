"""`train --record-gradients`: what a worker chose from, in files that bench reads."""

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradwire
from gradwire.accumulate.bundle import Bundle
from gradwire.types import Slot
from gradwire.workbench.bench.data import read_gradient
from gradwire.workbench.train import RunLimits
from gradwire.workbench.train.folder import GRADIENTS, open_new, write_config
from gradwire.workbench.train.gradients import record_gradient
from tests.workbench.data.files import write_mnist
from tests.workbench.train import jobs


def test_every_so_many_steps_a_file(ranks, tmp_path):
    run = jobs.options(write_mnist(tmp_path, train=40, test=10), workers=1, density=0.01)
    write_config(tmp_path / "run", run)
    limits = RunLimits(max_steps=5, record_gradients=2, quiet=True)
    (result,) = ranks.run(1, jobs.pooled, jobs.train, run, tmp_path / "run", limits)
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


def two_bundles():
    """Of three parameters with padding between them; entry i of all of them is i."""
    bundles, first = [], 0
    for lengths in ((5, 70), (3,)):
        slots, offset = [], 0
        for n in lengths:
            slots.append(Slot(f"{offset}", (n,), (1,), torch.float32, offset, n))
            offset += -(-n // 64) * 64
        bundles.append(Bundle(slots, torch.device("cpu"), rank=0, index=0, dense=False))
        bundles[-1].buffer.fill_(-1)
        for slot in slots:
            bundles[-1].u[slot.offset : slot.offset + slot.numel] = torch.arange(
                first, first + slot.numel
            ).float()
            first += slot.numel
    return SimpleNamespace(bundles=bundles)


def test_every_parameter_behind_the_other(tmp_path):
    path = record_gradient(tmp_path, 12, two_bundles())
    assert path == tmp_path / GRADIENTS / "step-000012.npy"
    assert read_gradient(path).tolist() == list(range(78))


def test_a_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    """Broken off while it was written: what was there before stays."""
    path = record_gradient(tmp_path, 1, two_bundles())
    before = path.read_bytes()

    def broken(file, *_, **__):
        file.write(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", broken)
        with pytest.raises(OSError, match="disk full"):
            record_gradient(tmp_path, 1, two_bundles())
    assert path.read_bytes() == before
    assert [f for f in os.listdir(path.parent) if f.endswith(".npy")] == [path.name]
