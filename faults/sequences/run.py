"""Many sequences in a row: counts, findings, and a shorter sequence for each finding."""

import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from faults.sequences.check import Finding
from faults.sequences.mends import taken_back
from faults.sequences.plan import OPERATIONS, Plan, draw_plan
from faults.sequences.play import Player
from faults.sequences.ranks import RealRanks
from faults.sequences.virtual import virtual_ranks

FEW = 40
"""The most sequences that a shorter one is looked for in."""

LONG = 60.0
"""The seconds after which no shorter sequence is looked for."""


@dataclass
class Tally:
    """Counts over all sequences so far."""

    sequences: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    real: int = 0
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def played(self) -> int:
        return sum(self.sequences.values())

    @property
    def mean_length(self) -> float:
        return sum(self.operations.values()) / max(1, self.played)


class Runner:
    """A pool of real ranks, and virtual workers, that play one sequence after the other."""

    def __init__(self, without: str = "") -> None:
        self._without = without
        self._real: RealRanks | None = None
        self._fresh = 0

    def play(self, plan: Plan) -> tuple[str, Counter[str]]:
        """Return the finding of a sequence, "" for none, and how often each operation ran."""
        default = torch.get_default_dtype()
        with tempfile.TemporaryDirectory() as folder, taken_back(self._without):
            ranks = self._real_ranks() if plan.setup.is_real else virtual_ranks(plan.setup.kind)
            player = Player(plan, ranks, Path(folder) / "checkpoint")
            try:
                player.play()
            except Finding as finding:
                self.close()
                return str(finding), player.counts
            finally:
                torch.set_default_dtype(default)
        if self._real is not None and plan.setup.is_real:
            self._real.call({r: ("reset", {}) for r in range(self._real.world)})
        return "", player.counts

    def _real_ranks(self) -> RealRanks:
        # A wire that breaks keeps its connections, so processes do not live for ever.
        if self._real is not None and (self._real.uses >= 20 or self._real.world != 2):
            self.close()
        if self._real is None:
            self._real = RealRanks(self._without)
        self._real.uses += 1
        return self._real

    def close(self) -> None:
        """End the pool."""
        if self._real is not None:
            self._real.close()
        self._real = None


def shorten(plan: Plan, runner: Runner) -> Plan:
    """Return the plan with operations left out, as long as there is a finding of its kind."""
    tries, size, end = FEW, max(1, len(plan.operations) // 2), time.monotonic() + LONG
    kind = _kind_of(runner.play(plan)[0])
    while size and tries and time.monotonic() < end:
        start = 0
        while start < len(plan.operations) and tries:
            rest = plan.operations[:start] + plan.operations[start + size :]
            tries -= 1
            if rest and _kind_of(runner.play(replace(plan, operations=rest))[0]) == kind:
                plan = replace(plan, operations=rest)
            else:
                start += size
        size //= 2
    return plan


def _kind_of(finding: str) -> str:
    """Return the first words of a finding, without its operation and numbers."""
    return re.sub(r"[\d.e-]+", "", re.sub(r"^operation .*?\): ", "", finding))[:30]


def play_many(
    plans: Iterator[Plan],
    tally: Tally,
    without: str = "",
    findings: int = 10,
    shortens: bool = True,
) -> Tally:
    """Play plans until there are so many findings, and print each.

    shortens: True prints a shorter sequence too.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runner, since = Runner(without), time.monotonic()
    try:
        for plan in plans:
            finding, counts = runner.play(plan)
            tally.sequences[plan.setup.kind] += 1
            tally.operations += counts
            tally.real += plan.setup.is_real
            if finding:
                tally.findings.append(f"sequence {plan.name}: {finding}")
                print(f"FINDING sequence {plan.name} ({plan.setup.kind}): {finding}", flush=True)
                if shortens:
                    report(plan, runner)
            if len(tally.findings) >= findings:
                break
    finally:
        runner.close()
        torch.set_num_threads(threads)
        tally.seconds += time.monotonic() - since
    return tally


def report(plan: Plan, runner: Runner) -> None:
    """Print the shortest sequence that was found to have a finding of this plan's kind."""
    short = shorten(plan, runner)
    print(f"  {short.setup}")
    for operation in short.operations:
        print(f"  {operation}")
    print(f"  so it ends: {runner.play(short)[0]}", flush=True)


def plans(seed: int, numbers: Sequence[int]) -> Iterator[Plan]:
    """Draw plans one by one."""
    return (draw_plan(seed, number) for number in numbers)


def show(tally: Tally) -> None:
    """Print the counts as a table."""
    print(f"\n{tally.played:,} sequences in {tally.seconds:.0f} s")
    print(f"{'mean length':24} {tally.mean_length:8.1f}")
    print(f"{'on two real ranks':24} {tally.real:8,}")
    for kind, count in tally.sequences.items():
        print(f"{kind:24} {count:8,}")
    print("operations")
    for name in OPERATIONS:
        print(f"  {name:22} {tally.operations[name]:8,}")
    print(f"{'findings':24} {len(tally.findings):8,}")
    for finding in tally.findings:
        print(f"FINDING {finding}")
