"""What a run writes as it goes."""

import sys

import pytest

from gradwire.workbench.train.metrics import Metrics, Record, read_records


def record(step, score=None):
    return Record(step, 0, 0.5, score, 10, 100, 0.01, 1.0, 0.1, 2.0)


def test_lines_and_tensorboard(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    metrics = Metrics(tmp_path, 0, "accuracy")
    metrics.write(record(1))
    metrics.write(record(2, score=0.9))
    metrics.close()
    assert [r["accuracy"] for r in read_records(tmp_path / "metrics.jsonl")] == [None, 0.9]
    found = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert "step" not in found.Tags()["scalars"]
    assert [e.step for e in found.Scalars("loss")] == [1, 2]
    assert [e.step for e in found.Scalars("accuracy")] == [2]


def test_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    metrics = Metrics(tmp_path, 0)
    metrics.write(record(1))
    metrics.close()
    assert not (tmp_path / "tensorboard").exists()
    assert len(read_records(tmp_path / "metrics.jsonl")) == 1
