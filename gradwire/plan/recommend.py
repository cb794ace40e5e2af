"""Recommendation: the choice among the predictions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.plan.accuracy import allows_topk, is_recommendable, loss_class
from gradwire.plan.network import FASTEST, GOODPUT
from gradwire.plan.predict import Prediction
from gradwire.plan.rate import SLOWEST
from gradwire.plan.reason import reason_against, reason_for
from gradwire.plan.ways import BEST, preference
from gradwire.plan.workload import Workload
from gradwire.recipes import LOCAL_RECIPES

_WORTH = 0.95
"""The share of the fastest uncompressed step that a compressed step may take at most.

Compressing must save a twentieth of the step, because it costs memory and may cost accuracy.
"""
_ALIKE = 1.05
"""Of the ways within a twentieth of the fastest, the one that loses least is taken."""
_ALIKE_ROUNDS = 1.25
"""The same for local steps, because longer rounds cost more of the loss than other choices do."""
_LINE = 88
"""The longest line of code."""
_LOSSES = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3, "int4": 4, "two-bit": 5, "sign": 6}
"""The order of the encodings of values by their loss."""


@dataclass(frozen=True)
class Recommendation:
    """Recommended way of exchanging, which may be not to compress.

    dense: the fastest way that sends everything, PyTorch's or gradwire's.
    changes_at: the link, in payload bytes per second, at which the answer changes. None: it never
    does.
    """

    prediction: Prediction
    dense: Prediction
    reason: str
    changes_at: float | None

    @property
    def compresses(self) -> bool:
        """True: the recommended way compresses."""
        return not self.prediction.way.sends_all

    @property
    def recipe(self) -> str:
        """The recipe that is recommended; "" for none."""
        return self.prediction.way.recipe

    @property
    def fields(self) -> dict[str, Any]:
        """The fields for `attach`, or for `local_steps` if the recipe is one of local steps."""
        p = self.prediction
        way = p.way
        if way.recipe:
            owner = {"exchange": "owner"} if way.name != way.recipe else {}
            return {"recipe": way.recipe, **owner, "bundle_mb": p.bundle_mb}
        if not self.compresses:
            exchange = way.exchange or "dense"
            return {"method": "dense", "exchange": exchange, "bundle_mb": p.bundle_mb}
        fields: dict[str, Any] = {"method": way.method, "exchange": way.exchange}
        fields |= {"values": way.values, "indices": way.indices, "density": way.density}
        return fields | {"bundle_mb": p.bundle_mb}

    @property
    def code(self) -> list[str]:
        """The lines of Python that do it; none if plain PyTorch is best."""
        way = self.prediction.way
        fields = [
            f'{name}="{value}"' if isinstance(value, str) else f"{name}={value:g}"
            for name, value in self.fields.items()
        ]
        if way.recipe in LOCAL_RECIPES:
            return [
                "optimizer = gradwire.optim.muon(model, lr=...)",
                f"local = gradwire.local_steps(model, optimizer, {', '.join(fields)})",
                "local.step()  # after optimizer.step(), at every step",
            ]
        if way.sends_all and not way.exchange:
            hook = "ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)"
            return [hook] if way.method == "bf16-hook" else []
        call = f"wire = gradwire.attach(ddp, {', '.join(fields)})"
        if len(call) <= _LINE:
            return [call]
        halves = (", ".join(fields[:3]), ", ".join(fields[3:]))
        return ["wire = gradwire.attach(", "    ddp,", *(f"    {half}," for half in halves), ")"]

    def asdict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        p = self.prediction
        link = None if self.changes_at is None else 8 * self.changes_at / GOODPUT
        return {
            "method": p.way.method,
            "exchange": p.way.exchange,
            "recipe": p.way.recipe,
            "encoding": p.way.encoding_name,
            "density": p.way.density,
            "values": p.way.values,
            "indices": p.way.indices,
            "bundle_mb": p.bundle_mb,
            "seconds": p.seconds,
            "uncompressed_seconds": self.dense.seconds,
            "compress": self.compresses,
            "changes_at_bits_per_second": link,
            "code": self.code,
            "reason": self.reason,
        }


SecondsAt = Callable[[Prediction, float], float]
"""(prediction, rate) -> seconds of the same way, with its best bundles, on a link of that rate."""


def recommend(
    load: Workload,
    predictions: Sequence[Prediction],
    seconds_at: SecondsAt,
    min_density: float,
    recipe: str = "",
) -> Recommendation:
    """Return the fastest way that may be recommended; of ways alike, the one that loses least.

    recipe: the only one that may be recommended.
    """
    uncompressed = [p for p in predictions if p.way.sends_all]
    dense = min(uncompressed, key=lambda p: p.seconds)
    able = [p for p in predictions if _may_be_chosen(p, load, min_density, recipe)]
    if not able:
        return Recommendation(dense, dense, reason_against(load, dense, None, None), None)
    quickest = min(able, key=lambda p: p.seconds)
    turning_rate = _turning_rate(uncompressed, able, seconds_at)
    if quickest.seconds > _WORTH * dense.seconds:
        reason = reason_against(load, dense, quickest, turning_rate)
        return Recommendation(dense, dense, reason, turning_rate)
    alike = _ALIKE_ROUNDS if quickest.way.every > 1 else _ALIKE
    most = min(alike * quickest.seconds, _WORTH * dense.seconds)
    best = min((p for p in able if p.seconds <= most), key=loss_rank)
    reason = reason_for(load, best, dense, turning_rate)
    return Recommendation(best, dense, reason, turning_rate)


def _may_be_chosen(p: Prediction, load: Workload, min_density: float, recipe: str) -> bool:
    way = p.way
    if recipe or way.recipe:
        return way.recipe == recipe if recipe else is_recommendable(way, load)
    is_good = way.method in BEST and preference(way) > 0
    return is_good and way.density >= min_density and allows_topk(load)


def loss_rank(p: Prediction) -> tuple[float, float, int, int, int, float]:
    """Return a sort key that is small if little is lost.

    After the class of loss density counts, then the exchange, the rounding of values, the method,
    and time. The exchange comes before rounding, because what is rounded away stays in the
    residual: an all-gather of fp32 was 3.7 points worse than a union of bf16 at equal bytes
    (benchmarks/results/accuracy_202611.md).
    """
    way = p.way
    return (
        loss_class(way),
        -way.density,
        -preference(way),
        _LOSSES[way.values],
        BEST.index(way.method) if way.method in BEST else len(BEST),
        p.seconds,
    )


def _turning_rate(
    uncompressed: Sequence[Prediction], able: Sequence[Prediction], seconds_at: SecondsAt
) -> float | None:
    """Return the link rate below which compressing pays, by bisection; None if none exists.

    Of each method, exchange and density, only the encoding counts that is the fastest here.
    """
    exact = [p for p in able if p.way.method == "topk"] or able
    best: dict[object, Prediction] = {}
    for p in sorted(exact, key=lambda p: p.seconds):
        best.setdefault((p.way.method, p.way.exchange, p.way.density, p.way.recipe), p)

    def pays(rate: float) -> bool:
        fastest = min(seconds_at(p, rate) for p in best.values())
        return fastest <= _WORTH * min(seconds_at(p, rate) for p in uncompressed)

    slow, fast = SLOWEST * GOODPUT / 8, FASTEST * GOODPUT / 8
    if not pays(slow) or pays(fast):
        return None
    for _ in range(24):
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if pays(middle) else (slow, middle)
    return slow
