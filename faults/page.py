"""The outcomes of all faults: a table on the terminal, JSON, and a table in docs/limits.md."""

import json
import re
import sys
import time
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
            "seconds": round(seconds),
            "rows": [asdict(row) | {"lost": row.lost} for row in rows],
        }
    }
    figures = {
        "machine": describe_machine("cpu")["hardware"],
        "torch": torch.__version__,
        "parts": parts,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")


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
    """Put the figures into the docs."""
    FIGURES.write_text(path.read_text())
    text = PAGE.read_text()
    table = markdown(json.loads(path.read_text()))
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table, text, flags=re.S))


def markdown(figures: dict[str, Any]) -> str:
    """Return the part of docs/limits.md that is made from the figures."""
    parts = figures["parts"].values()
    minutes = sum(part["seconds"] for part in parts) / 60
    setup = f"{figures['machine']}, torch {figures['torch']}"
    lines = [
        BEGIN,
        f"`make faults`, {max(part['date'] for part in parts)}, {setup}, {minutes:.0f} minutes:",
        "",
        "| fault | times | survived | lost | slowest error | what came of it |",
        "| --- | --: | --: | --: | --: | --- |",
        *(f"| {' | '.join(_cells(row))} |" for row in rows_of(figures)),
        END,
    ]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    if row["skipped"]:
        return [row["fault"], "0", "", "", "", f"skipped: {row['skipped']}"]
    slowest = "" if row["slowest"] is None else f"{row['slowest']:g} s"
    counts = [f"{row[name]:,}" for name in ("times", "survived", "lost")]
    return [row["fault"], *counts, slowest, row["came_of_it"]]
