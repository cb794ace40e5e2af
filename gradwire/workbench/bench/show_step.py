"""Rows of `bench step` as tables on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from gradwire.plan.rate import show_rate
from gradwire.stages import STAGES
from gradwire.workbench.bench.show import short_count

StepFields = Mapping[str, Any]
WIDTH = 100
"""The width of a terminal, in columns, below which numbers would be cut off."""


def step_tables(rows: Sequence[StepFields]) -> Group:
    """Return a table of one line per method, and a table of gradwire's stages if there are any."""
    first = rows[0]
    asked = first["link"]["asked"]
    network = f"links of {show_rate(asked)}" if asked else "no shaped link"
    ranks = f"{first['ranks']} ranks"
    if first["islands"]:
        ranks = f"{first['islands']} islands of {first['ranks'] // first['islands']} ranks"
    title = (
        f"{first['model']}, {ranks}, {network}, batch {first['batch']}, "
        f"{first['dtype']}; {first['device']}, {first['cores']} cores; milliseconds per step"
    )
    names = ("ms", "p20", "p80", "steps", "efficiency", "bytes", "exposed", "hidden")
    table = _table(title, names)
    for row in rows:
        table.add_row(row["method"], *(_cells(row) if row["seconds"] else ()))
    table.caption = "\n".join(f"{r['method']}: {r['why']}" for r in rows if r["why"])
    table.caption_justify = "left"
    tables = [table]
    if any(row["bits_per_round"] for row in rows):
        tables.append(_rounds_table(rows))
    ours = [row for row in rows if row["stages"]]
    if not ours:
        return Group(*tables)
    parts = _table("milliseconds in each stage of a step", ("bundles", *STAGES))
    for row in ours:
        times = (_milliseconds(row["stages"][name]) for name in STAGES)
        parts.add_row(row["method"], str(row["bundles"]), *times)
    return Group(*tables, parts)


def _rounds_table(rows: Sequence[StepFields]) -> Table:
    """Return a table of local steps: what a round sends, and the least time of a step."""
    title = "local steps: the least milliseconds of a step are never's, or those of a round's bits"
    table = _table(title, ("every", "bits a round", "least ms", "ms / least", "tokens/s"))
    for row in rows:
        if not row["seconds"] or not (row["bits_per_round"] or row["method"] == "never"):
            continue
        bits, ratio, tokens = row["bits_per_round"], row["of_bound"], row["tokens_per_second"]
        table.add_row(
            row["method"],
            str(row["every"]) if bits else "",
            short_count(bits) if bits else "",
            _milliseconds(row["bound_seconds"]),
            "" if ratio is None else f"{ratio:.3f}",
            "" if tokens is None else f"{tokens:,.0f}",
        )
    return table


def _table(title: str, names: Sequence[str]) -> Table:
    """Return an empty table with a column of methods and columns of numbers."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(row: StepFields) -> list[str]:
    seconds = row["seconds"]
    sent = row["bytes"] if row["wire_bytes"] is None else row["wire_bytes"]
    return [
        *(_milliseconds(seconds[name]) for name in ("median", "p20", "p80")),
        str(row["iterations"]),
        f"{row['efficiency']:.3f}",
        "" if sent is None else short_count(sent),
        _milliseconds(row["exposed"]),
        _milliseconds(row["hidden"]),
    ]


def _milliseconds(seconds: float | None) -> str:
    """Return `seconds` as milliseconds; an empty cell for None."""
    if seconds is None:
        return ""
    ms = 1e3 * seconds
    return f"{ms:,.0f}" if abs(ms) >= 1000 else f"{ms:.3g}"
