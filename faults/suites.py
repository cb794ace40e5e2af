"""Faults that the tests try: rows of planted code, damaged files and calls that do not fit.

Each case of the chosen tests is a try. A test tells itself that nothing ran and nothing changed.
"""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from faults.row import Row

TESTS = Path(__file__).parent.parent / "tests"
REFUSED = "one clear line on every rank"
SHARDED = ["state/saved/test_sharded.py"]
TOGETHER = ["integrate/test_together.py", "integrate/fsdp/test_together.py"]
RESUME = ["workbench/train/test_beginning.py", "workbench/train/test_lock.py"]
MISUSE: dict[str, tuple[str, list[str], str]] = {
    "code planted in a sharded checkpoint": ("bomb", SHARDED, "it does not run; one clear line"),
    "damaged or forged sharded checkpoint": (
        "(damage_is_refused and not bomb) or differ or changed_places", SHARDED, REFUSED,
    ),
    "memory format or dtype changed after attach": (
        "not gaps", ["integrate/ddp/test_order.py", "state/saved/test_strides.py"],
        "the law holds, or one clear line on every rank",
    ),
    "save, load or another call on one rank": (
        "done_by or one_rank or local_steps", TOGETHER, REFUSED + "; the old checkpoint stays",
    ),
    "local steps load what does not fit": (
        "does_not_fit or right_alone or told_apart", ["state/saved/test_local.py"],
        REFUSED + "; nothing changed",
    ),
    "attach told different things on each rank": ("compares or scaler_on", TOGETHER, REFUSED),
    "gradwire train --resume without its checkpoint, or twice": (
        "gone or put_back or comparison or in_use or second_run or at_once or all_refused",
        RESUME, "refused in one line",
    ),
}  # fmt: skip
"""By fault: tests as `pytest -k` selects them by name, their files, and what comes of it."""


def rows() -> list[Row]:
    """Return one row per fault."""
    return [suite(fault, *chosen) for fault, chosen in MISUSE.items()]


def suite(
    fault: str, names: str, files: Sequence[str] = ("integrate",), came_of_it: str = REFUSED
) -> Row:
    """Return a row of the outcomes of these tests."""
    row = Row(fault, came_of_it=came_of_it)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        chosen = ["-k", names, *(str(TESTS / file) for file in files), "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *chosen]
        subprocess.run(command, cwd=TESTS.parent, stdout=subprocess.DEVNULL)
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            if "skipped" not in kinds:
                row.count(case.get("name", "") if kinds & {"failure", "error"} else "")
    if not row.times:
        row.count("no test was found")
    return row
