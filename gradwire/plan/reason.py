"""Reasons of a recommendation, in sentences."""

from gradwire.plan.accuracy import allows_topk, caveat
from gradwire.plan.network import show_link
from gradwire.plan.predict import Prediction
from gradwire.plan.show import show_bytes, show_number, show_seconds
from gradwire.plan.workload import Workload

_BITS = {"sign": "one bit each", "two-bit": "two bits each"}


def reason_for(
    load: Workload, best: Prediction, dense: Prediction, turning_rate: float | None
) -> str:
    """Return why the recommended way is taken, how much it gains, and what it may cost."""
    text = (
        f"{_describe(best)}: {show_seconds(best.seconds)} per step against "
        f"{show_seconds(dense.seconds)} for {dense.way.label} "
        f"({show_number(dense.seconds / best.seconds)}x) and {show_seconds(load.seconds)} without "
        f"any exchange; a worker sends {show_bytes(best.bytes)} per step instead of "
        f"{show_bytes(dense.bytes)}, in {_show_bundles(best)}."
    )
    if turning_rate is not None:
        text += f" On links faster than {show_link(turning_rate)} it would not pay."
    if best.compute > load.seconds:
        own = show_seconds(best.compute - load.seconds)
        text += f" Of its step {own} are Muon's own products, counted and not measured."
    return " ".join(filter(None, [text, caveat(best.way, load)]))


def reason_against(
    load: Workload, dense: Prediction, best: Prediction | None, turning_rate: float | None
) -> str:
    """Return why not to compress; `best` is the fastest compressed way that may be chosen."""
    text = (
        f"do not compress: {dense.way.label} takes {show_seconds(dense.seconds)} per step, of "
        f"which {show_seconds(dense.exposed)} is not computing"
    )
    if best is None:
        nothing = "nothing else was asked for"
        if not allows_topk(load):
            nothing = "nothing that was asked for may stand in front of this optimiser"
        return " ".join(filter(None, [f"{text}; {nothing}.", caveat(dense.way, load)]))
    text += f"; the best compressed way, {_describe(best)}, takes {show_seconds(best.seconds)}."
    if turning_rate is None:
        text += " No link rate changes that."
    else:
        text += f" Compressing would pay below {show_link(turning_rate)}."
    return " ".join(filter(None, [text, caveat(dense.way, load)]))


def _describe(p: Prediction) -> str:
    way = p.way
    if way.every > 1:
        how = " through owners" if way.exchange == "owner" else ""
        return (
            f"recipe {way.recipe} ({way.every} steps alone, then {100 * way.density:.3g} % of the "
            f"entries as {_BITS.get(way.values, way.values)}{how})"
        )
    name = f"recipe {way.recipe}, {way.method}/{way.exchange}" if way.recipe else way.name
    return f"{name} at density {way.density:g} as {way.encoding_name}"


def _show_bundles(p: Prediction) -> str:
    if p.bundles == 1:
        return "one bundle"
    return f"{p.bundles} bundles of up to {show_bytes(1e6 * p.bundle_mb)}"
