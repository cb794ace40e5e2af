"""Predictions beside what `gradwire bench step --json` measured: the cost model is checked."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradwire.compress import METHODS
from gradwire.errors import ConfigError
from gradwire.plan.machine import MACHINES, Machine
from gradwire.plan.network import LATENCY, Network
from gradwire.plan.powersgd import powersgd_rank
from gradwire.plan.predict import Prediction, Way, predict
from gradwire.plan.work import Work
from gradwire.workbench.models.workload import workload_by_name

TORCH = {"dense": Way("dense", "dense"), "bf16": Way("dense", "dense-bf16")}
"""PyTorch's own hooks, which send the same bytes."""
ONE_BUCKET_MB = 1e6
"""PowerSGD on Gloo, as the bench runs it."""

NEEDED = {
    "model", "ranks", "method", "exchange", "values", "indices", "density", "bundle_bytes",
    "device", "cores", "link", "noop_seconds", "seconds",
}  # fmt: skip

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Compared:
    """One row of the bench, and what was predicted for it. `alone`: whether what the method does
    itself was measured, without a network; else it is the tables'."""

    model: str
    method: str
    ranks: int
    link: float
    measured: float
    prediction: Prediction
    alone: bool

    @property
    def error(self) -> float:
        return self.prediction.seconds / self.measured - 1


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file."""
    try:
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    except FileNotFoundError:
        raise ConfigError(
            f"{file} is not there; --check takes paper, or rows of bench step"
        ) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} holds no JSON rows: {error}") from error
    for row in rows:
        missing = NEEDED - row.keys() if isinstance(row, dict) else NEEDED
        if missing or not (row["link"] or {}).get("measured"):
            what = f"no {min(missing)!r}" if missing else "no measured link: run it with --link"
            raise ConfigError(f"{file} holds other rows than those of bench step: {what}")
    return rows


def compare(rows: Iterable[Row]) -> list[Compared]:
    """Every row whose method the planner knows, but for noop and barrier.

    Three things are taken from the run, none of them from the row itself. Computing: its `barrier`
    row, else its `noop` row. The link: the rate that the lab measured, and the latency. What the
    method does itself: `alone`, of the same model, ranks and machine, whatever the link. Checked is
    everything else: bytes, rounds, and what overlap hides.
    """
    rows = list(rows)
    alone = {_key(row): row["alone"] for row in rows if row.get("alone")}
    out = []
    for row, computing in _with_base(rows):
        way = _way(row)
        if way is None or not row["seconds"]:
            continue
        ranks, link = row["ranks"], row["link"]["measured"] / 8
        load = workload_by_name(row["model"], MACHINES["cpu"], None, computing)
        network = Network(ranks, ranks, link, row["link"].get("latency") or LATENCY)
        own = alone.get(_key(row))
        found = predict(
            way, load, _device(row), network, _bundle_mb(row), own and _work(own, _share(row))
        )
        seconds = row["seconds"]["median"]
        out.append(
            Compared(row["model"], row["method"], ranks, 8 * link, seconds, found, own is not None)
        )
    return out


def _with_base(rows: Iterable[Row]) -> Iterator[tuple[Row, float]]:
    """Each row with the seconds of computing in its run, which begins with noop.

    Of a barrier's step, what is not its own all-reduce.
    """
    base = 0.0
    for row in rows:
        noop = row["noop_seconds"] or 0.0
        if row["method"] == "noop":
            base = noop
        elif row["method"] == "barrier" and row["seconds"]:
            spoken = 2 * (row["ranks"] - 1) * row["link"].get("latency", 0.0)
            base = max(noop, row["seconds"]["median"] - spoken)
        yield row, base or noop


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("device", "cores", "model", "ranks", "method"))


def _work(alone: Mapping[str, float], share: float) -> Work:
    """The stages; what a step grows by beyond them, a thread's turn say, counts as decode.

    The median of a stage is that of a rank which had a core; `share` ranks take turns at one.
    """
    compress = share * (alone.get("accumulate", 0.0) + alone.get("compress", 0.0))
    encode, decode = share * alone.get("encode", 0.0), share * alone.get("decode", 0.0)
    more = max(0.0, alone["step"] - compress - encode - decode)
    return Work(compress, encode, decode + more)


def _way(row: Row) -> Way | None:
    name = row["method"].partition(":")[0]
    if name in TORCH:
        return TORCH[name]
    if powersgd_rank(name):
        return Way(name, "")
    method = name.partition("/")[0]
    if method not in METHODS or not row["exchange"]:
        return None
    return Way(method, row["exchange"], row["values"], row["indices"], row["density"])


def _bundle_mb(row: Row) -> float:
    if powersgd_rank(row["method"]) and not _on_gpu(row):
        return ONE_BUCKET_MB
    return (row["bundle_bytes"] or 25e6) / 1e6


def _on_gpu(row: Row) -> Machine | None:
    name = str(row["device"]).lower().replace(" ", "").replace("-", "")
    fits = [m for n, m in MACHINES.items() if n != "cpu" and n.replace("-", "") in name]
    return max(fits, key=lambda m: len(m.name)) if fits else None


def _device(row: Row) -> Machine:
    """The ranks of a lab share one device and its memory bandwidth; cores, if there are few."""
    known = _on_gpu(row)
    ranks, cores = row["ranks"], row["cores"]
    if known is not None:
        return replace(known, bandwidth=known.bandwidth / ranks)
    cpu = MACHINES["cpu"]
    costs = replace(cpu.costs, agrees=bool(row["exchange"]))
    bandwidth = cpu.bandwidth / _share(row)
    return replace(cpu, bandwidth=bandwidth, costs=costs, has_spare_core=cores >= 2 * ranks)


def _share(row: Row) -> float:
    """Ranks a core, at least one; on a GPU `alone` was measured with all of them on it."""
    return 1.0 if _on_gpu(row) else max(1.0, row["ranks"] / row["cores"])
