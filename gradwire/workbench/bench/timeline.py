"""Spans as a picture: a band per method, with a lane for the computation and one per bundle."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.workbench.bench.show import open_figure, save_figure
from gradwire.workbench.bench.trace import COMPUTE, Span

COLOURS = {
    "forward": "#9ecae1",
    "backward": "#4292c6",
    "optimizer": "#c6dbef",
    "wait": "#d9d9d9",
    "accumulate": "#74c476",
    "compress": "#31a354",
    "encode": "#fdae6b",
    "exchange": "#d94801",
    "decode": "#9e9ac8",
}
LANE, GAP, MOST_LANES = 0.8, 0.6, 24
"""Height of a bar, gap between methods (a lane is 1), lanes shown per method."""


def draw_timeline(methods: Mapping[str, Sequence[Span]], path: Path, title: str) -> None:
    """Draw time to the right, methods from top to bottom, and their names at the left."""
    bars: list[tuple[Span, float]] = []
    ticks: list[tuple[float, str]] = []
    y = 0.0
    for name, spans in methods.items():
        lanes = list(dict.fromkeys(span.lane for span in spans))[:MOST_LANES]
        for lane in lanes:
            ticks.append((y, name if lane == COMPUTE else f"bundle {lane}"))
            bars += [(span, y) for span in spans if span.lane == lane]
            y -= 1
        y -= GAP
    figure, axes = open_figure(path, size=(11, 1.2 + 0.26 * -y))
    for span, height in bars:
        _bar(axes, span, height)
    axes.set_yticks([height for height, _ in ticks], [text for _, text in ticks], fontsize=8)
    axes.set_ylim(y + 0.3, 0.8)
    axes.set_xlim(left=0)
    axes.set_xlabel("milliseconds")
    axes.set_title(title, fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    used = {span.name for spans in methods.values() for span in spans}
    handles = [_legend_patch(name) for name in COLOURS if name in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=9, fontsize=8, frameon=False)
    save_figure(figure, path)


def _bar(axes: Any, span: Span, height: float) -> None:
    axes.barh(
        height,
        1e3 * (span.end - span.begin),
        left=1e3 * span.begin,
        height=LANE,
        color=COLOURS[span.name],
        edgecolor="none",
    )


def _legend_patch(name: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=COLOURS[name], label=name)
