"""Run folders of before: their config.json was written by the code at commit 5d2b72f."""

from pathlib import Path

import pytest

from gradwire.workbench.train.folder import CONFIG, read_config
from gradwire.workbench.train.saved import resume_options

RECORDED = Path(__file__).parent / "data"
CONFIGS = {
    "config_before_flags.json": {
        "method": "randk",
        "exchange": "allgather",
        "options": {"shared": False, "seed": 3},
        "density": 0.05,
        "values": "bf16",
        "dense": ("*.bias", "9*"),
        "warmup": (0.5, 0.25),
        "warmup_steps": 3,
        "momentum": 0.9,
        "masking": False,
        "clip": 2.0,
    },
    "config_of_defaults.json": {"method": "topk", "density": 0.01, "options": {}, "dense": ()},
}
"""For each recorded file, the fields of Config that the run had."""


@pytest.fixture(params=CONFIGS)
def run_folder(request, tmp_path):
    """A run folder with a recorded config.json, and the fields of Config that it stands for."""
    (tmp_path / CONFIG).write_text((RECORDED / request.param).read_text())
    return tmp_path, CONFIGS[request.param]


def test_a_config_of_before_loads(run_folder):
    folder, fields = run_folder
    config = read_config(folder).config()
    assert {name: getattr(config, name) for name in fields} == fields


def test_a_run_of_before_goes_on_as_it_was(run_folder):
    saved = read_config(run_folder[0])
    assert resume_options(saved, {"model": None, "density": None}) == (saved, [])
