"""benchmarks/small_network.py, on a few images."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parent.parent / "benchmarks" / "small_network.py"


@pytest.fixture
def small(monkeypatch):
    spec = importlib.util.spec_from_file_location("small_network", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "small_network", module)
    spec.loader.exec_module(module)
    module.STEPS, module.WORKERS = 40, 2
    return module


def test_ways_are_paired_and_count_their_entries(small):
    torch.manual_seed(0)
    x, y = torch.randn(128, 192), torch.randint(0, 10, (128,))
    ways = small.FEW.split(",")
    rows = [
        {"way": name, "seed": seed} | small.run(small.WAYS[name], seed, (x, y), (x, y))
        for seed in (1, 2)
        for name in ways
    ]
    found = {(row["way"], row["seed"]): row for row in rows}
    assert found["dense", 1] != found["dense", 2]
    assert found["dense-1.5-3", 1]["loss"] != found["dense", 1]["loss"]
    assert found["dense-plain", 1]["score"] > 90
    assert found["dense-plain", 1]["entries"] == 100
    assert found["plain-union", 1]["entries"] == pytest.approx(0.2)
    assert found["plain-front", 1] != found["plain-union", 1]
    lines = small.table(rows).splitlines()
    first = found["dense-1.5-3", 1]["score"] - found["dense", 1]["score"]
    second = found["dense-1.5-3", 2]["score"] - found["dense", 2]["score"]
    assert f"{(first + second) / 2:+.2f} +- " in lines[3]
    assert len(lines) == 2 + len(ways)


def test_rate_and_decay_are_looked_for_alike(small):
    dense, plain = small.WAYS["dense-2-2"], small.WAYS["plain-union-2-2"]
    assert plain.fields == small.WAYS["plain-union"].fields
    assert (dense.rate, plain.rate) == pytest.approx((2, 20))
    assert (dense.decay, plain.decay, plain.momentum) == (2, 2, 0)
    same, plain = small.WAYS["dense-1.5-3"], small.WAYS["plain-union"]
    assert (10 * same.rate, same.decay) == pytest.approx((plain.rate, plain.decay))
    row = {"seed": 1, "score": 50.0, "loss": 1.0, "entries": 100.0}
    told = small.table([row | {"way": "dense-2-2", "seed": seed} for seed in (1, 2)])
    assert told.splitlines()[2:] == ["| dense-2-2 | 2 | 50.00 |  |  |  | 1.000 | 100 % |"]
