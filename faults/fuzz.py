"""Fault: bad input. Messages and files are damaged, and ranks do not fit together."""

from collections import Counter
from importlib import import_module
from importlib.util import find_spec

from faults.row import Row
from faults.suites import suite

FUZZERS = {
    "damaged message": ("faults.fuzz_messages", 20_000),
    "damaged file into a loader": ("faults.fuzz_loaders", 2_000),
}
SUITES = {
    "damaged or foreign checkpoint": "damage or refused or flips_anywhere or another_model",
    "ranks that do not fit together": "ranks_that_differ or out_of_step or different_versions",
    "replicas that drift apart": "flipped_bit or before_the_first_step or another_number_of",
}
"""Tests of tests/integrate, as `pytest -k` selects them by name. Each case is a try."""


def rows() -> list[Row]:
    """Return one row per fuzzer, then one row per suite."""
    fuzzers = {fault: call for fault, call in FUZZERS.items() if find_spec(call[0])}
    fuzzed_rows = [fuzzed(fault, *call) for fault, call in fuzzers.items()]
    return fuzzed_rows + [suite(fault, names) for fault, names in SUITES.items()]


def fuzzed(fault: str, module: str, count: int) -> Row:
    """Return a row of a fuzzer's counts of "refused" and "valid"; it raises anything else."""
    row = Row(fault, came_of_it="refused, or a valid answer")
    try:
        counts = import_module(module).fuzz(count, 2)
    except AssertionError as error:
        row.count(f"{error}: {error.__cause__!r}")
        return row
    parts = [counts] if isinstance(counts, Counter) else counts.values()
    outcomes: Counter[str] = sum(parts, Counter())
    row.times = row.survived = sum(outcomes.values())
    row.came_of_it = ", ".join(f"{n:,} {outcome}" for outcome, n in sorted(outcomes.items()))
    return row
