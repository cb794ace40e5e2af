"""`python -m faults`: every fault, a table of what came of it, and the figures as JSON."""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path

from faults import disk, fuzz, kills, law, link, restart, several, slow, soak, stop
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
    "soak": soak.row,
}


def main() -> None:
    """The command line; the exit code says whether anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(FAULTS), help=f"of {', '.join(FAULTS)}")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/faults.json"), help="where the figures go"
    )
    parser.add_argument("--keep", action="store_true", help="also into docs/limits.md")
    given = parser.parse_args()
    # Ranks of our own size: many threads each would only get in each other's way.
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[Row] = []
    for name in given.names:
        since = time.monotonic()
        try:
            found = FAULTS[name]()
        except Exception as error:  # one fault that cannot be tried must not hide the others
            found = Row(name)
            found.count(f"{type(error).__name__}: {error}")
        found = found if isinstance(found, list) else [found]
        seconds = time.monotonic() - since
        print(f"{name}: {seconds:.0f} s", flush=True)
        write(given.out, name, found, seconds)
        rows += found
    show(rows)
    if given.keep:
        keep(given.out)
    raise SystemExit(any(row.lost for row in rows))


if __name__ == "__main__":
    main()
