"""Predictions beside what `gradwire bench step --json` measured: the cost model is checked."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradwire.compress import METHODS
from gradwire.errors import ConfigError
from gradwire.plan.machine import MACHINES, Machine
from gradwire.plan.network import LATENCY, Network
from gradwire.plan.predict import Prediction, Way, predict
from gradwire.plan.workload import by_name

TORCH = {"dense": Way("dense", "dense"), "bf16": Way("dense", "dense-bf16")}
"""PyTorch's own hooks, which send the same bytes."""


@dataclass(frozen=True)
class Compared:
    """One row of the bench, and what was predicted from its noop row and its link."""

    model: str
    method: str
    ranks: int
    link: float
    measured: float
    prediction: Prediction

    @property
    def error(self) -> float:
        return self.prediction.seconds / self.measured - 1


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file."""
    try:
        return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    except FileNotFoundError:
        raise ConfigError(
            f"{file} is not there; --check takes paper, or rows of bench step"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file} holds no JSON rows: {error}") from error


def compare(rows: Iterable[Mapping[str, Any]]) -> list[Compared]:
    """Every row whose method the planner knows; noop, PowerSGD and others are left out.

    Computing is the row's own `noop_seconds`, the link what the lab measured: what is checked is
    everything else. The ranks of a lab share one device, and its memory bandwidth.
    """
    out = []
    for row in rows:
        way = _way(row)
        if way is None:
            continue
        ranks, link = row["ranks"], row["link"]["measured"] / 8
        load = by_name(row["model"], MACHINES["cpu"], None, row["noop_seconds"])
        device = _device(row)
        network = Network(ranks, ranks, link, LATENCY)
        bundle_mb = (row["bundle_bytes"] or 25e6) / 1e6
        found = predict(way, load, device, network, bundle_mb)
        seconds = row["seconds"]["median"]
        out.append(Compared(row["model"], row["method"], ranks, 8 * link, seconds, found))
    return out


def _way(row: Mapping[str, Any]) -> Way | None:
    name = row["method"].partition(":")[0]
    if name in TORCH:
        return TORCH[name]
    method = name.partition("/")[0]
    if method not in METHODS or not row["exchange"]:
        return None
    return Way(method, row["exchange"], row["values"], row["indices"], row["density"])


def _device(row: Mapping[str, Any]) -> Machine:
    name = str(row["device"]).lower().replace(" ", "").replace("-", "")
    fits = [m for n, m in MACHINES.items() if n != "cpu" and n.replace("-", "") in name]
    if fits:
        known, share = max(fits, key=lambda m: len(m.name)), float(row["ranks"])
    else:
        known, share = MACHINES["cpu"], max(1.0, row["ranks"] / row["cores"])
    return replace(known, bandwidth=known.bandwidth / share)
