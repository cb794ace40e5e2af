"""Which of the predictions to take, and why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.plan.network import FASTEST, GOODPUT, show_link
from gradwire.plan.predict import Prediction
from gradwire.plan.rate import SLOWEST
from gradwire.plan.ways import BEST, preference

WORTH = 0.95
"""Compressing must save a twentieth of the step: it costs memory, and may cost accuracy."""
ALIKE = 1.05
"""Of the ways within a twentieth of the fastest, the one that loses least is taken."""
LOSSES = {"fp32": 0, "bf16": 1, "fp16": 2, "int8": 3, "int4": 4, "sign": 5}
EXACT = 0.01
"""Below this density the papers and the README's tables show a loss of accuracy."""


@dataclass(frozen=True)
class Recommendation:
    """What to attach with. method "dense": do not compress. `changes_at`: the link, in payload
    bytes a second, at which the answer turns, None where it never does."""

    prediction: Prediction
    reason: str
    changes_at: float | None

    @property
    def compresses(self) -> bool:
        return self.prediction.way.method != "dense"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of Config for it."""
        p = self.prediction
        way = p.way
        out: dict[str, Any] = {"method": way.method, "exchange": way.exchange}
        if self.compresses:
            out |= {"values": way.values, "indices": way.indices, "density": way.density}
        return out | {"bundle_mb": p.bundle_mb}

    def asdict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        p = self.prediction
        link = None if self.changes_at is None else 8 * self.changes_at / GOODPUT
        return {
            "method": p.way.method,
            "exchange": p.way.exchange,
            "encoding": p.way.travels,
            "density": p.way.density,
            "values": p.way.values,
            "indices": p.way.indices,
            "bundle_mb": p.bundle_mb,
            "seconds": p.seconds,
            "compress": self.compresses,
            "changes_at_bits_per_second": link,
            "reason": self.reason,
        }


At = Callable[[Prediction, float], float]
"""(prediction, rate) -> seconds of the same way, with its best bundles, on a link of that rate."""


def recommend(predictions: Sequence[Prediction], at: At, min_density: float) -> Recommendation:
    """The fastest way that may be recommended; of those alike, the one that loses least."""
    dense = min((p for p in predictions if p.way.method == "dense"), key=lambda p: p.seconds)
    sparse = [
        p
        for p in predictions
        if p.way.method in BEST and preference(p.way) and p.way.density >= min_density
    ]
    if not sparse:
        return Recommendation(dense, "nothing else was asked for.", None)
    fastest = min(p.seconds for p in sparse)
    best = min((p for p in sparse if p.seconds <= ALIKE * fastest), key=_loses)
    turn = _turning_point(predictions, sparse, at)
    if fastest > WORTH * dense.seconds:
        quickest = min(sparse, key=lambda p: p.seconds)
        return Recommendation(dense, _why_not(dense, quickest, turn), turn)
    return Recommendation(best, _why(best, dense, turn), turn)


def _loses(p: Prediction) -> tuple[float, int, int, int, float]:
    """Small where little is lost: density first, then what arrives, then rounding, then time."""
    way = p.way
    return (
        -way.density,
        LOSSES[way.values],
        -preference(way),
        BEST.index(way.method),
        p.seconds,
    )


def _turning_point(
    predictions: Sequence[Prediction], sparse: Sequence[Prediction], at: At
) -> float | None:
    """The link rate below which compressing pays, by bisection; None where there is none.

    Of each method, exchange and density, the encoding that is the fastest here.
    """
    dense = [p for p in predictions if p.way.method == "dense"]
    exact = [p for p in sparse if p.way.method == "topk"] or sparse
    best: dict[object, Prediction] = {}
    for p in sorted(exact, key=lambda p: p.seconds):
        best.setdefault((p.way.method, p.way.exchange, p.way.density), p)

    def pays(rate: float) -> bool:
        found = min(at(p, rate) for p in best.values())
        return found <= WORTH * min(at(p, rate) for p in dense)

    slow, fast = SLOWEST * GOODPUT / 8, FASTEST * GOODPUT / 8
    if not pays(slow) or pays(fast):
        return None
    for _ in range(24):
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if pays(middle) else (slow, middle)
    return slow


def _why(best: Prediction, dense: Prediction, turn: float | None) -> str:
    way, gain = best.way, _few(dense.seconds / best.seconds)
    text = (
        f"{way.name} at density {way.density:g} as {way.travels}: {_time(best.seconds)} a step "
        f"against {_time(dense.seconds)} for {dense.way.name} ({gain}x)"
        f" and {_time(best.compute)} without any exchange; it sends {_megabytes(best)} MB "
        f"instead of {_megabytes(dense)}, in {_bundles(best)}."
    )
    if turn is not None:
        text += f" On links faster than {show_link(turn)} it would not pay."
    if way.density < EXACT:
        text += (
            f" Density {way.density:g} may cost accuracy: at 0.1 % the papers lose 0.6 to 0.8 "
            f"points, we lost 5 in 50 epochs; min_density=0.01 is the safer bound."
        )
    return text


def _why_not(dense: Prediction, best: Prediction, turn: float | None) -> str:
    text = (
        f"do not compress: {dense.way.name} takes {_time(dense.seconds)} a step, of which "
        f"{_time(dense.exposed)} is not computing; the best compressed way, {best.way.name} at "
        f"density {best.way.density:g}, {_time(best.seconds)}."
    )
    if turn is None:
        return text + " No link rate changes that."
    return text + f" Compressing would pay below {show_link(turn)}."


def _bundles(p: Prediction) -> str:
    if p.bundles == 1:
        return "one bundle"
    return f"{p.bundles} bundles of up to {p.bundle_mb:g} MB"


def _megabytes(p: Prediction) -> str:
    return _few(p.bytes / 1e6)


def _few(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _time(seconds: float) -> str:
    return f"{_few(seconds)} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
