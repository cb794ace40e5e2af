"""`python -m faults`: try every fault, print a table of outcomes, and write the figures as JSON."""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

from faults import (
    disk,
    fuzz,
    fuzz_sequences,
    kills,
    law,
    link,
    restart,
    several,
    slow,
    soak,
    stop,
    suites,
)  # fmt: skip
from faults.page import keep, show, write
from faults.row import Row

FAULTS: dict[str, Callable[[], Row | list[Row]]] = {
    "kills": kills.rows,
    "law": law.row,
    "restart": restart.row,
    "slow": slow.rows,
    "link": link.rows,
    "disk": disk.rows,
    "stop": stop.row,
    "several": several.row,
    "fuzz": fuzz.rows,
    "misuse": suites.rows,
    "sequences": fuzz_sequences.row,
    "soak": soak.row,
}


def main() -> None:
    """Run the command line; the exit code is 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(FAULTS), help=f"of {', '.join(FAULTS)}")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/faults.json"), help="where the figures go"
    )
    parser.add_argument("--keep", action="store_true", help="also into docs/limits.md")
    options = parser.parse_args()
    # Several ranks share the cores, so that more threads would only slow each other down.
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[Row] = []
    for name in options.names:
        since = time.monotonic()
        try:
            outcome = FAULTS[name]()
        except Exception as error:  # one fault that cannot be tried must not hide the others
            outcome = Row(name)
            outcome.count(f"{type(error).__name__}: {error}")
        new_rows = outcome if isinstance(outcome, list) else [outcome]
        seconds = time.monotonic() - since
        print(f"{name}: {seconds:.0f} s", flush=True)
        write(options.out, name, new_rows, seconds)
        rows += new_rows
    show(rows)
    if options.keep:
        keep(options.out)
    raise SystemExit(any(row.lost for row in rows))


if __name__ == "__main__":
    main()
