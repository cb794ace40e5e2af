"""The compression step against the memory floor: accumulate, compress, settle on a bundle."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gradwire.accumulate.bundle import Bundle
from gradwire.accumulate.schedule import entries
from gradwire.bench.clock import Timing, measure
from gradwire.bench.path import local_path
from gradwire.bench.row import Row
from gradwire.choose import choose
from gradwire.compress import METHODS
from gradwire.config import Config, check_density
from gradwire.errors import ConfigError, unknown
from gradwire.types import MAX_SIZE, Delivered, Slot

ROTATE = 256 << 20
"""Bytes the buffers of one row take together at least, several times any cache."""

EXTRA = ("floor", "torch.topk", "noop", "local")
"""Rows that are not methods: e.add_(g), torch.topk of the same vector, nothing, the whole path."""


class Sets:
    """Several gradients and bundles of one size, so that a small one is not timed in the cache."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        slot = Slot("all", (size,), (1,), torch.float32, 0, size)
        count = max(1, -(-ROTATE // (8 * size)))
        self.bundles = [Bundle([slot], device, rank=0, index=0, dense=False) for _ in range(count)]
        generator = torch.Generator(device).manual_seed(0)
        self.gradients = [
            torch.randn(size, device=device, generator=generator) for _ in range(max(3, count))
        ]
        self.never = torch.zeros((), dtype=torch.bool, device=device)

    def __iter__(self) -> Iterator[tuple[Bundle, Tensor]]:
        """Every bundle meets other gradients in turn, as in training."""
        count = math.lcm(len(self.bundles), len(self.gradients))
        for i in range(count):
            yield self.bundles[i % len(self.bundles)], self.gradients[i % len(self.gradients)]


@torch.no_grad()
def bench_compress(
    sizes: Sequence[int],
    densities: Sequence[float],
    methods: Sequence[str],
    device: torch.device,
    repeat: int = 30,
    warmup: int = 5,
) -> Iterator[Row]:
    """Rows as they are measured; each size and density begins with the floor and torch.topk."""
    _check(sizes, densities, methods)
    names = list(dict.fromkeys(["floor", "torch.topk", *methods]))
    for size in sizes:
        sets = Sets(size, device)
        floor = measure(_floor(sets), device, repeat, warmup)
        for density in densities:
            for name in names:
                yield _row(name, sets, density, floor, repeat, warmup)
        del sets
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _row(name: str, sets: Sets, density: float, floor: Timing, repeat: int, warmup: int) -> Row:
    k = entries(density, sets.size)
    achieved, nbytes = k, 12 * sets.size
    if name == "floor":
        time = floor
    elif name == "local":
        calls, base = local_path(list(sets), sets.never, density)
        floor = measure(base, sets.device, repeat, warmup)
        time, nbytes = measure(calls, sets.device, repeat, warmup), 16 * sets.size
    elif name in ("torch.topk", "noop"):
        calls = _plain(sets, k) if name == "torch.topk" else [lambda: None]
        time = measure(calls, sets.device, repeat if name == "noop" else min(repeat, 10), 2)
    else:
        steps = [Step(bundle, gradient, name, density, sets.never) for bundle, gradient in sets]
        time = measure(steps, sets.device, repeat, warmup)
        achieved = steps[0].achieved()
    return Row.of(name, sets.size, density, k, achieved, time, floor, nbytes, sets.device)


class Step:
    """One worker's error-feedback step: what the pipeline does before a message is encoded."""

    def __init__(
        self, bundle: Bundle, gradient: Tensor, method: str, density: float, never: Tensor
    ) -> None:
        self._bundle, self._never = bundle, never
        self._pieces = [(0, gradient)]
        self._run = METHODS[method].run
        self._choice = choose(bundle, Config(method=method, density=density), 0, 4, False)
        bundle.buffer.zero_()
        bundle.delivered = None

    def __call__(self) -> None:
        bundle = self._bundle
        scan = bundle.accumulate(self._pieces, self._choice.group, self._never)
        if self._choice.reason:
            bundle.delivered = Delivered(scan.finite)
            return
        sparse = self._run(bundle.u, self._choice.k, bundle.memory, scan)
        bundle.delivered = Delivered(scan.finite, sparse.indices, sparse.values)

    def achieved(self) -> int:
        """Entries the last call chose."""
        last = self._bundle.delivered
        if last is None or last.indices is None:
            return self._bundle.entries
        return int((last.indices < self._bundle.size).sum())


def _floor(sets: Sets) -> list[Callable[[], object]]:
    """e.add_(g): the 12 bytes an entry that every step must move."""
    return [_adder(bundle.buffer[: sets.size], gradient) for bundle, gradient in sets]


def _adder(residual: Tensor, gradient: Tensor) -> Callable[[], object]:
    return lambda: residual.add_(gradient)


def _plain(sets: Sets, k: int) -> list[Callable[[], object]]:
    return [_topk(gradient, k) for gradient in sets.gradients]


def _topk(u: Tensor, k: int) -> Callable[[], object]:
    return lambda: torch.topk(u.abs(), k, sorted=False)


def _check(sizes: Sequence[int], densities: Sequence[float], methods: Sequence[str]) -> None:
    for density in densities:
        check_density(density)
    for size in sizes:
        if not 1 <= size <= MAX_SIZE - 64:
            raise ConfigError(f"size must be in 1..{MAX_SIZE - 64:,}, got {size:,}")
    known = [*METHODS, *EXTRA]
    for name in methods:
        if name not in known:
            raise unknown("method", name, known)
