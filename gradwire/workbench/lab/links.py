"""Rate and latency between every two ranks, measured in bounded time, and the slow ones."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.ranks.distributed import DistributedGroup
from gradwire.ranks.together import gather_words

PINGS = 8
LEAST, MOST, GROWTH = 1 << 16, 1 << 25, 4
"""Bytes of the first transfer, limit of the last one, and growth from one to the next."""
ENOUGH = 0.1
"""Seconds of a transfer that is long enough for a rate."""
SLOWER, LATER = 2.0, 0.0005
"""A link is slow if it is this many times slower than the others.

A latency must also be this many seconds longer.
"""

Matrix = list[list[float]]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Links:
    """`rate[a][b]`: bits per second from rank a to b. `latency[a][b]`: seconds one way."""

    rate: Matrix
    latency: Matrix

    def best(self, other: "Links") -> "Links":
        """Return the better value of either measurement; a busy moment is then no slow link."""
        return Links(
            _combine(max, self.rate, other.rate), _combine(min, self.latency, other.latency)
        )


def _combine(pick: Callable[[float, float], float], first: Matrix, second: Matrix) -> Matrix:
    """Return the picked value of each two entries."""
    return [
        [pick(x, y) for x, y in zip(*rows, strict=True)] for rows in zip(first, second, strict=True)
    ]


def measure_links(group: DistributedGroup, control: DistributedGroup) -> Links:
    """Measure every rank with every other rank; a rank is in one pair at a time (collective).

    group: carries the transfers. control: carries their sizes, on CPU.
    """
    ones = torch.ones(1, dtype=torch.float32, device=group.device)
    group.all_reduce(ones)  # so that NCCL connects all ranks before anything is timed
    rate, latency = ([0.0] * group.size for _ in range(2))
    for pairs in pair_rounds(group.size):
        control.agree("round", pairs=len(pairs))
        for pair in pairs:
            for sender, receiver in (pair, pair[::-1]):
                if group.rank == sender:
                    rate[receiver], latency[receiver] = _send(group, control, receiver)
                elif group.rank == receiver:
                    _receive(group, control, sender)
    rows = gather_words(control, [rate, latency], CPU)
    return Links([row[0] for row in rows], [row[1] for row in rows])


def pair_rounds(world: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs until every two ranks have met (circle method).

    A rank is in at most one pair of each round.
    """
    seats: list[int | None] = [*range(world), *([None] if world % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        across = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(a, b) for a, b in across if a is not None and b is not None]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _send(group: DistributedGroup, control: DistributedGroup, to: int) -> tuple[float, float]:
    """Measure the bits per second to rank `to`, and the seconds of a small message, as sender."""
    small = torch.zeros(1, dtype=torch.uint8, device=group.device)
    latency = min(_round_trip(group, small, to) for _ in range(PINGS)) / 2
    size, seconds = LEAST, 0.0
    while seconds < ENOUGH and size <= MOST:
        control.swap(torch.tensor([size], dtype=torch.int64), to, None)
        block = torch.zeros(size, dtype=torch.uint8, device=group.device)
        seconds = _round_trip(group, block, to)
        size *= GROWTH
    # Size 0 tells the receiver that this was the last transfer.
    control.swap(torch.tensor([0], dtype=torch.int64), to, None)
    return 8 * block.numel() / max(seconds - latency, 1e-9), latency


def _receive(group: DistributedGroup, control: DistributedGroup, source: int) -> None:
    """Take the part of the receiver in `_send`."""
    small = torch.zeros(1, dtype=torch.uint8, device=group.device)
    for _ in range(PINGS):
        _send_back(group, small, source)
    while size := _receive_size(control, source):
        _send_back(group, torch.empty(size, dtype=torch.uint8, device=group.device), source)


def _receive_size(control: DistributedGroup, source: int) -> int:
    """Receive the size of the next transfer; 0 after the last."""
    size = control.swap(torch.tensor([0], dtype=torch.int64), None, source)
    assert size is not None
    # No sender sends more; a wrong size cannot take all memory.
    return min(int(size), MOST)


def _round_trip(group: DistributedGroup, block: Tensor, to: int) -> float:
    """Return the seconds until `block` has arrived at `to` and one byte is back."""
    begin = time.perf_counter()
    group.swap(block, to, None)
    group.swap(block[:1], None, to)
    if block.is_cuda:
        torch.cuda.synchronize(block.device)
    return time.perf_counter() - begin


def _send_back(group: DistributedGroup, block: Tensor, source: int) -> None:
    """Receive a block of this size, and send its first byte back."""
    received = group.swap(block, None, source)
    assert received is not None
    group.swap(received[:1], source, None)
    if block.is_cuda:
        torch.cuda.synchronize(block.device)


@dataclass(frozen=True)
class RankFigures:
    """A rank's best values with any other rank: bits per second out and in, seconds of latency."""

    sends: float
    receives: float
    latency: float


def rank_figures(links: Links, hosts: Sequence[str]) -> list[RankFigures]:
    """Return the figures of each rank; with several hosts, only links between hosts count."""
    figures = []
    for rank in range(len(hosts)):
        peers = _peers(rank, hosts)
        figures.append(
            RankFigures(
                max(links.rate[rank][p] for p in peers),
                max(links.rate[p][rank] for p in peers),
                min(links.latency[rank][p] for p in peers),
            )
        )
    return figures


def _peers(rank: int, hosts: Sequence[str]) -> list[int]:
    """Return the ranks on other hosts, or all other ranks if there is one host."""
    others = [p for p in range(len(hosts)) if p != rank]
    return [p for p in others if hosts[p] != hosts[rank]] or others


def slow_ranks(figures: Sequence[RankFigures]) -> list[tuple[int, str, float, float]]:
    """Return (rank, name of a figure, the figure, the others' median) for each slow figure.

    None for two ranks, because nothing tells which of the two is slow.
    """
    slow = []
    for rank, this in enumerate(figures if len(figures) > 2 else ()):
        others = [f for r, f in enumerate(figures) if r != rank]
        for name in ("sends", "receives"):
            usual = statistics.median(getattr(f, name) for f in others)
            if SLOWER * getattr(this, name) < usual:
                slow.append((rank, name, getattr(this, name), usual))
        usual = statistics.median(f.latency for f in others)
        if this.latency > max(SLOWER * usual, usual + LATER):
            slow.append((rank, "latency", this.latency, usual))
    return slow


def slow_pairs(
    links: Links, hosts: Sequence[str], ignored: set[int]
) -> list[tuple[int, int, float]]:
    """Return (sender, receiver, rate) of slow pairs, without the pairs of the ranks in `ignored`.

    Pairs on one host and pairs between hosts are not compared with each other.
    """
    ranks = range(len(hosts))
    kinds: dict[bool, list[tuple[int, int, float]]] = {True: [], False: []}
    for a in ranks:
        for b in ranks:
            if a != b and not {a, b} & ignored:
                kinds[hosts[a] == hosts[b]].append((a, b, links.rate[a][b]))
    slow = []
    for pairs in kinds.values():
        if pairs:
            usual = statistics.median(rate for *_, rate in pairs)
            slow += [pair for pair in pairs if SLOWER * pair[2] < usual]
    return slow
