"""The training run that the ranks of most faults run: examples/elastic.py, struck or not."""

from pathlib import Path
from typing import Any

from examples import elastic
from faults.inject import Strike, install

STEPS, EVERY = 8, 3
TIMEOUT = 60.0

Fields = dict[str, Any]

SETUPS: dict[str, Fields] = {
    "topk/allgather": {"momentum": 0.5},
    "topk/gtopk": {"exchange": "gtopk", "values": "bf16"},
    "topk/oktopk": {"exchange": "oktopk"},
    "topk/hierarchical": {"exchange": "hierarchical", "options": {"local": 2}},
}
COMMON: Fields = {"density": 0.02, "bundle_mb": 0.02, "dense_below": 0, "timeout": TIMEOUT}


def train(rank: int, folder: str, fields: Fields, strike: Strike | None = None) -> Any:
    """Train; return the first step, the parameters' digest and the count of each moment."""
    injector = install(rank, strike)
    start, digest = elastic.train(Path(folder), STEPS, EVERY, **(COMMON | fields))
    return start, digest, dict(injector.seen)
