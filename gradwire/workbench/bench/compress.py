"""The time of a compression step beside the memory floor: accumulate, compress and settle.

The floor is e.add_(g), the least memory traffic of any step with error feedback. Every method is
measured on the same gradients, and its choice is compared with the exact top k.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from gradwire.workbench.bench.clock import Timing, time_calls
from gradwire.workbench.bench.data import DATA, draw_vector
from gradwire.workbench.bench.path import local_path_calls
from gradwire.workbench.bench.quality import selection_quality
from gradwire.workbench.bench.row import Row
from gradwire.workbench.bench.training import is_training, parse_training, training_gradients

ROTATED_BYTES = 256 << 20
"""The least bytes of all bundles of one row: several times any cache."""

EXTRA_ROWS = ("floor", "torch.topk", "noop", "local")
"""Rows that are not methods.

floor: e.add_(g). torch.topk: of the same vector. noop: an empty call. local: the whole local path.
"""

LEARNING_STEPS = 25
"""Steps before the timed ones for a method that learns its threshold from earlier steps.

The residual begins at zero, and grows to its usual size in these steps.
"""


@dataclass(frozen=True)
class Variant:
    """A method with options: "gaussiank:paper" is gaussiank with variant="paper"."""

    name: str
    method: str
    options: dict[str, Any]

    @classmethod
    def parse(cls, name: str, texts: Sequence[str]) -> "Variant":
        """Return the variant called `name`, with the "name=value" texts that its method has."""
        method, _, variant = name.partition(":")
        if method in EXTRA_ROWS:
            return cls(name, method, {})
        if method not in METHODS:
            raise unknown("method", method, [*METHODS, *EXTRA_ROWS])
        known = METHODS[method].options
        accepted = [t for t in texts if t.partition("=")[0] in known]
        options = parse_options([*accepted, f"variant={variant}"] if variant else accepted, method)
        check_options(options, method)
        return cls(name, method, options)


class RotatingBundles:
    """Several bundles and gradients of one size: enough that a small bundle leaves the cache."""

    def __init__(
        self,
        size: int,
        device: torch.device,
        data: str = "gaussian",
        recorded: Sequence[Tensor] = (),
    ) -> None:
        self.size, self.device, self.data = size, device, data
        slot = Slot("all", (size,), (1,), torch.float32, 0, size)
        count = max(1, -(-ROTATED_BYTES // (8 * size)))
        self.all = [Bundle([slot], device, rank=0, index=0, dense=False) for _ in range(count)]
        if recorded:
            # Copies of few gradients, because they have to leave the cache, too.
            again = range(len(recorded), max(3, count))
            copies = [recorded[i % len(recorded)].clone() for i in again]
            self.gradients = [*recorded, *copies]
        else:
            self.gradients = [
                draw_vector(data, size, device, seed) for seed in range(max(3, count))
            ]
        self.never_skipped = torch.zeros((), dtype=torch.bool, device=device)

    def __iter__(self) -> Iterator[tuple[Bundle, Tensor]]:
        """Pair each bundle with one gradient after the other, as in training."""
        count = math.lcm(len(self.all), len(self.gradients))
        for i in range(count):
            yield self.all[i % len(self.all)], self.gradients[i % len(self.gradients)]


@torch.no_grad()
def bench_compress(
    sizes: Sequence[int],
    densities: Sequence[float],
    methods: Sequence[str],
    device: torch.device,
    repeat: int = 30,
    warmup: int = 5,
    data: Sequence[str] = ("gaussian",),
    recorded: tuple[str, Tensor] | None = None,
    options: Sequence[str] = (),
    data_dir: Path | None = None,
) -> Iterator[Row]:
    """Yield each row once it is measured; each size and density begins with floor and torch.topk.

    recorded: the name and the entries of a recorded gradient, in place of sizes and data.
    data_dir: the folder of the data sets for kinds such as "training:gpt".
    """
    variants = _checked_variants(sizes, densities, methods, data, options)
    if recorded is not None:
        sizes, data = [recorded[1].numel()], [recorded[0]]
    # A network in training has a size of its own.
    drawn = [name for name in data if not is_training(name)]
    trained = [name for name in data if is_training(name)]
    for size, names in [*((size, drawn) for size in sizes), (0, trained)]:
        for name in names:
            gradients: list[Tensor] = []
            if recorded is not None:
                gradients = [recorded[1].to(device)]
            elif is_training(name):
                gradients = training_gradients(name, device, data_dir)
            length = gradients[0].numel() if gradients else size
            bundles = RotatingBundles(length, device, name, gradients)
            del gradients
            floor = time_calls(_floor_calls(bundles), device, repeat, warmup)
            for density in densities:
                for variant in variants:
                    yield _measure_row(variant, bundles, density, floor, repeat, warmup)
            # Freed before the next size is made: both together may not fit.
            del bundles
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _measure_row(
    variant: Variant,
    bundles: RotatingBundles,
    density: float,
    floor: Timing,
    repeat: int,
    warmup: int,
) -> Row:
    """Measure one variant at one density, and return its row."""
    k, name = entry_count(density, bundles.size), variant.method
    achieved, nbytes = k, 12 * bundles.size
    energy = recall = timed = None
    if name == "floor":
        time = floor
    elif name == "local":
        calls, base = local_path_calls(list(bundles), bundles.never_skipped, density)
        floor = time_calls(base, bundles.device, repeat, warmup)
        time, nbytes = time_calls(calls, bundles.device, repeat, warmup), 16 * bundles.size
    elif name in ("torch.topk", "noop"):
        calls = _topk_calls(bundles, k) if name == "torch.topk" else [lambda: None]
        # At most ten repeats, because torch.topk is slow.
        time = time_calls(calls, bundles.device, repeat if name == "noop" else min(repeat, 10), 2)
    else:
        steps = [
            CompressStep(bundle, gradient, name, density, bundles.never_skipped, variant.options)
            for bundle, gradient in bundles
        ]
        steps[0]()
        achieved = steps[0].achieved()
        energy, recall = selection_quality(steps[0].delivered, bundles.gradients[0], k)
        if METHODS[name].learns is not None:
            for step in LEARNING_STEPS * steps:
                step()
        time = time_calls(steps, bundles.device, repeat, warmup)
        # The calls take turns, so this is the one that was timed last.
        timed = steps[(max(warmup, len(steps)) + repeat - 1) % len(steps)].achieved()
    return Row.from_timings(
        variant.name, bundles.size, density, k, achieved, time, floor, nbytes, bundles.device,
        bundles.data, energy, recall, timed,
    )  # fmt: skip


class CompressStep:
    """One worker's error-feedback step: all that the path does before a message is encoded."""

    def __init__(
        self, bundle: Bundle, gradient: Tensor, method: str, density: float, skipped: Tensor,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._bundle, self._skipped = bundle, skipped
        self._pieces = [(0, gradient)]
        config = Config(method=method, density=density, options=options, dense_below=0)
        self._method = config.bound_method
        self._choice = choose(bundle, config, 0, 4, False)
        bundle.buffer.zero_()
        bundle.memory.clear()
        bundle.pending = None

    @property
    def delivered(self) -> Delivered | None:
        """The delivery of the last call."""
        return None if self._bundle.pending is None else self._bundle.pending.delivered

    def __call__(self) -> None:
        bundle, choice, method = self._bundle, self._choice, self._method
        if choice.selects:
            method.prefetch(bundle.u, choice.k, bundle.memory)
        scan = bundle.accumulate(
            self._pieces, choice.block, self._skipped, maxima16=choice.maxima16
        )
        if choice.reason:
            bundle.deliver(Everything(), scan.finite)
            return
        sparse = method.choose(bundle.u, choice.k, bundle.memory, scan)
        bundle.deliver(Entries(sparse), scan.finite)
        method.learn(bundle.memory, sparse, choice.k)

    def achieved(self) -> int:
        """Return the number of entries that the last call chose; padding is not counted."""
        if not isinstance(self.delivered, Entries):
            return self._bundle.entries
        return int((self.delivered.sparse.indices < self._bundle.size).sum())


def _floor_calls(bundles: RotatingBundles) -> list[Callable[[], object]]:
    """Return calls of e.add_(g): the 12 bytes per entry that every step must move."""
    return [_add_call(bundle.buffer[: bundles.size], gradient) for bundle, gradient in bundles]


def _add_call(residual: Tensor, gradient: Tensor) -> Callable[[], object]:
    return lambda: residual.add_(gradient)


def _topk_calls(bundles: RotatingBundles, k: int) -> list[Callable[[], object]]:
    return [_topk_call(gradient, k) for gradient in bundles.gradients]


def _topk_call(u: Tensor, k: int) -> Callable[[], object]:
    return lambda: torch.topk(u.abs(), k, sorted=False)


def _checked_variants(
    sizes: Sequence[int], densities: Sequence[float], methods: Sequence[str], data: Sequence[str],
    options: Sequence[str],
) -> list[Variant]:  # fmt: skip
    """Return the variants of all rows, or raise if an argument is wrong."""
    for density in densities:
        check_density(density)
    for size in sizes:
        if not 1 <= size <= MAX_SIZE - 64:
            raise ConfigError(f"size must be in 1..{MAX_SIZE - 64:,}, got {size:,}")
    for name in data:
        if is_training(name):
            parse_training(name)
        elif name not in DATA:
            raise unknown("data", name, [*DATA, "training:gpt", "training:resnet50"])
    names = list(dict.fromkeys(["floor", "torch.topk", *methods]))
    variants = [Variant.parse(name, options) for name in names]
    for text in options:
        name, equals, _ = text.partition("=")
        if not equals:
            raise ConfigError(f"an option is NAME=VALUE, got {text!r}")
        if not any(name in v.options for v in variants):
            raise ConfigError(f"none of {', '.join(methods)} has an option {name!r}")
    return variants
