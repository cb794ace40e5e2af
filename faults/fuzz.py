"""Bad input: damaged messages and checkpoints, ranks that do not fit together."""

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from faults.row import Row
from tests.fuzz_messages import fuzz

MESSAGES = 20_000
SUITES = {
    "damaged or foreign checkpoint": ("integrate/test_damage.py", "integrate/test_checkpoint.py"),
    "ranks that do not fit together": ("integrate/test_attach.py", "integrate/test_handshake.py"),
    "replicas that drift apart": ("integrate/test_watch.py",),
}
"""Tests that count as tries, where they are there."""


def rows() -> list[Row]:
    """The messages, then a row a suite."""
    messages = Row("damaged message", came_of_it="refused, or a valid answer; no crash")
    try:
        outcomes = fuzz(MESSAGES, seed=2)
        messages.times = messages.survived = sum(outcomes.values())
        messages.came_of_it = f"{outcomes['refused']:,} refused, {outcomes['valid']:,} still valid"
    except AssertionError as error:
        messages.count(str(error))
    return [messages, *(suite(fault, files) for fault, files in SUITES.items())]


def suite(fault: str, files: tuple[str, ...]) -> Row:
    """A row of what pytest says."""
    found = Row(fault, came_of_it="one clear line on every rank")
    root = Path(__file__).parent.parent / "tests"
    there = [str(root / file) for file in files if (root / file).exists()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *there]
        subprocess.run(command, cwd=root.parent, stdout=subprocess.DEVNULL)
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            if "skipped" not in kinds:
                found.count(case.get("name", "") if kinds & {"failure", "error"} else "")
    return found
