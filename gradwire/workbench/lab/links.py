"""How fast every two ranks can talk to each other, in bounded time."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.ranks.group import DistributedGroup
from gradwire.ranks.together import gather_words

PINGS = 8
LEAST, MOST, GROWTH = 1 << 16, 1 << 25, 4
"""Bytes of the first transfer and of the last one, if the one before was too short to tell."""
ENOUGH = 0.1
SLOWER, LATER = 2.0, 0.0005
"""Times slower than the others is slow; a latency must also be so many seconds more."""

Matrix = list[list[float]]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Links:
    """`rate[a][b]`, bits a second from rank a to b, and `latency[a][b]`, seconds one way."""

    rate: Matrix
    latency: Matrix

    def best(self, other: "Links") -> "Links":
        """What was reached in either measurement: a busy moment is no slow link."""
        return Links(_each(max, self.rate, other.rate), _each(min, self.latency, other.latency))


def _each(pick: Callable[[float, float], float], one: Matrix, two: Matrix) -> Matrix:
    return [[pick(x, y) for x, y in zip(*rows, strict=True)] for rows in zip(one, two, strict=True)]


def measure_links(group: DistributedGroup, control: DistributedGroup) -> Links:
    """Every rank with every other, one pair a rank at a time (collective).

    `group` carries the transfers, `control`, on CPU, what has to be said about them.
    """
    one = torch.ones(1, dtype=torch.float32, device=group.device)
    group.all_reduce(one)  # NCCL connects all ranks at once
    rate, latency = ([0.0] * group.size for _ in range(2))
    for pairs in rounds(group.size):
        control.agree("round", pairs=len(pairs))
        for pair in pairs:
            for sender, receiver in (pair, pair[::-1]):
                if group.rank == sender:
                    rate[receiver], latency[receiver] = _send(group, control, receiver)
                elif group.rank == receiver:
                    _receive(group, control, sender)
    rows = gather_words(control, [rate, latency], CPU)
    return Links([row[0] for row in rows], [row[1] for row in rows])


def rounds(world: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds of pairs, a rank in at most one of each, until every two have met (circle method)."""
    seats: list[int | None] = [*range(world), *([None] if world % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        across = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(a, b) for a, b in across if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _send(group: DistributedGroup, control: DistributedGroup, to: int) -> tuple[float, float]:
    """Bits a second to rank `to`, and seconds of a small message there."""
    small = torch.zeros(1, dtype=torch.uint8, device=group.device)
    latency = min(_there_and_back(group, small, to) for _ in range(PINGS)) / 2
    size, seconds = LEAST, 0.0
    while seconds < ENOUGH and size <= MOST:
        control.swap(torch.tensor([size], dtype=torch.int64), to, None)
        block = torch.zeros(size, dtype=torch.uint8, device=group.device)
        seconds = _there_and_back(group, block, to)
        size *= GROWTH
    control.swap(torch.tensor([0], dtype=torch.int64), to, None)
    return 8 * block.numel() / max(seconds - latency, 1e-9), latency


def _receive(group: DistributedGroup, control: DistributedGroup, source: int) -> None:
    small = torch.zeros(1, dtype=torch.uint8, device=group.device)
    for _ in range(PINGS):
        _answer(group, small, source)
    while size := _size(control, source):
        _answer(group, torch.empty(size, dtype=torch.uint8, device=group.device), source)


def _size(control: DistributedGroup, source: int) -> int:
    said = control.swap(torch.tensor([0], dtype=torch.int64), None, source)
    assert said is not None
    return min(int(said), MOST)


def _there_and_back(group: DistributedGroup, block: Tensor, to: int) -> float:
    """Seconds until `block` has arrived and one byte is back."""
    begin = time.perf_counter()
    group.swap(block, to, None)
    group.swap(block[:1], None, to)
    if block.is_cuda:
        torch.cuda.synchronize(block.device)
    return time.perf_counter() - begin


def _answer(group: DistributedGroup, block: Tensor, source: int) -> None:
    got = group.swap(block, None, source)
    assert got is not None
    group.swap(got[:1], source, None)
    if block.is_cuda:
        torch.cuda.synchronize(block.device)


@dataclass(frozen=True)
class Figures:
    """A rank's best with any other: bits a second out and in, seconds of latency."""

    sends: float
    receives: float
    latency: float


def figures(links: Links, hosts: Sequence[str]) -> list[Figures]:
    """One a rank; where there are several hosts, with ranks of other hosts only."""
    out = []
    for rank in range(len(hosts)):
        peers = _peers(rank, hosts)
        out.append(
            Figures(
                max(links.rate[rank][p] for p in peers),
                max(links.rate[p][rank] for p in peers),
                min(links.latency[rank][p] for p in peers),
            )
        )
    return out


def _peers(rank: int, hosts: Sequence[str]) -> list[int]:
    others = [p for p in range(len(hosts)) if p != rank]
    return [p for p in others if hosts[p] != hosts[rank]] or others


def slow_ranks(found: Sequence[Figures]) -> list[tuple[int, str, float, float]]:
    """Rank, what is slow ("sends", "receives", "latency"), its figure, the median of the others.

    Of two ranks nobody can say which is slow.
    """
    slow = []
    for rank, own in enumerate(found if len(found) > 2 else ()):
        others = [f for r, f in enumerate(found) if r != rank]
        for name in ("sends", "receives"):
            usual = statistics.median(getattr(f, name) for f in others)
            if SLOWER * getattr(own, name) < usual:
                slow.append((rank, name, getattr(own, name), usual))
        usual = statistics.median(f.latency for f in others)
        if own.latency > max(SLOWER * usual, usual + LATER):
            slow.append((rank, "latency", own.latency, usual))
    return slow


def slow_pairs(links: Links, hosts: Sequence[str], but: set[int]) -> list[tuple[int, int, float]]:
    """Sender, receiver and rate of slow pairs, those of the ranks `but` left out.

    A pair on one host is compared with such pairs, one between hosts with those.
    """
    ranks = range(len(hosts))
    kinds: dict[bool, list[tuple[int, int, float]]] = {True: [], False: []}
    for a in ranks:
        for b in ranks:
            if a != b and not {a, b} & but:
                kinds[hosts[a] == hosts[b]].append((a, b, links.rate[a][b]))
    slow = []
    for pairs in kinds.values():
        if pairs:
            usual = statistics.median(rate for *_, rate in pairs)
            slow += [pair for pair in pairs if SLOWER * pair[2] < usual]
    return slow
