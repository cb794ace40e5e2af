"""Fuzzer of sequences of operations, on real ranks and on virtual workers.

CI plays a few; `make fuzz`, or `python -m faults.fuzz_sequences --count 2000`, many. Sequence 17 of
seed 3 again: `--seed 3 --first 17 --count 1`. `--without MEND` takes a mend back and looks for it.
"""

import argparse

from faults.row import Row
from faults.sequences.mends import MENDS
from faults.sequences.plan import LONGEST, SHORTEST
from faults.sequences.run import Tally, plans, play_many, show


def fuzz(
    count: int,
    seed: int = 1,
    first: int = 0,
    without: str = "",
    findings: int = 10,
    shortens: bool = True,
) -> Tally:
    """Play sequences `first` to `first + count - 1` of a seed, until there are so many findings."""
    numbers = range(first, first + count)
    return play_many(plans(seed, numbers), Tally(), without, findings, shortens)


def row(count: int = 100) -> Row:
    """Return the row of a short run; each sequence is a try."""
    row = Row(f"random sequences of {SHORTEST} to {LONGEST} operations")
    tally = fuzz(count)
    findings = tally.findings + [""] * (tally.played - len(tally.findings))
    for finding in findings:
        row.count(finding)
    row.came_of_it = f"{sum(tally.operations.values()):,} operations: the law, or one clear error"
    return row


def main() -> None:
    """Run the command line; the exit code is 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first sequence")
    parser.add_argument("--findings", type=int, default=10, help="stop after so many")
    parser.add_argument("--brief", action="store_true", help="look for no shorter sequences")
    parser.add_argument("--without", default="", choices=list(MENDS), help="take a mend back")
    options = parser.parse_args()
    tally = fuzz(
        options.count, options.seed, options.first, options.without, options.findings,
        not options.brief,
    )  # fmt: skip
    show(tally)
    raise SystemExit(bool(tally.findings))


if __name__ == "__main__":
    main()
