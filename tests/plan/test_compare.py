"""The planner beside rows of `bench step --json`."""

import json

import pytest

from gradwire.errors import ConfigError
from gradwire.plan.compare import compare, read_rows

SHARED = {
    "ranks": 4,
    "density": 0.001,
    "device": "NVIDIA H200",
    "cores": 16,
    "link": {"asked": 10_000_000_000, "measured": 9.565e9},
}
MEASURED = [
    ("alexnet", "dense", "", None, 0.00766, 0.3145),
    ("alexnet", "bf16", "", None, 0.00766, 0.1614),
    ("alexnet", "topk:bundle_mb=100", "allgather", 100_000_000, 0.00766, 0.01239),
    ("alexnet", "topk:bundle_mb=1000", "allgather", 1_000_000_000, 0.00766, 0.01053),
    ("vgg16", "dense", "", None, 0.06116, 0.7364),
    ("vgg16", "bf16", "", None, 0.06116, 0.4177),
    ("vgg16", "topk", "allgather", 25_000_000, 0.06116, 0.06816),
    ("vgg16", "topk:bundle_mb=1000", "allgather", 1_000_000_000, 0.06116, 0.06640),
]
"""Medians on one H200, four NCCL ranks, 15 November 2026."""


def rows():
    for model, method, exchange, size, noop, seconds in MEASURED:
        kind = ("bf16", "packed") if exchange else ("fp32", "")
        yield SHARED | {
            "model": model, "method": method, "exchange": exchange, "bundle_bytes": size,
            "noop_seconds": noop, "seconds": {"median": seconds}, "values": kind[0],
            "indices": kind[1],
        }  # fmt: skip


def test_a_gpus_rows_are_predicted_within_15_percent():
    found = compare(rows())
    assert len(found) == len(MEASURED)
    for row in found:
        assert abs(row.error) < 0.15, (row.model, row.method, row.error)


def test_rows_that_nothing_is_known_of_are_left_out(tmp_path):
    file = tmp_path / "rows.jsonl"
    other = [row | {"method": name} for row in rows() for name in ("noop", "powersgd-1")]
    file.write_text("\n".join(map(json.dumps, other)) + "\n")
    assert compare(read_rows(file)) == []


def test_files_without_rows_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match="--check takes paper, or rows of bench step"):
        read_rows(tmp_path / "none.jsonl")
    (tmp_path / "odd.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="holds no JSON rows"):
        read_rows(tmp_path / "odd.jsonl")
