"""Measure the distribution of the entries of u = gradient + residual in training.

Repeats Figures 2, 7 and 8 of Shi et al. (2019).
"""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from gradwire.workbench import models
from gradwire.workbench.report.chart import GREY, Chart, Line, shades
from gradwire.workbench.simulate.simulation import Simulation
from gradwire.workbench.study import theory
from gradwire.workbench.study.fit import fit_shape
from gradwire.workbench.study.study import (
    Cell,
    Page,
    Settings,
    Study,
    StudyRow,
    StudyTable,
    join_names,
    repeatable,
)
from gradwire.workbench.train.options import resolve

FIGURES = {"dense": "Figure 7", "topk": "Figure 2", "gaussiank": "Figure 8"}
RELEASED = ("variant=released",)
"""The option for the paper's own Gaussian_k, which Figure 8 shows."""
DENSITY = 0.001
EDGE, BINS = 10.0, 81
"""Histograms have BINS bins from -EDGE to EDGE, in units of rms."""
SHARES = (1e-3, 1e-2, 0.1)
"""Values of k / d at which the bound is tested."""
TABLE_1 = ("fnn3", "lenet5", "resnet20", "vgg16-cifar", "lstm-ptb", "lstm-an4")


def cells(settings: Settings) -> list[Cell]:
    """List a cell per model of the paper's Table 1 and method."""
    every, workers = (3, 2) if settings.small else (200, 4)
    return [
        {"model": model, "method": method, "workers": workers, "every": every, "last": 8 * every}
        for model in TABLE_1
        for method in FIGURES
    ]


def measure(settings: Settings, cell: Cell) -> list[StudyRow]:
    """Train; return a row per eighth of the run, with the histogram and shape of worker 1's u."""
    spec = models.model_spec(cell["model"])
    fields: dict[str, Any] = {
        "model": spec.name,
        "method": cell["method"],
        "workers": cell["workers"],
    }
    fields |= {"density": DENSITY, "seed": settings.seed, "device": settings.device}
    if settings.small and spec.task == "classify":
        fields["batch"] = 8
    if cell["method"] == "gaussiank":
        fields["options"] = RELEASED
    options = resolve(fields | {"data_dir": settings.data_dir})
    simulation = Simulation.from_options(options)
    rows: list[StudyRow] = []
    total_before = 0.0
    with repeatable(settings):
        for step in range(1, cell["last"] + 1):
            due = step % cell["every"] == 0
            simulation.step(watch=(0,) if due else ())
            if due:
                total = simulation.cluster.stats().achieved_density * step
                sent, total_before = (total - total_before) / cell["every"] / DENSITY, total
                rows.append(_row(simulation.u(), cell, step) | {"sent": sent})
    return rows


def _row(u: Tensor, cell: Cell, step: int) -> StudyRow:
    shape = fit_shape(u)
    ks = [max(1, round(p * u.numel())) for p in SHARES]
    return {
        "model": cell["model"],
        "method": cell["method"],
        "step": step,
        "d": u.numel(),
        **asdict(shape),
        "best": shape.best,
        "histogram": histogram(u / shape.rms),
        "errors": theory.topk_errors(u, ks),
        "holds": [theory.bound_holds(u, k) for k in ks],
    }


def histogram(x: Tensor) -> list[float]:
    """Return the density in each bin; entries outside all bins are not counted."""
    # torch.histc counts in fp32, which cannot count beyond 2^24 entries in a bin.
    bins = ((x + EDGE) * (BINS / (2 * EDGE))).floor()
    inside = bins[(bins >= 0) & (bins < BINS)].long()
    counts = torch.bincount(inside, minlength=BINS).double()
    return (counts / x.numel() / (2 * EDGE / BINS)).tolist()


def page(rows: Sequence[StudyRow]) -> Page:
    """Show a histogram per run, the distributions that fit best, and the bound's condition."""
    runs: dict[tuple[str, str], list[StudyRow]] = {}
    for row in rows:
        runs.setdefault((row["model"], row["method"]), []).append(row)
    charts = [_histogram_chart(*key, run) for key, run in runs.items()]
    return Page(_summarise(rows, runs), [_shape_table(runs), _bound_table(runs)], charts)


def _summarise(rows: Sequence[StudyRow], runs: dict[tuple[str, str], list[StudyRow]]) -> str:
    words = []
    for method in dict.fromkeys(row["method"] for row in rows):
        best = [row["best"] for row in rows if row["method"] == method]
        words.append(f"{best.count('normal')} of {len(best)} with {method}")
    tails = sorted(row["kurtosis"] for row in rows)
    wider = [
        run[-1]["rms"] / runs[model, "dense"][-1]["rms"]
        for (model, method), run in runs.items()
        if method == "topk" and (model, "dense") in runs
    ]
    broken = sum(not all(row["holds"]) for row in rows)
    ends = {m: sorted(run[-1]["tail"] for (_, n), run in runs.items() if n == m) for m in FIGURES}
    summary = (
        f"Bell-shaped, as the paper says; of normal, Laplace and t, normal is the likeliest in "
        f"{join_names(words)}; the median kurtosis is {tails[len(tails) // 2]:.0f} (normal: 3). "
    )
    if wider:
        summary += f"Top-k makes u {min(wider):.1f} to {max(wider):.1f} times wider than dense, "
        summary += "and what it sends is missing from the tail: the median tail index is "
        summary += f"{ends['dense'][len(ends['dense']) // 2]:.1f} for dense, "
        summary += f"{ends['topk'][len(ends['topk']) // 2]:.1f} for top-k. "
    return summary + f"The condition of the (1 - k/d)^2 bound fails in {broken or 'none'} of them."


def _histogram_chart(model: str, method: str, run: Sequence[StudyRow]) -> Chart:
    width = 2 * EDGE / BINS
    middles = [-EDGE + width * (i + 0.5) for i in range(BINS)]
    lines = [
        Line(
            f"{row['step']}", middles, [v or float("nan") for v in row["histogram"]], colour=colour
        )
        for row, colour in zip(run, shades(len(run)), strict=True)
    ]
    bell = [NormalDist().pdf(x) for x in middles]
    lines.append(Line("normal", middles, bell, "dashes", GREY))
    caption = f"{FIGURES[method]}: {model}, {method}, by iteration"
    lowest = 0.3 / width / run[-1]["d"]
    chart = Chart(f"{model}-{method}", caption, "u / rms", "density", lines, log_y=True)
    return chart.with_y_range(max(lowest, 1e-7), 20)


def _shape_table(runs: dict[tuple[str, str], list[StudyRow]]) -> StudyTable:
    columns = ["u", "iteration", "sent / k", "rms", "zeros", "kurtosis", "tail index", "likeliest"]
    columns += ["Laplace over normal", "t over normal"]
    body = []
    for (model, method), run in runs.items():
        row = run[-1]
        best = f"t, nu = {row['degrees']:g}" if row["best"] == "t" else row["best"]
        body.append(
            [
                f"{model}, {method}",
                str(row["step"]),
                "" if method == "dense" else f"{row['sent']:.2g}",
                f"{row['rms']:.2g}",
                f"{100 * row['zeros']:.0f} %",
            ]
            + [f"{row['kurtosis']:.1f}", f"{row['tail']:.1f}", best]
            + [f"{row[name] - row['normal']:+.2f}" for name in ("laplace", "t")]
        )
    note = "The paper shows histograms without numbers. Kurtosis is 3 for normal, 6 for Laplace "
    note += "entries; the tail index is Hill's, of the largest hundredth. The last two columns are "
    note += "nats an entry that is not zero. gaussiank is the paper's, as released; sent is "
    note += "since the last histogram. Worker 1 of 4; of 2 in a small study."
    return StudyTable("The shape of u at the end", columns, body, note)


def _bound_table(runs: dict[tuple[str, str], list[StudyRow]]) -> StudyTable:
    columns = ["u", *(f"left at k/d = {p:g}" for p in SHARES), "(1 - k/d)^2 holds"]
    body = [
        ["normal, closed form", *(f"{theory.gaussian_error(p):.4f}" for p in SHARES), ""],
        ["the paper's bound", *(f"{theory.paper_bound(p):.4f}" for p in SHARES), ""],
    ]
    for (model, method), run in runs.items():
        holds = sum(all(row["holds"]) for row in run)
        errors = [f"{error:.4f}" for error in run[-1]["errors"]]
        body.append([f"{model}, {method}", *errors, f"{holds} of {len(run)}"])
    note = "Holds: the mean square of the k largest is at least 2 - k/d times that of all, at each "
    note += "of the three k. The paper assumes it of every bell-shaped u."
    return StudyTable("Does the bound's condition hold?", columns, body, note)


STUDY = Study(
    name="distributions",
    title="The shape of gradient + residual",
    figures="Shi et al. (2019), Figures 2, 7 and 8",
    cells=cells,
    measure=measure,
    page=page,
    files=("mnist", "cifar10", "ptb", "an4"),
)
