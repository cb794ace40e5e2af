"""Recommendation: the choice among the predictions, and its reason."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.plan.network import FASTEST, GOODPUT, show_link
from gradwire.plan.predict import Prediction
from gradwire.plan.rate import SLOWEST
from gradwire.plan.ways import BEST, preference

_WORTH = 0.95
"""The share of the dense step that a compressed step may take at most.

Compressing must save a twentieth of the step, because it costs memory and may cost accuracy.
"""
_ALIKE = 1.05
"""Of the ways within a twentieth of the fastest, the one that loses least is taken."""
_LOSSES = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3, "int4": 4, "two-bit": 5, "sign": 6}
"""The order of the encodings of values by their loss."""
_EXACT = 0.01
"""Below this density the papers and the README's tables show a loss of accuracy."""


@dataclass(frozen=True)
class Recommendation:
    """Recommended way of exchanging; method "dense" means: do not compress.

    changes_at: the link, in payload bytes per second, at which the answer changes. None: it never
    does.
    """

    prediction: Prediction
    reason: str
    changes_at: float | None

    @property
    def compresses(self) -> bool:
        """True: the recommended way compresses."""
        return self.prediction.way.method != "dense"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of Config for the recommended way."""
        p = self.prediction
        way = p.way
        fields: dict[str, Any] = {"method": way.method, "exchange": way.exchange}
        if self.compresses:
            fields |= {"values": way.values, "indices": way.indices, "density": way.density}
        return fields | {"bundle_mb": p.bundle_mb}

    def asdict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        p = self.prediction
        link = None if self.changes_at is None else 8 * self.changes_at / GOODPUT
        return {
            "method": p.way.method,
            "exchange": p.way.exchange,
            "encoding": p.way.encoding_name,
            "density": p.way.density,
            "values": p.way.values,
            "indices": p.way.indices,
            "bundle_mb": p.bundle_mb,
            "seconds": p.seconds,
            "compress": self.compresses,
            "changes_at_bits_per_second": link,
            "reason": self.reason,
        }


SecondsAt = Callable[[Prediction, float], float]
"""(prediction, rate) -> seconds of the same way, with its best bundles, on a link of that rate."""


def recommend(
    predictions: Sequence[Prediction], seconds_at: SecondsAt, min_density: float
) -> Recommendation:
    """Return the fastest way that may be recommended; of ways alike, the one that loses least."""
    dense = min((p for p in predictions if p.way.method == "dense"), key=lambda p: p.seconds)
    sparse = [
        p
        for p in predictions
        if p.way.method in BEST and preference(p.way) and p.way.density >= min_density
    ]
    if not sparse:
        return Recommendation(dense, "nothing else was asked for.", None)
    fastest = min(p.seconds for p in sparse)
    best = min((p for p in sparse if p.seconds <= _ALIKE * fastest), key=_loss_rank)
    turning_rate = _turning_rate(predictions, sparse, seconds_at)
    if fastest > _WORTH * dense.seconds:
        quickest = min(sparse, key=lambda p: p.seconds)
        return Recommendation(dense, _reason_against(dense, quickest, turning_rate), turning_rate)
    return Recommendation(best, _reason_for(best, dense, turning_rate), turning_rate)


def _loss_rank(p: Prediction) -> tuple[float, int, int, int, float]:
    """Return a sort key that is small if little is lost.

    Density counts first, then the rounding of values, the exchange, the method, and time.
    """
    way = p.way
    return (
        -way.density,
        _LOSSES[way.values],
        -preference(way),
        BEST.index(way.method),
        p.seconds,
    )


def _turning_rate(
    predictions: Sequence[Prediction], sparse: Sequence[Prediction], seconds_at: SecondsAt
) -> float | None:
    """Return the link rate below which compressing pays, by bisection; None if none exists.

    Of each method, exchange and density, only the encoding counts that is the fastest here.
    """
    dense = [p for p in predictions if p.way.method == "dense"]
    exact = [p for p in sparse if p.way.method == "topk"] or sparse
    best: dict[object, Prediction] = {}
    for p in sorted(exact, key=lambda p: p.seconds):
        best.setdefault((p.way.method, p.way.exchange, p.way.density), p)

    def pays(rate: float) -> bool:
        fastest = min(seconds_at(p, rate) for p in best.values())
        return fastest <= _WORTH * min(seconds_at(p, rate) for p in dense)

    slow, fast = SLOWEST * GOODPUT / 8, FASTEST * GOODPUT / 8
    if not pays(slow) or pays(fast):
        return None
    for _ in range(24):
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if pays(middle) else (slow, middle)
    return slow


def _reason_for(best: Prediction, dense: Prediction, turning_rate: float | None) -> str:
    way, gain = best.way, _show_number(dense.seconds / best.seconds)
    text = (
        f"{way.name} at density {way.density:g} as {way.encoding_name}: "
        f"{_show_seconds(best.seconds)} a step against {_show_seconds(dense.seconds)} for "
        f"{dense.way.name} ({gain}x) and {_show_seconds(best.compute)} without any exchange; "
        f"it sends {_show_megabytes(best)} MB instead of {_show_megabytes(dense)}, in "
        f"{_show_bundles(best)}."
    )
    if turning_rate is not None:
        text += f" On links faster than {show_link(turning_rate)} it would not pay."
    if way.density < _EXACT:
        text += (
            f" Density {way.density:g} may cost accuracy: at 0.1 % the papers lose 0.6 to 0.8 "
            f"points, we lost 5 in 50 epochs; min_density=0.01 is the safer bound."
        )
    return text


def _reason_against(dense: Prediction, best: Prediction, turning_rate: float | None) -> str:
    text = (
        f"do not compress: {dense.way.name} takes {_show_seconds(dense.seconds)} a step, of which "
        f"{_show_seconds(dense.exposed)} is not computing; the best compressed way, "
        f"{best.way.name} at density {best.way.density:g}, {_show_seconds(best.seconds)}."
    )
    if turning_rate is None:
        return text + " No link rate changes that."
    return text + f" Compressing would pay below {show_link(turning_rate)}."


def _show_bundles(p: Prediction) -> str:
    if p.bundles == 1:
        return "one bundle"
    return f"{p.bundles} bundles of up to {p.bundle_mb:g} MB"


def _show_megabytes(p: Prediction) -> str:
    return _show_number(p.bytes / 1e6)


def _show_number(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _show_seconds(seconds: float) -> str:
    return f"{_show_number(seconds)} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
