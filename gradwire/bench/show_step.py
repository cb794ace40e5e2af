"""Rows of `bench step` as a table on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from gradwire.bench.show import as_count
from gradwire.cluster.rate import show_rate

Row = Mapping[str, Any]
STAGES = ("accumulate", "compress", "encode", "exchange", "decode")


def step_table(rows: Sequence[Row]) -> Table:
    """One line a method, milliseconds; narrow enough for 100 columns."""
    first = rows[0]
    asked = first["link"]["asked"]
    where = f"links of {show_rate(asked)}" if asked else "no shaped link"
    title = (
        f"{first['model']}, {first['ranks']} ranks, {where}, batch {first['batch']}, "
        f"{first['dtype']}; {first['device']}, {first['cores']} cores; milliseconds a step"
    )
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    for name in ("ms", "p20", "p80", "n", "noop/ms", "bytes", "exposed", "hidden", *STAGES):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["method"], *_cells(row))
    table.caption = "\n".join(f"{r['method']}: {r['why']}" for r in rows if r["why"])
    table.caption_justify = "left"
    return table


def _cells(row: Row) -> list[str]:
    seconds = row["seconds"]
    if not seconds:
        return [""] * (8 + len(STAGES))
    sent = row["bytes"] if row["wire_bytes"] is None else row["wire_bytes"]
    return [
        *(_ms(seconds[name]) for name in ("median", "p20", "p80")),
        str(row["iterations"]),
        f"{row['efficiency']:.3f}",
        "" if sent is None else as_count(sent),
        _ms(row["exposed"]),
        _ms(row["hidden"]),
        *(_ms(row["stages"].get(name)) for name in STAGES),
    ]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3g}"
