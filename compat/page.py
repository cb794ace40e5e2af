"""The rows in the docs: docs/torch-versions.json, and the table of docs/torch-versions.md."""

import json
import re
from dataclasses import asdict
from typing import Any

from compat.environment import ROOT
from compat.results import Row

PAGE, ROWS = ROOT / "docs" / "torch-versions.md", ROOT / "docs" / "torch-versions.json"
BEGIN, END = "<!-- rows: begin -->", "<!-- rows: end -->"
UNSEEN = "unseen"
"""The word for tests that no machine of the run could run."""

_ORDER = (
    *("DDP", "FSDP2", "local steps", "checkpoints", "trainers", "law, bits, ranks"),
    *("private names", "NCCL and nccl2, on GPUs"),
)


def keep_row(row: Row) -> None:
    """Put a row into the docs, in place of an older one of the same release."""
    rows = {release(old): old for old in read_rows()} | {row.versions["torch"]: asdict(row)}
    ordered = sorted(rows.values(), key=lambda row: version_numbers(release(row)))
    ROWS.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(
        re.sub(f"{BEGIN}.*{END}", lambda _: render_table(ordered), PAGE.read_text(), flags=re.S)
    )


def read_rows() -> list[dict[str, Any]]:
    """Return the rows of the docs, the oldest release first."""
    rows: list[dict[str, Any]] = json.loads(ROWS.read_text()) if ROWS.exists() else []
    return rows


def release(row: dict[str, Any]) -> str:
    """Return the torch release of a row."""
    return str(row["versions"]["torch"])


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release, to compare by."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


def render_table(rows: list[dict[str, Any]]) -> str:
    """Return the part of the page that is made from the rows."""
    lines = [
        BEGIN,
        f"| torch | {' | '.join(_ORDER)} | seen on |",
        f"| --- |{' --: |' * len(_ORDER)} --- |",
        *(
            f"| {release(row)} | {' | '.join(_cell(row['counts'][c]) for c in _ORDER)} "
            f"| {row['date']}, Python {row['versions']['python']} |"
            for row in rows
        ),
        "",
        f"Trainers: {_trainers(rows)}.",
        END,
    ]
    return "\n".join(lines)


def _cell(count: dict[str, int]) -> str:
    """Return the words for a column's counts; a column with nothing but skips is unseen."""
    if not count["passed"] and not count["failed"]:
        return UNSEEN
    failed = f", **{count['failed']} failed**" if count["failed"] else ""
    return f"{count['passed']} passed{failed}"


def _trainers(rows: list[dict[str, Any]]) -> str:
    """Return the trainers' names, each with all releases that the rows have."""
    words = []
    for name in sorted({n for row in rows for n in row["versions"]} - {"torch", "python"}):
        versions = sorted({row["versions"][name] for row in rows}, key=version_numbers)
        words.append(f"{name} {' and '.join(versions)}")
    return ", ".join(words)
