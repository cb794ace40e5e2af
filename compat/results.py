"""The tests of one environment, and their results as a row of the table."""

import json
import os
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from compat.environment import ROOT

TESTS = ("tests/integrate", "tests/state", "tests/ranks", "tests/law", "tests/golden")

COLUMNS = {
    "NCCL and nccl2, on GPUs": ("integrate.test_nccl", "integrate.fsdp.test_nccl", "_gpu"),
    "trainers": (
        *("integrate.test_accelerate", "integrate.test_lightning"),
        *("integrate.test_trainers", "integrate.test_transformers"),
    ),
    "checkpoints": (
        *("integrate.test_checkpoint", "integrate.fsdp.test_checkpoint"),
        *("state.saved", "golden.test_folders"),
    ),
    "FSDP2": ("integrate.fsdp.",),
    "local steps": ("integrate.test_local",),
    "private names": ("integrate.test_torch_internals", "integrate.test_versions"),
    "DDP": ("integrate.",),
    "law, bits, ranks": ("law.", "golden.", "ranks.", "state."),
}
"""Parts of the names of test modules, by column. A module is in the first column with a match."""

PACKAGES = ("torch", "lightning", "accelerate", "transformers", "ray")

_ASK = """
import json, platform, sys
from importlib import metadata
found = {name: metadata.version(name) for name in sys.argv[1:]}
print(json.dumps(found | {"python": platform.python_version()}))
"""


@dataclass
class Row:
    """One torch release. counts: by column, the number of tests that passed, failed, skipped."""

    versions: dict[str, str]
    date: str
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def run_tests(python: Path, report: Path, workers: int) -> Row:
    """Return the row of an environment, after all its tests."""
    report.unlink(missing_ok=True)
    # PYTHONPATH: test this tree, not an installed package. One thread each, as in `make check`.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    tests = [name for name in TESTS if (ROOT / name).is_dir()]
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    command += [f"--junitxml={report.absolute()}", "-n", str(workers), "--dist", "worksteal"]
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if not report.exists():
        raise SystemExit(f"{python}: the tests ended without a report")
    asked = subprocess.run(
        [str(python), "-c", _ASK, *PACKAGES], check=True, capture_output=True, text=True
    )
    return row_of(report, json.loads(asked.stdout))


def row_of(report: Path, versions: dict[str, str]) -> Row:
    """Return the row of pytest's report, an XML file."""
    row = Row(versions, time.strftime("%Y-%m-%d"))
    row.counts = {column: dict.fromkeys(("passed", "failed", "skipped"), 0) for column in COLUMNS}
    for case in ElementTree.parse(report).iter("testcase"):
        # A module that cannot be imported is a case without a class.
        place = case.get("classname") or case.get("name") or ""
        outcome = _outcome(child.tag for child in case)
        row.counts[column_of(place)][outcome] += 1
        if outcome == "failed":
            row.failures.append(f"{place}::{case.get('name')}")
    return row


def column_of(module: str) -> str:
    """Return the column of a test module, named as in tests.integrate.test_ddp."""
    name = module.removeprefix("tests.")
    for column, parts in COLUMNS.items():
        if any(name.startswith(part) or name.endswith(part) for part in parts):
            return column
    raise ValueError(f"no column of the table has {module}")


def _outcome(tags: Iterable[str]) -> str:
    kinds = set(tags)
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"
