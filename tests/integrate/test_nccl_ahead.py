"""Steps before and after kernels are compiled, on CUDA: the same bits, and none compiled later."""

import os
from pathlib import Path

import pytest
import torch

from gradwire.kernels.dispatch import on_references
from gradwire.state import state
from tests.integrate import models
from tests.integrate.test_nccl import train, wrapped
from tests.rank_pool import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WAYS = [
    {},
    {"method": "topk/union", "density": 0.002},
    {"values": "int8", "indices": "packed", "momentum": 0.9},
]


def steps(rank, folder, ahead, fields):
    """Weights, whether the first steps ran on references, and the kernels compiled too late."""
    os.environ["TRITON_CACHE_DIR"] = folder
    if rank not in ahead:
        state.compile_ahead = lambda *_: None
    ddp, wire = wrapped(**fields)
    train(ddp, rank, 4)
    early = on_references()
    assert wire.wait_for_kernels(120)
    before = compiled(folder)
    optimizer = train(ddp, rank, 6, start=4)
    assert optimizer is not None
    return models.flat(ddp).cpu().numpy().tobytes(), early, sorted(compiled(folder) - before)


def compiled(folder):
    return {str(path) for path in Path(folder).glob("*/*.cubin")}


@pytest.mark.parametrize("fields", WAYS, ids=str)
def test_references_and_kernels_give_the_same_bits(tmp_path, fields):
    results = {}
    for ahead in ((0, 1), (0,), ()):
        pool = Ranks(2, backend="nccl")
        folder = tmp_path / str(len(ahead))
        try:
            results[ahead] = pool.run(2, steps, str(folder), ahead, fields)
        finally:
            pool.close()
    bits = {weights for found in results.values() for weights, *_ in found}
    assert len(bits) == 1
    assert [early for _, early, _ in results[0, 1]] == [True, True]
    assert [late for _, _, late in results[0, 1]] == [[], []]
