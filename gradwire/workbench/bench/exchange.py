"""What an exchange costs and what arrives, for 2 to 64 virtual workers."""

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
from gradwire.workbench.bench.data import DATA, draw
from gradwire.workbench.bench.row import device_name, versions


@dataclass(frozen=True)
class ExchangeRow:
    """One exchange among `ranks` virtual workers.

    bytes: the most that left a worker in a step, counted; predicted: by the exchange's formula;
    dense: by a ring all-reduce. rounds: how often a worker waits for another. energy: of the mean
    gradient's energy, what the update of a first step delivers. union: entries of that update over
    k, where not all are sent. seconds: one worker's, a stage; virtual workers have no network, so
    `exchange` is not among them. why: what kept it from running, or sent everything instead.
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
    """Rows as they are measured. Workers share `correlation` of their gradient's variance.

    Dense exchanges send everything. `options` ("name=value") go to the exchanges that have them.
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
        gradients = correlated(data, size, count, correlation, device)
        mean = torch.stack(gradients).mean(0)
        for name in exchanges:
            known = EXCHANGES[name]
            own = [text for text in options if text.partition("=")[0] in known.options]
            config = Config(
                method="dense" if EXCHANGES[name].whole else method,
                exchange=name,
                density=density,
                # What an exchange cannot send in this encoding it sends as fp32.
                values=values if values in known.values else "fp32",
                indices=indices,
                options=parse_options(own, method, name),
                dense_below=0,
            )
            seen = _measure(config, gradients, mean, steps)
            yield ExchangeRow(
                exchange=name, ranks=count, size=size, k=entry_count(density, size),
                dense=2 * (count - 1) * 4 * size // count, density=density,
                encoding=f"{config.values}+{indices}", correlation=correlation, data=data,
                device=device_name(device), versions=versions(device), **seen,
            )  # fmt: skip


def correlated(
    data: str, size: int, ranks: int, correlation: float, device: torch.device
) -> list[Tensor]:
    """A gradient a worker; any two have that correlation."""
    shared = draw(data, size, device, 0) * correlation**0.5
    own = (1 - correlation) ** 0.5
    return [shared + own * draw(data, size, device, rank + 1) for rank in range(ranks)]


def _measure(config: Config, gradients: list[Tensor], mean: Tensor, steps: int) -> dict[str, Any]:
    ranks, size = len(gradients), mean.numel()
    k = entry_count(config.density, size)
    none = dict.fromkeys(("bytes", "predicted", "rounds", "energy", "union"))
    try:
        cluster = VirtualCluster(ranks, config)
        update = cluster.average(gradients)
    except GradwireError as error:
        return {**none, "seconds": {}, "why": str(error)}
    # On CUDA the second step compiles, too: only then does the scan know what was sent.
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
    predicted = cost(ranks, align(size), k, config.encoding, **config.exchange_options)
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
