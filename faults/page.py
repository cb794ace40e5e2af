"""The outcomes of all faults: a table on the terminal, JSON, and a table in docs/limits.md."""

import json
import re
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from faults.row import Row
from gradwire.workbench.train.folder import describe_machine

DOCS = Path(__file__).parent.parent / "docs"
PAGE, FIGURES = DOCS / "limits.md", DOCS / "limits.json"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def write(path: Path, name: str, rows: list[Row], seconds: float) -> None:
    """Put the rows of one fault into the figures, with date, machine and duration."""
    figures = json.loads(path.read_text()) if path.exists() else {}
    parts = figures.get("parts", {}) | {
        name: {
            "date": time.strftime("%Y-%m-%d"),
            "machine": describe_machine("cpu")["hardware"],
            "torch": torch.__version__,
            "seconds": round(seconds),
            "rows": [asdict(row) | {"lost": row.lost} for row in rows],
        }
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"parts": parts}, indent=1) + "\n")


def rows_of(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of all faults."""
    return [row for part in figures["parts"].values() for row in part["rows"]]


def show(rows: list[Row]) -> None:
    """Print the table, and after it every loss."""
    table = Table("fault", "times", "survived", "lost", "slowest", "what came of it")
    for row in rows:
        table.add_row(*_cells(asdict(row) | {"lost": row.lost}))
    Console(width=None if sys.stdout.isatty() else 130).print(table)
    for row in rows:
        for loss in row.losses:
            print(f"LOST {row.fault}: {loss}")


def keep(path: Path) -> None:
    """Put the figures into the docs, and leave there those of faults that were not tried."""
    figures = json.loads(FIGURES.read_text())
    figures["parts"] |= json.loads(path.read_text())["parts"]
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    text = PAGE.read_text()
    table = markdown(figures)
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, text, flags=re.S))


def markdown(figures: dict[str, Any]) -> str:
    """Return the part of docs/limits.md that is made from the figures."""
    lines = [
        BEGIN,
        *_setups(figures),
        "",
        "| fault | times | survived | lost | slowest error | what came of it |",
        "| --- | --: | --: | --: | --: | --- |",
        *(f"| {' | '.join(_cells(row))} |" for row in rows_of(figures)),
        END,
    ]
    return "\n".join(lines)


def _setups(figures: dict[str, Any]) -> list[str]:
    """Return a line per machine and day: which faults were tried there, in how many minutes."""
    setups: dict[str, list[str]] = {}
    seconds: Counter[str] = Counter()
    for name, part in figures["parts"].items():
        setup = f"{part['date']}, {part['machine']}, torch {part['torch']}"
        setups.setdefault(setup, []).append(f"`{name}`")
        seconds[setup] += part["seconds"]
    return [
        f"- {', '.join(names)}: {setup}, {seconds[setup] / 60:.0f} minutes"
        for setup, names in setups.items()
    ]


def _cells(row: dict[str, Any]) -> list[str]:
    if row["skipped"]:
        return [row["fault"], "0", "", "", "", f"skipped: {row['skipped']}"]
    slowest = "" if row["slowest"] is None else f"{row['slowest']:g} s"
    counts = [f"{row[name]:,}" for name in ("times", "survived", "lost")]
    return [row["fault"], *counts, slowest, row["came_of_it"]]
