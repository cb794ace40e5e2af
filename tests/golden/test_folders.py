"""Checkpoint folders that are in the repository are loaded to the bit.

data/old was written by commit 9878616, data/new when the expectations were last recorded.
"""

import json
import subprocess

import numpy as np
import pytest
import torch

from tests.golden import folders
from tests.golden.cases import DATA

AGES = ("old", "new")
RESIZED = {"residual", "velocity", "weight"}
"""Of these another number of ranks gets the mean, where it can be asked for."""


def expected(age):
    """[rank][kind] -> (arrays by name, counters)."""
    counts = json.loads((DATA / age / "expected.json").read_text())
    out = [{kind: ({}, count) for kind, count in each.items()} for each in counts]
    with np.load(DATA / age / "expected.npz", allow_pickle=False) as arrays:
        for key in arrays:
            rank, kind, name = key.split("/", 2)
            out[int(rank)][kind][0][name] = arrays[key]
    return out


def same(found, wanted):
    """Names whose bits differ, or that only one of the two has."""
    odd = found.keys() ^ wanted.keys()
    both = found.keys() & wanted.keys()
    return sorted(odd) + sorted(n for n in both if found[n].tobytes() != wanted[n].tobytes())


def test_the_folders_are_small_and_not_ignored():
    files = [file for age in AGES for file in (DATA / age).rglob("*") if file.is_file()]
    assert len(files) == 23
    assert sum(file.stat().st_size for file in files) < 300_000
    asked = ["git", "-C", str(DATA), "check-ignore", *map(str, files)]
    ignored = subprocess.run(asked, capture_output=True, text=True, check=False)
    # 128: this is no work tree of git.
    assert ignored.returncode in (1, 128), ignored.stdout


@pytest.mark.parametrize("age", AGES)
def test_parts_hold_nothing_but_tensors_and_plain_values(age):
    files = [*(DATA / age).rglob("*.pt")]
    assert len(files) == 4
    for file in files:
        saved = torch.load(file, weights_only=True)
        assert saved["version"] == 1
        assert saved["residual"].keys() == folders.SHAPES.keys()


@pytest.mark.parametrize("age", AGES)
def test_two_ranks_load_the_bits_and_go_on_as_if_never_stopped(ranks, age):
    for kinds, wanted in zip(
        ranks.run(2, folders.load, str(DATA / age), folders.KINDS), expected(age), strict=True
    ):
        assert kinds.keys() == wanted.keys()
        for kind, (kept, counts) in kinds.items():
            assert same(kept, wanted[kind][0]) == [], kind
            assert counts == wanted[kind][1], kind


def mean(parts):
    """The mean of two fp32 arrays, rounded once."""
    first, second = (part.astype(np.float64) / 2 for part in parts)
    return (first + second).astype(np.float32)


@pytest.mark.parametrize("age", AGES)
@pytest.mark.parametrize("world", [1, 4])
def test_another_number_of_ranks_gets_the_mean(ranks, age, world):
    """So the sum over ranks, divided by their number, is what it was."""
    wanted = expected(age)
    for kinds in ranks.run(world, folders.load, str(DATA / age), ("plain", "local")):
        for kind, (kept, counts) in kinds.items():
            names = {n for n in wanted[0][kind][0] if n.split(" ")[0] in RESIZED}
            assert len(names) == 8
            merged = {n: mean([each[kind][0][n] for each in wanted]) for n in names}
            assert same({n: kept[n] for n in names}, merged) == []
            assert counts["steps"] == wanted[0][kind][1]["steps"]
            assert any(merged[f"residual {n}"].any() for n in folders.SHAPES)
            if kind == "local":
                rest = {n: a for n, a in kept.items() if n not in names}
                zeroth = {n: a for n, a in wanted[0][kind][0].items() if n not in names}
                assert same(rest, zeroth) == []


def put_together(kept, replicas):
    """The residuals of every replica, whose ranks hold rows of each parameter in turn."""
    shards = len(kept) // replicas
    rows = [kept[shards * replica : shards * (replica + 1)] for replica in range(replicas)]
    return [
        {n: np.concatenate([each[f"residual {n}"] for each in row]) for n in folders.SHAPES}
        for row in rows
    ]


@pytest.mark.parametrize("age", AGES)
@pytest.mark.parametrize(("world", "replicas"), [(1, 1), (4, 2), (4, 4), (2, 1)])
def test_other_replicas_and_shards_keep_the_mean(ranks, age, world, replicas):
    """As many replicas as before go on with what each had; others all get the mean."""
    found = ranks.run(world, folders.load, str(DATA / age), ("sharded",), replicas)
    assert {kinds["sharded"][1]["steps"] for kinds in found} == {folders.STEPS}
    together = put_together([kinds["sharded"][0] for kinds in found], replicas)
    old = [kinds["sharded"][0] for kinds in expected(age)]
    for name in folders.SHAPES:
        merged = mean([each[f"residual {name}"] for each in old])
        parts = [replica[name] for replica in together]
        if replicas == 2:
            for part, each in zip(parts, old, strict=True):
                assert part.tobytes() == each[f"residual {name}"].tobytes(), name
        else:
            assert {part.tobytes() for part in parts} == {merged.tobytes()}, name
