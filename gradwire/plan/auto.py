"""method="auto": dense for a few steps, then the planner's choice for the measured step."""

import itertools
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from gradwire.config import check_density
from gradwire.errors import ConfigError
from gradwire.exchange import EXCHANGES
from gradwire.plan.measure import measure_link, measure_machine, node_count
from gradwire.plan.network import Network, show_link
from gradwire.plan.planner import Question, plan_for
from gradwire.plan.recommend import Recommendation
from gradwire.plan.show import show_seconds
from gradwire.plan.ways import ENCODINGS
from gradwire.plan.workload import by_shapes
from gradwire.ranks.group import uncounted
from gradwire.ranks.together import gather_words
from gradwire.stages import Clock, Mark

if TYPE_CHECKING:
    from gradwire.state.state import State

SKIPPED, MEASURED = 2, 5
"""The numbers of steps. In the first steps DDP builds its buckets anew and caches are cold."""
_MIN_DENSITY = 0.01
"""The lowest density that is chosen alone, because a lower one may cost accuracy."""
_BOUNDS = ("density", "min_density", "values", "indices", "exchange", "bundle_mb")
"""The fields of Config that bound the choice."""


class Auto:
    """Measurements of the steps so far, and the bounds of the choice.

    A worker computes from the end of one exchange to the last bucket of the next step. The rest of
    a step is exchange that nothing hides.
    """

    def __init__(self, bounds: Mapping[str, Any]) -> None:
        self.bounds = dict(bounds)
        self.before_adam = False
        """True: an optimiser like Adam was seen, so that nothing sparse is chosen."""
        self._clock: Clock | None = None
        self._marks: list[dict[str, Mark]] = []

    def begin(self, clock: Clock) -> None:
        """Note that the first bucket of a step is here."""
        self._clock = clock
        self._marks.append({"first": clock.mark()})

    def mark(self, name: str) -> None:
        """Note that the "last" bucket is here, or that everything is "done"."""
        if self._clock is not None and self._marks:
            self._marks[-1][name] = self._clock.mark()

    @property
    def due(self) -> bool:
        """True: enough steps were measured; the answer is the same on every rank."""
        return len(self._marks) > SKIPPED + MEASURED

    def compute_seconds(self) -> float:
        """Return the median seconds of a step without any exchange; wait for the device."""
        steps = self._marks[SKIPPED:]
        spent = [
            _seconds_between(a["first"], a["last"]) + _seconds_between(a["done"], b["first"])
            for a, b in itertools.pairwise(steps)
            if "last" in a and "done" in a
        ]
        return max(0.0, statistics.median(spent)) if spent else 0.0

    def decide(self, state: "State") -> tuple[dict[str, Any], str]:
        """Return fields for Config, and the reason: rank 0's choice. This is a collective call."""
        group, device = state.group, state.device
        own_seconds = torch.tensor([self.compute_seconds()], dtype=torch.float64, device=device)
        chosen: dict[str, Any] = {}
        with uncounted(group):
            group.agree("auto", step=state.steps)
            seconds = float(group.all_gather(own_seconds).max())
            rate, latency = measure_link(group.all_gather, group.size, device)
            if group.rank == 0:
                chosen = self._choose(state, seconds, rate, latency)
            chosen = gather_words(group, chosen, device)[0]
        return chosen["fields"], chosen["reason"]

    def _choose(
        self, state: "State", seconds: float, rate: float, latency: float
    ) -> dict[str, Any]:
        bounds, ranks = self.bounds, state.group.size
        shapes = [s.shape for s in reversed(state.slots)]
        load = by_shapes(shapes, "this model", seconds, "adamw" if self.before_adam else "sgd")
        network = Network(ranks, node_count(ranks), rate, latency)
        exchange = bounds.get("exchange", "")
        encodings = [(bounds.get("values", "fp32"), bounds.get("indices", "int32"))]
        density = bounds.get("density", ())
        least = density or bounds.get("min_density", _MIN_DENSITY)
        # Only what leaves the optimiser alone: neither recipes nor PyTorch's own hooks.
        recommendation = plan_for(
            load,
            measure_machine(state.device),
            network,
            Question(
                [f"topk/{exchange}" if exchange else "topk"],
                density,
                least,
                bounds.get("bundle_mb"),
                encodings if {"values", "indices"} & bounds.keys() else ENCODINGS,
            ),
        ).recommendation
        reason = _reason(recommendation, seconds, rate, latency)
        return {"fields": recommendation.fields, "reason": reason}


def split_bounds(fields: Mapping[str, Any]) -> tuple[Auto, dict[str, Any]]:
    """Return the bounds of the choice, and the fields to begin with: dense."""
    bounds = {k: v for k, v in fields.items() if k in _BOUNDS}
    exchange = EXCHANGES.get(bounds.get("exchange", ""))
    if exchange is not None and exchange.whole:
        raise ConfigError(
            f"method='auto' chooses whether to send dense: leave out exchange="
            f"{bounds['exchange']!r}, or use method='dense'"
        )
    for name in ("density", "min_density"):
        if name in bounds:
            check_density(bounds[name], name)
    others = {k: v for k, v in fields.items() if k not in _BOUNDS or k == "bundle_mb"}
    return Auto(bounds), others | {"method": "dense", "exchange": "dense"}


def _reason(recommendation: Recommendation, seconds: float, rate: float, latency: float) -> str:
    measured = (
        f"measured: {show_seconds(seconds)} of computing per step, {show_link(rate)} and "
        f"{show_seconds(latency)} between ranks; "
    )
    return measured + recommendation.reason


def _seconds_between(begin: Mark, end: Mark) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        begin.synchronize()
        return begin.elapsed_time(end) / 1e3
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return end - begin
