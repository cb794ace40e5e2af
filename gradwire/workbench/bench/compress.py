"""The compression step against the memory floor: accumulate, compress, settle on a bundle."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gradwire.accumulate.bundle import Bundle
from gradwire.accumulate.schedule import entry_count
from gradwire.compress import METHODS
from gradwire.config import Config, check_density
from gradwire.errors import ConfigError, unknown
from gradwire.registry import check_options, parse_options
from gradwire.state.choice import choose
from gradwire.types import MAX_SIZE, Delivered, Entries, Everything, Slot
from gradwire.workbench.bench.clock import Timing, measure
from gradwire.workbench.bench.data import DATA, draw
from gradwire.workbench.bench.path import local_path
from gradwire.workbench.bench.quality import quality
from gradwire.workbench.bench.row import Row

ROTATE = 256 << 20
"""Bytes the buffers of one row take together at least, several times any cache."""

EXTRA = ("floor", "torch.topk", "noop", "local")
"""Rows that are not methods: e.add_(g), torch.topk of the same vector, nothing, the whole path."""

LEARNING = 25
"""Steps in which a threshold that follows its count catches up with a residual that was zero."""


@dataclass(frozen=True)
class Variant:
    """A method with options: "gaussiank:paper" is gaussiank with variant="paper"."""

    name: str
    method: str
    options: dict[str, Any]

    @classmethod
    def of(cls, name: str, texts: Sequence[str]) -> "Variant":
        """Of the "name=value" texts it takes those that the method has."""
        method, _, variant = name.partition(":")
        if method in EXTRA:
            return cls(name, method, {})
        if method not in METHODS:
            raise unknown("method", method, [*METHODS, *EXTRA])
        known = METHODS[method].options
        own = [t for t in texts if t.partition("=")[0] in known]
        options = parse_options([*own, f"variant={variant}"] if variant else own, method)
        check_options(options, method)
        return cls(name, method, options)


class Sets:
    """Several gradients and bundles of one size, so that a small one is not timed in the cache."""

    def __init__(
        self, size: int, device: torch.device, data: str = "gaussian", given: Tensor | None = None
    ) -> None:
        self.size, self.device, self.data = size, device, data
        slot = Slot("all", (size,), (1,), torch.float32, 0, size)
        count = max(1, -(-ROTATE // (8 * size)))
        self.bundles = [Bundle([slot], device, rank=0, index=0, dense=False) for _ in range(count)]
        self.gradients = [
            draw(data, size, device, seed) if given is None else given.to(device, copy=True)
            for seed in range(max(3, count))
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
    data: Sequence[str] = ("gaussian",),
    given: tuple[str, Tensor] | None = None,
    options: Sequence[str] = (),
) -> Iterator[Row]:
    """Rows as they are measured; each size and density begins with the floor and torch.topk.

    given: the name and the entries of a recorded gradient, in place of sizes and data.
    """
    variants = _check(sizes, densities, methods, data, options)
    if given is not None:
        sizes, data = [given[1].numel()], [given[0]]
    for size in sizes:
        for name in data:
            sets = Sets(size, device, name, None if given is None else given[1])
            floor = measure(_floor(sets), device, repeat, warmup)
            for density in densities:
                for variant in variants:
                    yield _row(variant, sets, density, floor, repeat, warmup)
            del sets
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _row(
    variant: Variant, sets: Sets, density: float, floor: Timing, repeat: int, warmup: int
) -> Row:
    k, name = entry_count(density, sets.size), variant.method
    achieved, nbytes = k, 12 * sets.size
    energy = recall = timed = None
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
        steps = [Step(b, g, name, density, sets.never, variant.options) for b, g in sets]
        steps[0]()
        achieved = steps[0].achieved()
        energy, recall = quality(steps[0].delivered, sets.gradients[0], k)
        if METHODS[name].learns is not None:
            for step in LEARNING * steps:
                step()
        time = measure(steps, sets.device, repeat, warmup)
        timed = steps[(max(warmup, len(steps)) + repeat - 1) % len(steps)].achieved()
    return Row.of(
        variant.name, sets.size, density, k, achieved, time, floor, nbytes, sets.device,
        sets.data, energy, recall, timed,
    )  # fmt: skip


class Step:
    """One worker's error-feedback step: what the pipeline does before a message is encoded."""

    def __init__(
        self, bundle: Bundle, gradient: Tensor, method: str, density: float, never: Tensor,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._bundle, self._never = bundle, never
        self._pieces = [(0, gradient)]
        config = Config(method=method, density=density, options=options, dense_below=0)
        self._method = config.bound_method
        self._choice = choose(bundle, config, 0, 4, False)
        bundle.buffer.zero_()
        bundle.memory.clear()
        bundle.pending = None

    @property
    def delivered(self) -> Delivered | None:
        """What the last call chose."""
        return None if self._bundle.pending is None else self._bundle.pending.delivered

    def __call__(self) -> None:
        bundle, choice, method = self._bundle, self._choice, self._method
        if choice.selects:
            method.prefetch(bundle.u, choice.k, bundle.memory)
        scan = bundle.accumulate(self._pieces, choice.block, self._never, maxima16=choice.maxima16)
        if choice.reason:
            bundle.deliver(Everything(), scan.finite)
            return
        sparse = method.choose(bundle.u, choice.k, bundle.memory, scan)
        bundle.deliver(Entries(sparse), scan.finite)
        method.learn(bundle.memory, sparse, choice.k)

    def achieved(self) -> int:
        """Entries the last call chose."""
        if not isinstance(self.delivered, Entries):
            return self._bundle.entries
        return int((self.delivered.sparse.indices < self._bundle.size).sum())


def _floor(sets: Sets) -> list[Callable[[], object]]:
    """e.add_(g): the 12 bytes an entry that every step must move."""
    return [_adder(bundle.buffer[: sets.size], gradient) for bundle, gradient in sets]


def _adder(residual: Tensor, gradient: Tensor) -> Callable[[], object]:
    return lambda: residual.add_(gradient)


def _plain(sets: Sets, k: int) -> list[Callable[[], object]]:
    return [_topk(gradient, k) for gradient in sets.gradients]


def _topk(u: Tensor, k: int) -> Callable[[], object]:
    return lambda: torch.topk(u.abs(), k, sorted=False)


def _check(
    sizes: Sequence[int], densities: Sequence[float], methods: Sequence[str], data: Sequence[str],
    options: Sequence[str],
) -> list[Variant]:  # fmt: skip
    for density in densities:
        check_density(density)
    for size in sizes:
        if not 1 <= size <= MAX_SIZE - 64:
            raise ConfigError(f"size must be in 1..{MAX_SIZE - 64:,}, got {size:,}")
    for name in data:
        if name not in DATA:
            raise unknown("data", name, DATA)
    names = list(dict.fromkeys(["floor", "torch.topk", *methods]))
    variants = [Variant.of(name, options) for name in names]
    for text in options:
        name, equals, _ = text.partition("=")
        if not equals:
            raise ConfigError(f"an option is NAME=VALUE, got {text!r}")
        if not any(name in v.options for v in variants):
            raise ConfigError(f"none of {', '.join(methods)} has an option {name!r}")
    return variants
