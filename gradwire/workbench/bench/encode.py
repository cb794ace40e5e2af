"""The cost of an encoding: bits per entry, and the time to encode and decode a message."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from gradwire import kernels
from gradwire.encode import Encoding, Message, encode, nbytes
from gradwire.encode.noise import Noise
from gradwire.encode.unpack import unpack
from gradwire.errors import ConfigError
from gradwire.types import Entries, Sparse
from gradwire.workbench.bench.clock import capture_graph, time_calls
from gradwire.workbench.bench.compress import CompressStep, RotatingBundles
from gradwire.workbench.bench.row import device_name, software_versions

ENCODINGS = (
    "fp32+int32", "bf16+int32", "fp32+packed", "bf16+packed", "fp16+packed", "int8+packed",
    "int4+packed", "int4+packed+stochastic", "two-bit+packed", "bf16+local16",
)  # fmt: skip


@dataclass(frozen=True)
class EncodeRow:
    """Microseconds for one message of k entries, and the selection step beside it.

    encode: Sparse to buffer. decode: buffer to Sparse; 0 for a plain encoding, because the mean
    reads its buffer directly. Each is measured alone, so on a GPU mostly the host's launch is seen.
    device: the sum of both in a captured graph (CUDA only). select: the top-k error-feedback step
    in the same run. added: the time that both add to this step when launched after it; on a CPU
    their sum. share: added / select. spread: writing one message into the bucket.
    """

    encoding: str
    size: int
    k: int
    bits: float
    encode_us: float
    decode_us: float
    device_us: float | None
    select_us: float
    added_us: float
    share: float
    spread_us: float
    density: float
    device: str
    versions: str

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def bench_encode(
    sizes: Sequence[int],
    densities: Sequence[float],
    encodings: Sequence[str],
    device: torch.device,
    repeat: int = 30,
) -> Iterator[EncodeRow]:
    """Yield one row per encoding, for each size and density."""
    codes = {name: parse_encoding(name) for name in encodings}
    for size in sizes:
        bundles = RotatingBundles(size, device)
        entries = bundles.all[0].size
        for density in densities:
            steps = [
                CompressStep(bundle, gradient, "topk", density, bundles.never_skipped)
                for bundle, gradient in bundles
            ]
            # Not for its time: afterwards every step holds the selection to encode.
            time_calls(steps, device, 1, 5)
            for name, encoding in codes.items():
                yield _measure_row(name, encoding, steps, entries, density, device, repeat)
        del bundles


def parse_encoding(name: str) -> Encoding:
    """Parse VALUES+INDICES, optionally +ROUNDING: "int8+packed", "int8+packed+stochastic"."""
    parts = name.split("+")
    if not 2 <= len(parts) <= 3:
        raise ConfigError(f"an encoding is VALUES+INDICES or VALUES+INDICES+ROUNDING, got {name!r}")
    return Encoding(*parts)


def _selected(step: CompressStep, size: int) -> Sparse:
    """Return the selection of the last call, or raise if the step sends everything."""
    if not isinstance(step.delivered, Entries):
        raise ConfigError(f"size {size:,}: at this density everything is sent, as it is")
    return step.delivered.sparse


def _measure_row(
    name: str, encoding: Encoding, steps: Sequence[CompressStep], size: int, density: float,
    device: torch.device, repeat: int,
) -> EncodeRow:  # fmt: skip
    """Measure one encoding on the selection of the first step, and return its row."""
    sparse = _selected(steps[0], size)
    finite = torch.ones((), dtype=torch.bool, device=device)
    stochastic = encoding.rounding == "stochastic"
    noise = Noise(0, 0, torch.zeros((), dtype=torch.int64, device=device)) if stochastic else None
    k = sparse.capacity

    def write() -> Message:
        return encode(sparse, finite, encoding, noise=noise)

    message = write()
    rows = message.buffer.unsqueeze(0)

    def read() -> torch.Tensor:
        return unpack(rows, size, k, message.encoding)

    def mean() -> object:
        return kernels.mean_of_messages(plain, message.buffer, size, k, torch.float32)

    plain = read()
    calls: list[Callable[[], object]] = [write] if message.encoding.plain else [write, read]
    # The second time is 0 for a plain encoding.
    times = [1e3 * time_calls([call], device, repeat, 5).ms for call in calls] + [0.0]
    spread = 1e3 * time_calls([mean], device, repeat, 5).ms

    def step_then_calls(step: CompressStep) -> Callable[[], None]:
        def run() -> None:
            step()
            for call in calls:
                call()

        return run

    select = 1e3 * time_calls(steps, device, repeat, 5).ms
    added, on_device = sum(times), None
    if device.type == "cuda":
        followed = [step_then_calls(step) for step in steps]
        added = 1e3 * time_calls(followed, device, repeat, 5).ms - select
        on_device = 1e3 * sum(
            time_calls([capture_graph(c)], device, repeat, 5).ms / 10 for c in calls
        )
    return EncodeRow(
        name, size, k, round(8 * nbytes(k, encoding, size) / k, 2), round(times[0], 2),
        round(times[1], 2), None if on_device is None else round(on_device, 2), round(select, 2),
        round(added, 2), round(added / select, 4), round(spread, 2), density, device_name(device),
        software_versions(device),
    )  # fmt: skip


def encode_table(rows: Sequence[EncodeRow]) -> Table:
    """Return a table of one line per encoding, at most 80 columns wide."""
    title = f"{rows[0].device}; {rows[0].versions}; microseconds"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    names = ("encoding", "k", "bits", "encode", "decode", "select", "added", "share", "spread")
    for name in names:
        table.add_column(name, justify="left" if name == "encoding" else "right", no_wrap=True)
    for r in rows:
        times = [r.encode_us, r.decode_us, r.select_us, r.added_us]
        cells = [f"{t:.0f}" for t in times]
        table.add_row(
            r.encoding, f"{r.k:,}", f"{r.bits:.1f}", *cells, f"{r.share:.1%}", f"{r.spread_us:.0f}"
        )
    return table
