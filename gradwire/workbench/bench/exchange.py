"""The cost of each exchange among virtual workers, and the share of the gradient that arrives.

The workers live in one process without a network, so bytes and rounds are counted, not timed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.accumulate.schedule import entry_count
from gradwire.config import Config
from gradwire.encode import Encoding
from gradwire.errors import ConfigError, GradwireError, unknown
from gradwire.exchange import EXCHANGES
from gradwire.integrate.virtual_cluster import VirtualCluster
from gradwire.registry import parse_options
from gradwire.stages import STAGES
from gradwire.state.choice import REASONS
from gradwire.types import align
from gradwire.workbench.bench.data import DATA, draw_vector
from gradwire.workbench.bench.row import device_name, software_versions


@dataclass(frozen=True)
class ExchangeRow:
    """One exchange among `ranks` virtual workers.

    bytes: the most that left any worker per step, counted. predicted: the same by the exchange's
    formula. dense: the bytes of a ring all-reduce. rounds: the times that a worker waits for
    another per step. energy: the share of the mean gradient's energy that the first update
    delivers. union: entries of this update / k; None if everything is sent. seconds: one worker's
    seconds per stage, without `exchange`. why: the error, or the reason to send everything.
    """

    exchange: str
    ranks: int
    size: int
    k: int
    bytes: int | None
    predicted: int | None
    dense: int
    rounds: int | None
    energy: float | None
    union: float | None
    seconds: dict[str, float]
    why: str
    density: float
    encoding: str
    correlation: float
    data: str
    device: str
    versions: str

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def bench_exchange(
    ranks: Sequence[int],
    size: int,
    density: float,
    exchanges: Sequence[str],
    device: torch.device,
    *,
    method: str = "topk",
    values: str = "fp32",
    indices: str = "int32",
    data: str = "gaussian",
    correlation: float = 0.0,
    options: Sequence[str] = (),
    steps: int = 3,
) -> Iterator[ExchangeRow]:
    """Yield each row once it is measured.

    Any two workers' gradients have the given correlation. An exchange that takes whole gradients
    sends everything. `options` ("name=value") go to the exchanges that have them.
    """
    for name in exchanges:
        if name not in EXCHANGES:
            raise unknown("exchange", name, EXCHANGES)
    if data not in DATA:
        raise unknown("data", data, DATA)
    if not 0 <= correlation <= 1:
        raise ConfigError(f"correlation must be in [0, 1], got {correlation}")
    if min(ranks) < 1:
        raise ConfigError(f"ranks must be at least 1, got {min(ranks)}")
    Encoding(values, indices)
    for text in options:
        option = text.partition("=")[0]
        if not any(option in EXCHANGES[name].options for name in exchanges):
            raise ConfigError(f"none of {', '.join(exchanges)} has an option {option!r}")
    for count in ranks:
        gradients = correlated_gradients(data, size, count, correlation, device)
        mean = torch.stack(gradients).mean(0)
        for name in exchanges:
            exchange = EXCHANGES[name]
            accepted = [text for text in options if text.partition("=")[0] in exchange.options]
            config = Config(
                method="dense" if exchange.whole else method,
                exchange=name,
                density=density,
                # An exchange that cannot send these values sends fp32.
                values=values if values in exchange.values else "fp32",
                indices=indices,
                options=parse_options(accepted, method, name),
                dense_below=0,
            )
            measured = _measure_exchange(config, gradients, mean, steps)
            yield ExchangeRow(
                exchange=name, ranks=count, size=size, k=_entries_sent(config, size),
                dense=2 * (count - 1) * 4 * size // count, density=density,
                encoding=f"{config.values}+{'common' if config.encodes_all else indices}",
                correlation=correlation, data=data,
                device=device_name(device), versions=software_versions(device), **measured,
            )  # fmt: skip


def _entries_sent(config: Config, size: int) -> int:
    """Return the entries that a worker is asked to send."""
    return size if config.encodes_all else entry_count(config.density, size)


def correlated_gradients(
    data: str, size: int, ranks: int, correlation: float, device: torch.device
) -> list[Tensor]:
    """Return one gradient per worker; any two have the given correlation."""
    shared = draw_vector(data, size, device, 0) * correlation**0.5
    private = (1 - correlation) ** 0.5
    return [shared + private * draw_vector(data, size, device, rank + 1) for rank in range(ranks)]


def _measure_exchange(
    config: Config, gradients: list[Tensor], mean: Tensor, steps: int
) -> dict[str, Any]:
    """Average the gradients for `steps` steps; return the measured fields of a row."""
    ranks, size = len(gradients), mean.numel()
    k = _entries_sent(config, size)
    empty = dict.fromkeys(("bytes", "predicted", "rounds", "energy", "union"))
    try:
        cluster = VirtualCluster(ranks, config)
        update = cluster.average(gradients)
    except GradwireError as error:
        return {**empty, "seconds": {}, "why": str(error)}
    # On CUDA the second step compiles too, because only then does the scan settle a delivery.
    warm = min(2, steps - 1) if mean.device.type == "cuda" else 1
    for _ in range(warm - 1):
        cluster.average(gradients)
    for state in cluster._states:
        state.clock.every = 1
    first = cluster.stats()
    for _ in range(steps - warm):
        cluster.average(gradients)
    last = cluster.stats()
    cost = EXCHANGES[config.exchange].bytes
    room = align(size) if config.encodes_all else k
    predicted = cost(ranks, align(size), room, config.encoding, **config.exchange_options)
    lost = (mean - update).double().square().sum() / mean.double().square().sum()
    seconds = {
        name: round((last.seconds[name] - first.seconds[name]) / (steps - warm), 6)
        for name in STAGES
        if name != "exchange"
    }
    groups = cluster._ranks.groups
    return {
        "bytes": max(group.bytes_sent for group in groups) // steps,
        "predicted": predicted,
        "rounds": max(group.rounds for group in groups) // steps,
        "energy": round(1 - float(lost), 5),
        "union": None if first.dense else round(int((update != 0).sum()) / k, 3),
        "seconds": seconds,
        "why": ", ".join(REASONS[name] for name in first.dense if name != "method"),
    }
