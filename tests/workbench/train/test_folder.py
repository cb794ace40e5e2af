import json

import pytest

from gradwire.errors import ConfigError, StateError
from gradwire.workbench.train import folder as folders
from gradwire.workbench.train.checkpoint import Position
from gradwire.workbench.train.metrics import Metrics, Record, read_records
from gradwire.workbench.train.options import resolve


def record(step):
    return Record(step, 0, 0.5, None, 10, 100, 0.01, 1.0, 0.1, 2.0)


def test_metrics_go_on_after_the_checkpoint_without_doubles(tmp_path):
    first = Metrics(tmp_path, step=0)
    for step in (10, 20, 30):
        first.write(record(step))
    first.close()
    second = Metrics(tmp_path, step=20)
    assert second.last["step"] == 20
    second.write(record(30))
    second.close()
    assert [r["step"] for r in read_records(tmp_path / folders.METRICS)] == [10, 20, 30]


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / folders.METRICS
    path.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "lo')
    assert read_records(path) == [{"step": 1}]


def test_config_round_trip(tmp_path):
    options = resolve({"seed": 3})
    folders.write_config(tmp_path / "run", options, "gradwire train --seed 3")
    assert folders.read_config(tmp_path / "run") == options
    assert folders.read_command(tmp_path / "run") == "gradwire train --seed 3"


def test_a_folder_with_a_run_is_not_used_again(tmp_path):
    folders.write_config(tmp_path, resolve({}))
    folders.open_new(tmp_path)
    (tmp_path / folders.METRICS).touch()
    with pytest.raises(ConfigError, match=f"--resume {tmp_path}"):
        folders.open_new(tmp_path)


def test_overwriting_removes_the_run_and_nothing_else(tmp_path):
    folders.write_config(tmp_path, resolve({}))
    for name in ("metrics.jsonl", "notes.txt", "checkpoint/trainer.pt", "compare-dense/a"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    folders.open_new(tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_folder_that_is_no_run_is_never_emptied(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "mine").touch()
    folders.open_new(tmp_path, overwrite=True)
    assert (tmp_path / "checkpoint" / "mine").exists()


def test_what_is_no_run_folder_is_said_to_be_none(tmp_path):
    with pytest.raises(ConfigError, match="is not a run folder"):
        folders.read_config(tmp_path)
    (tmp_path / folders.CONFIG).write_text("{")
    with pytest.raises(StateError, match=r"config.json cannot be read"):
        folders.read_config(tmp_path)


@pytest.mark.parametrize(
    ("workers", "steps", "offset"), [(4, 10, 6), (2, 20, 12), (8, 5, 3), (1, 40, 24), (5, 8, 5)]
)
def test_other_workers_start_at_the_same_place_in_the_epoch(workers, steps, offset):
    before = Position(step=106, epoch=10, offset=6, workers=4)
    after = before.with_workers(workers, steps)
    assert (after.offset, after.workers, after.step) == (offset, workers, 106)
