"""Measure the time of one selection against the number of entries.

Repeats Figure 4 of Shi et al. (2019).
"""

from collections.abc import Sequence

import torch

from gradwire.compress import METHODS
from gradwire.workbench.bench import bench_compress
from gradwire.workbench.report.chart import GREY, Chart, Line
from gradwire.workbench.study.study import Cell, Page, Settings, Study, StudyRow, StudyTable

SIZES = [20, 40, 80, 100, 150, 200, 300, 400]
SMALL = [1, 2, 4]
DENSITY = 0.001
PAPER = {"torch.topk": 13.6, "dgc": 5.2, "gaussiank:released": 2.8}
"""The paper's nanoseconds per entry, on a V100 with PyTorch 1.1.

They are (iteration - computation) / entries, the mean of the four networks of Table 2. Figure 4
shows curves without numbers. The text gives 0.4 s for top-k with 25.6 M entries.
"""
AS_PUBLISHED = ("gaussiank:paper", "gaussiank:released")
"""Gaussian_k as printed and as released; `gaussiank` corrects their thresholds by counting."""


def cells(settings: Settings) -> list[Cell]:
    """List a cell per size, in millions of entries."""
    return [{"millions": size} for size in (SMALL if settings.small else SIZES)]


def measure(settings: Settings, cell: Cell) -> list[StudyRow]:
    """Time the memory floor, torch.topk, every method, and Gaussian_k as published; a row each."""
    repeat = 5 if settings.small else 20
    device = torch.device(settings.device)
    size = cell["millions"] * 10**6
    rows = bench_compress([size], [DENSITY], [*METHODS, *AS_PUBLISHED], device, repeat, warmup=2)
    return [row.asdict() for row in rows]


def page(rows: Sequence[StudyRow]) -> Page:
    """Show time against size, and nanoseconds per entry beside those of the paper."""
    largest = max(row["size"] for row in rows)
    top = {row["method"]: row for row in rows if row["size"] == largest}
    ours, theirs = top["topk"], top["torch.topk"]
    summary = (
        f"At {largest / 1e6:g} M entries on {ours['device']}, exact top-k with error feedback "
        f"takes {ours['ms']:.3g} ms, {ours['ratio']:.2f} times the memory floor, and torch.topk "
        f"alone {theirs['ms']:.3g} ms, {theirs['ratio']:.1f} times. "
    )
    if "gaussiank" in top:
        ratio = top["gaussiank"]["ms"] / ours["ms"]
        summary += f"Gaussian_k, corrected by counting, takes {ratio:.2f} times as long as exact "
        summary += "top-k; the paper found it several times faster than the torch.topk of its day."
    else:
        summary += "Gaussian_k is not in this version."
    return Page(summary, [_time_table(rows, top)], [_time_chart(rows)])


def _time_chart(rows: Sequence[StudyRow]) -> Chart:
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        points = sorted((row["size"] / 1e6, row["ms"]) for row in rows if row["method"] == method)
        xs, ys = zip(*points, strict=True)
        floor = method == "floor"
        lines.append(Line(method, xs, ys, "dashes" if floor else "dots", GREY if floor else ""))
    caption = f"Figure 4: time of a step with error feedback, k = {DENSITY:g} d"
    return Chart("operators", caption, "million entries", "ms", lines, log_x=True, log_y=True)


def _time_table(rows: Sequence[StudyRow], top: dict[str, StudyRow]) -> StudyTable:
    sizes = sorted({row["size"] for row in rows})
    body = []
    for method, last in top.items():
        by_size = {row["size"]: row["ms"] for row in rows if row["method"] == method}
        nanoseconds = last["ms"] * 1e6 / last["size"]
        paper = f"{PAPER[method]:.1f}" if method in PAPER else ""
        times = [f"{by_size[size]:.3g}" if size in by_size else "" for size in sizes]
        chosen = f"{last['achieved'] / last['k']:.3f}" if method not in ("floor", "dense") else ""
        body.append([method, *times, f"{nanoseconds:.3g}", paper, f"{last['ratio']:.2f}", chosen])
    columns = ["", *(f"{size / 1e6:g} M, ms" for size in sizes), "ns an entry", "paper, V100"]
    columns += ["over the floor", "chosen / k"]
    note = "floor: residual.add_(gradient). torch.topk: that call alone. The rest: accumulate, "
    note += "compress and settle. The paper's: what compression added to an iteration of Table 2, "
    note += "an entry, the mean of four networks; other hardware, so compare rows, not columns."
    return StudyTable("Milliseconds a step", columns, body, note)


STUDY = Study(
    name="operators",
    title="What choosing costs",
    figures="Shi et al. (2019), Figure 4",
    cells=cells,
    measure=measure,
    page=page,
    timed=True,
)
