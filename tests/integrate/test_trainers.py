"""Every trainer's example sends fewer bytes than dense, and resumes bit for bit."""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from gradwire.errors import VersionError
from gradwire.integrate import versions
from gradwire.torch_internals import KNOWN_TORCH, tested_range
from tests.integrate import trainers


def calls(name, folder):
    """How long the example runs, half of that, and then the rest."""
    folder = str(folder)
    whole, half = (8, 4) if name.startswith("transformers") else (4, 2)
    length = "steps" if name.startswith("transformers") else "epochs"
    last = {
        "lightning_trainer": f"{folder}/last.ckpt",
        "accelerate_loop": folder,
        "transformers_trainer": f"{folder}/checkpoint-4",
        "transformers_local_steps": f"{folder}/checkpoint-4",
    }[name]
    return (
        {"folder": f"{folder}-whole", length: whole},
        {"folder": folder, length: half},
        {"folder": folder, length: whole, "resume": last},
    )


NAMES = [
    "lightning_trainer",
    "accelerate_loop",
    "transformers_trainer",
    "transformers_local_steps",
]


@pytest.mark.parametrize("name", NAMES)
def test_example_sends_less_and_resumes_bit_equal(ranks, tmp_path, name):
    check_example(ranks, tmp_path, name)


def check_example(ranks, folder, name):
    trainers.import_on(ranks, name.partition("_")[0])
    whole, half, rest = calls(name, folder / "run")
    unbroken = ranks.run(2, trainers.run_example, name, whole)
    resumed = ranks.run(2, trainers.run_example, name, half, rest)
    assert resumed == unbroken
    (weights, sent, dense, norm), (weights_1, _, _, norm_1) = unbroken
    assert weights == weights_1, "replicas differ"
    assert 0 < sent < dense / 20
    assert norm > 0
    assert norm != norm_1, "every rank has a residual of its own, and gets that one back"


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "integrations.md"


def table():
    """Package: (oldest, tested) of the table of tested versions."""
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {row[1].strip(" `"): (row[2].strip(), row[3].strip()) for row in rows}


@pytest.mark.parametrize("package", ["torch", "lightning", "accelerate", "transformers", "ray"])
def test_table_of_tested_versions_is_true(package):
    oldest, tested = table()[package]
    installed = metadata.version(package).partition("+")[0]
    if package == "torch":
        assert tested == tested_range()
        release = tuple(int(number) for number in installed.split(".")[:2])
        assert KNOWN_TORCH[0] <= release <= KNOWN_TORCH[1]
    else:
        assert tested == installed
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = asked["optional-dependencies"].get(package, [])
    wanted = [re.sub(r"\[.*\]", "", line) for line in [*asked["dependencies"], *extras]]
    assert f"{package}>={oldest}" in wanted
    assert versions.OLDEST.get(package, oldest) == oldest


def test_versions_too_old_or_missing_are_refused(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: "2.5.9")
    with pytest.raises(VersionError, match=r"lightning 2\.6 or newer, got 2\.5\.9: pip install"):
        versions.require("lightning")
    monkeypatch.setattr(metadata, "version", lambda _: "2.10.0rc1")
    versions.require("lightning")

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ImportError, match=r"there is none: pip install 'transformers>=5\.22'"):
        versions.require("transformers")


def ray_settings(folder):
    """Nothing is reported, nothing is written outside `folder`, and no GPU is asked for."""
    return os.environ | {
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "disabled",  # otherwise Ray keeps a token in the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # other tests' memory is no reason to kill a worker
        "RAY_worker_niceness": "0",  # at Ray's 15, workers beside two busy tests hardly run
        "CUDA_VISIBLE_DEVICES": "",
        # Each of these saves seconds.
        "RAY_prestart_worker_first_driver": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0",
        "RAY_TRAIN_METRICS_ENABLED": "0",
    }


@pytest.mark.timeout(600)
def test_ray_example(tmp_path, ranks):
    """What Ray trains, and what goes on from the checkpoint that Ray puts together.

    In a process of its own, because Ray starts many; they all end with it.
    """
    command = [sys.executable, "-m", "tests.integrate.ray_runs", str(tmp_path)]
    # Ray's sockets are below its folder, and tmp_path is too long for the name of a socket.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short:
        done = subprocess.run(
            command, cwd=ROOT, env=ray_settings(short), timeout=540, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stdout + done.stderr
    begun = json.loads((tmp_path / "metrics.json").read_text())
    plain = ranks.run(2, trainers.without_ray, 2)[0]
    assert {name: begun[name] for name in plain} == plain
    (*_, last) = sorted(p for p in (tmp_path / "run").glob("checkpoint_*") if p.is_dir())
    unbroken = ranks.run(2, trainers.without_ray, 4)[0]
    assert ranks.run(2, trainers.without_ray, 4, str(last))[0] == unbroken
    assert 0 < unbroken["bytes_sent"] < unbroken["bytes_dense"] / 20
    assert unbroken["residual_norm"] > 0
