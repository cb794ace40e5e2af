"""`python -m compat`: run the tests in an environment per torch, and write their table.

The table is docs/torch-versions.md.
"""

import argparse
from pathlib import Path

from compat.environment import build
from compat.page import keep_row
from compat.results import Row, run_tests
from gradwire.torch_internals import KNOWN_TORCH


def main() -> None:
    """Run the command line; the exit code is 1 if a test failed."""
    ends = [".".join(map(str, version)) for version in KNOWN_TORCH]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("versions", nargs="*", default=ends, help=f"of torch: {' '.join(ends)}")
    parser.add_argument(
        "--folder", type=Path, default=Path(".compat"), help="where the environments are"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests")
    options = parser.parse_args()
    rows: list[Row] = []
    for version in options.versions:
        # 2.15 is the first release of that line.
        release = version if version.count(".") > 1 else f"{version}.0"
        python = build(options.folder / release, release)
        rows.append(run_tests(python, options.folder / f"{release}.xml", options.workers))
        keep_row(rows[-1])
        for failure in rows[-1].failures:
            print(f"FAILED with torch {release}: {failure}", flush=True)
    raise SystemExit(any(row.failures for row in rows))


if __name__ == "__main__":
    main()
