"""Compare the planner's predictions with the steps that `gradwire bench step --json` measured."""

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
from gradwire.recipes import LOCAL_RECIPES
from gradwire.workbench.models.workload import workload_by_name

TORCH_HOOKS = {"dense": Way("ddp", ""), "bf16": Way("bf16-hook", "")}
"""PyTorch's own hooks, by the names of `bench step`."""
ONE_BUCKET_MB = 1e6
"""Bundle size that makes one bucket of any model, as the bench uses for PowerSGD on Gloo."""

NEEDED_COLUMNS = {
    "model", "ranks", "method", "exchange", "values", "indices", "density", "bundle_bytes",
    "device", "cores", "link", "noop_seconds", "seconds",
}  # fmt: skip

BenchRow = Mapping[str, Any]
"""A JSON row of `gradwire bench step`."""


@dataclass(frozen=True)
class ComparedStep:
    """One measured step and its prediction.

    alone: True if the method's own work was measured without a network. Otherwise it is predicted.
    """

    model: str
    method: str
    ranks: int
    link: float
    measured: float
    prediction: Prediction
    alone: bool

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.prediction.seconds / self.measured - 1


def read_bench_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file; raise a ConfigError if they are not those of the bench."""
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
        missing = NEEDED_COLUMNS - row.keys() if isinstance(row, dict) else NEEDED_COLUMNS
        if missing or not (row["link"] or {}).get("measured"):
            lack = f"no {min(missing)!r}" if missing else "no measured link: run it with --link"
            raise ConfigError(f"{file} holds other rows than those of bench step: {lack}")
    return rows


def compare_rows(rows: Iterable[BenchRow]) -> list[ComparedStep]:
    """Predict every measured step whose method the planner knows, except noop and barrier.

    Three inputs of a prediction come from the same run:
    - computing time: from the `barrier` row, else from the `noop` row
    - the link: its measured rate, and its latency
    - the method's own work: from a row with `alone`, for the same model, ranks and machine

    The comparison therefore checks the rest: bytes, rounds, and the part hidden by overlap.
    """
    rows = list(rows)
    alone = {_key(row): row["alone"] for row in rows if row.get("alone")}
    compared = []
    for row, computing in _with_computing(rows):
        way = _way(row)
        if way is None or not row["seconds"]:
            continue
        ranks, link = row["ranks"], row["link"]["measured"] / 8
        if way.every > 1:
            # Its own run without an exchange, in which Muon steps already.
            computing = row["never_seconds"]
        load = workload_by_name(row["model"], MACHINES["cpu"], None, computing)
        if way.every > 1:
            load = replace(load, optimizer="muon")
        network = Network(ranks, ranks, link, row["link"].get("latency") or LATENCY)
        stages = alone.get(_key(row))
        work = stages and _work_of(stages, _ranks_per_core(row))
        compared.append(
            ComparedStep(
                model=row["model"],
                method=row["method"],
                ranks=ranks,
                link=8 * link,
                measured=row["seconds"]["median"],
                prediction=predict(way, load, _device(row), network, _bundle_mb(row), work),
                alone=stages is not None,
            )
        )
    return compared


def _with_computing(rows: Iterable[BenchRow]) -> Iterator[tuple[BenchRow, float]]:
    """Yield each row with the seconds of computing in its run.

    A run begins with its noop row. A barrier step takes computing time and one tiny all-reduce,
    whose latency is subtracted.
    """
    computing = 0.0
    for row in rows:
        noop = row["noop_seconds"] or 0.0
        if row["method"] == "noop":
            computing = noop
        elif row["method"] == "barrier" and row["seconds"]:
            all_reduce = 2 * (row["ranks"] - 1) * row["link"].get("latency", 0.0)
            computing = max(noop, row["seconds"]["median"] - all_reduce)
        yield row, computing or noop


def _key(row: BenchRow) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("device", "cores", "model", "ranks", "method"))


def _work_of(stages: Mapping[str, float], ranks_per_core: float) -> Work:
    """Return the work of a method from the measured seconds of its stages.

    A stage was timed while its rank had a core; with more ranks per core the ranks take turns.
    The rest of the step, for example thread switches, counts as decode.
    """
    compress = ranks_per_core * (stages.get("accumulate", 0.0) + stages.get("compress", 0.0))
    encode = ranks_per_core * stages.get("encode", 0.0)
    decode = ranks_per_core * stages.get("decode", 0.0)
    remainder = max(0.0, stages["step"] - compress - encode - decode)
    return Work(compress, encode, decode + remainder)


def _way(row: BenchRow) -> Way | None:
    """Return the way that a row measured, or None if the planner does not know it."""
    name = row["method"].partition(":")[0]
    if name in TORCH_HOOKS:
        return TORCH_HOOKS[name]
    if powersgd_rank(name):
        return Way(name, "")
    method = name.partition("/")[0]
    if method in LOCAL_RECIPES:
        return _local_way(row, method)
    if method not in METHODS or not row["exchange"]:
        return None
    return Way(method, row["exchange"], row["values"], row["indices"], row["density"])


def _local_way(row: BenchRow, recipe: str) -> Way | None:
    """Return the way of local steps; None if they have what the planner does not know."""
    unknown = ("overlap=", "fragments=", "offload=")
    if row["islands"] or any(word in row["method"] for word in unknown):
        return None
    return Way(
        LOCAL_RECIPES[recipe].fields["method"], row["exchange"], row["values"], row["indices"],
        row["density"], recipe, row["every"],
    )  # fmt: skip


def _bundle_mb(row: BenchRow) -> float:
    if powersgd_rank(row["method"]) and not _gpu_of(row):
        return ONE_BUCKET_MB
    return (row["bundle_bytes"] or 25e6) / 1e6


def _gpu_of(row: BenchRow) -> Machine | None:
    """Return the GPU that a row was measured on, or None for a CPU or an unknown GPU."""
    name = str(row["device"]).lower().replace(" ", "").replace("-", "")
    # The longest name wins, because one GPU's name may be part of another's.
    fits = [m for n, m in MACHINES.items() if n != "cpu" and n.replace("-", "") in name]
    return max(fits, key=lambda m: len(m.name)) if fits else None


def _device(row: BenchRow) -> Machine:
    """Return the device as one rank sees it.

    All ranks of a lab share the memory bandwidth of one device, and its cores if these are few.
    """
    gpu = _gpu_of(row)
    ranks, cores = row["ranks"], row["cores"]
    if gpu is not None:
        return replace(gpu, bandwidth=gpu.bandwidth / ranks)
    cpu = MACHINES["cpu"]
    costs = replace(cpu.costs, agrees=bool(row["exchange"]))
    bandwidth = cpu.bandwidth / _ranks_per_core(row)
    return replace(cpu, bandwidth=bandwidth, costs=costs, has_spare_core=cores >= 2 * ranks)


def _ranks_per_core(row: BenchRow) -> float:
    """Return the number of ranks per core, at least 1.

    It is 1 on a GPU, where `alone` was measured with all ranks on the device.
    """
    return 1.0 if _gpu_of(row) else max(1.0, row["ranks"] / row["cores"])
