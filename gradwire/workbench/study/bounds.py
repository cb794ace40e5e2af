"""Measure the energy that top-k leaves behind, and compare it with the bounds.

Repeats Figures 3 and 5 of Shi et al. (2019), and finds vectors for which the paper's bound fails.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.workbench.report.chart import GREY, Chart, Line
from gradwire.workbench.simulate.simulation import Simulation
from gradwire.workbench.study import theory
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

SIZE = 100_000
"""Entries of a made-up vector, as in the paper's Figure 5."""
SHARES = [1e-4, 3e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.0625, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5]
"""Values of k / d."""
RATIOS = (1000, 250, 100)
"""Values of d / k for the iterations of Theorem 2."""
PROFILED = ("normal", "Laplace", "clipped normal", "near a constant", "lenet5", "resnet20")
"""Vectors that the chart of squares by rank shows."""
POINTS = 120
"""Ranks per line of that chart."""
NETWORKS = ("fnn3", "lenet5", "resnet20", "vgg16-cifar", "lstm-ptb", "lstm-an4")
TRAINED = [(model, 400) for model in NETWORKS]
PAPER_ITERATIONS = {1000: 250_250, 250: 15_688, 100: 2_525}
"""c^4 / (2c - 1)^2 of Theorem 2."""

MADE_UP = {
    "normal": "independent normal entries",
    "Laplace": "independent Laplace entries",
    "t, 3 degrees": "heavy tails",
    "clipped normal": "a normal cut off at its deviation",
    "near a constant": "+-1 with a tenth of noise",
}


def _made_up_vector(name: str, size: int, seed: int) -> Tensor:
    """Return a random u of the distribution `name`, one of MADE_UP."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(size, generator=generator, dtype=torch.float64)
    if name == "Laplace":
        uniform = torch.rand(size, generator=generator, dtype=torch.float64) - 0.5
        return -uniform.sign() * torch.log1p(-2 * uniform.abs())
    if name == "t, 3 degrees":
        normals = torch.randn(3, size, generator=generator, dtype=torch.float64)
        return noise / normals.square().mean(0).sqrt()
    if name == "clipped normal":
        return noise.clamp(-1, 1)
    if name == "near a constant":
        return torch.where(noise > 0, torch.ones_like(noise), -1.0) + 0.1 * torch.randn(
            size, generator=generator, dtype=torch.float64
        )
    return noise


def _trained_vector(settings: Settings, model: str, steps: int) -> Tensor:
    """Return u of the first of 4 workers after `steps` steps of top-k at 0.1 %."""
    fields = {"model": model, "workers": 4, "density": 0.001, "seed": settings.seed}
    options = resolve(fields | {"data_dir": settings.data_dir, "device": settings.device})
    simulation = Simulation.from_options(options)
    with repeatable(settings):
        for step in range(steps):
            simulation.step(watch=(0,) if step == steps - 1 else ())
    return simulation.u()


def cells(settings: Settings) -> list[Cell]:
    """List the made-up vectors, then the networks whose u is measured in training."""
    real = [("lenet5", 60), ("lstm-ptb", 60)] if settings.small else TRAINED
    return [{"u": name} for name in MADE_UP] + [{"u": m, "steps": steps} for m, steps in real]


def measure(settings: Settings, cell: Cell) -> list[StudyRow]:
    """Return one row: the errors, the profile and the iteration counts of one u."""
    real = "steps" in cell
    name = cell["u"]
    u = (
        _trained_vector(settings, name, cell["steps"])
        if real
        else _made_up_vector(name, SIZE, settings.seed)
    )
    d = u.numel()
    ks = [max(1, round(p * d)) for p in SHARES] + [max(1, d // c) for c in RATIOS]
    errors = theory.topk_errors(u, ks)
    places, squares = theory.rank_profile(u, POINTS)
    row = {"u": name, "real": real, "d": d, "steps": cell.get("steps", 0), "p": SHARES}
    row |= {"errors": errors[: len(SHARES)], "places": places, "squares": squares}
    bounds = (theory.paper_bound(k / d) for k in ks)
    row["holds"] = [e <= b for e, b in zip(errors, bounds, strict=True)][: len(SHARES)]
    row["counts"] = [theory.iterations(error) for error in errors[len(SHARES) :]]
    return [row]


def page(rows: Sequence[StudyRow]) -> Page:
    """Show Figures 3 and 5, the energy left, and the iterations of Theorem 2."""
    real = [r for r in rows if r["real"]]
    fails = [r for r in rows if not all(r["holds"])]
    at, summary = SHARES.index(1e-3), ""
    for normal in (r for r in rows if r["u"] == "normal"):
        summary = (
            f"On {normal['d']:,} normal entries and k = 0.001 d, top-k leaves "
            f"{normal['errors'][at]:.4f} of the energy; the closed form says "
            f"{theory.gaussian_error(1e-3):.4f}, the paper's bound {theory.paper_bound(1e-3):.4f}, "
            "so the bound holds but is far from tight. "
        )
    if fails:
        summary += f"The bound fails for {join_names(r['u'] for r in fails)}. "
    if real:
        broken = [r["u"] for r in real if not all(r["holds"])]
        summary += f"On u of {join_names(r['u'] for r in real)} the bound "
        summary += f"fails for {join_names(broken)}." if broken else "holds at every k shown."
    charts = [_profile_chart(rows), _bounds_chart(rows)]
    charts += [_training_chart(real)] if real else []
    charts.append(_ratio_chart(rows))
    return Page(summary, [_energy_table(rows), _iterations_table(real)], charts)


def _profile_chart(rows: Sequence[StudyRow]) -> Chart:
    chord = Line("the paper's chord", [0, 1], [1, 0], "dashes", GREY)
    lines = [Line(r["u"], r["places"], r["squares"]) for r in rows if r["u"] in PROFILED]
    caption = "Figure 3: squares by rank, and the line the bound is read from"
    return Chart("profile", caption, "i / d", "i-th largest square / largest", [*lines, chord])


def _bounds_chart(rows: Sequence[StudyRow]) -> Chart:
    p = SHARES
    lines = [
        Line("1 - k/d", p, [theory.random_error(x) for x in p], "dashes", GREY),
        Line("(1 - k/d)^2, the paper's", p, [theory.paper_bound(x) for x in p], "dashes"),
        Line("normal, closed form", p, [theory.gaussian_error(x) for x in p]),
        Line("Laplace, closed form", p, [theory.laplace_error(x) for x in p]),
    ]
    made = {r["u"]: r["errors"] for r in rows if not r["real"]}
    for name in ("normal", "Laplace"):
        if name in made:
            lines.append(Line(f"{name}, measured", p, made[name], "points"))
    caption = f"Figure 5: energy that top-k leaves of {SIZE:,} normal or Laplace entries"
    return Chart("bounds", caption, "k / d", "energy left", lines)


def _training_chart(rows: Sequence[StudyRow]) -> Chart:
    p = rows[0]["p"]
    lines = [Line(f"{r['u']}, step {r['steps']}", r["p"], r["errors"], "dots") for r in rows]
    lines += [
        Line("(1 - k/d)^2, the paper's", p, [theory.paper_bound(x) for x in p], "dashes", GREY),
        Line("normal", p, [theory.gaussian_error(x) for x in p], "dotted", GREY),
        Line("Laplace", p, [theory.laplace_error(x) for x in p], "dotted"),
    ]
    caption = "Figure 5: energy that top-k leaves of gradient + residual"
    return Chart("bounds-real", caption, "k / d", "energy left", lines, log_x=True)


def _ratio_chart(rows: Sequence[StudyRow]) -> Chart:
    lines = [Line("the bound", [SHARES[0], SHARES[-1]], [1, 1], "dashes", GREY)]
    for r in rows:
        ratios = [e / theory.paper_bound(p) for e, p in zip(r["errors"], r["p"], strict=True)]
        lines.append(Line(r["u"], r["p"], ratios, "dots" if r["real"] else "line"))
    caption = "What is left over the paper's bound: above 1 the bound fails"
    chart = Chart("ratio", caption, "k / d", "left / (1 - k/d)^2", lines, log_x=True)
    return chart.with_y_range(0, 1.6)


def _energy_table(rows: Sequence[StudyRow]) -> StudyTable:
    shares = (1e-4, 1e-3, 1e-2, 0.1, 0.5)
    body = []
    for title, form in (
        ("1 - k/d", theory.random_error),
        ("(1 - k/d)^2, the paper's", theory.paper_bound),
        ("normal, closed form", theory.gaussian_error),
        ("Laplace, closed form", theory.laplace_error),
    ):
        body.append([title, *(f"{form(p):.5f}" for p in shares), ""])
    for r in rows:
        errors = [f"{r['errors'][SHARES.index(p)]:.5f}" for p in shares]
        body.append([f"{r['u']}, measured", *errors, "holds" if all(r["holds"]) else "FAILS"])
    note = "Measured on d = 100,000 made-up entries, the size of the paper's Figure 5, or on u of "
    note += "worker 1 of 4 that train with top-k at 0.1 %. The bound must hold at every k shown."
    return StudyTable("Energy left", ["u", *(f"k/d = {p:g}" for p in shares), "bound"], body, note)


def _iterations_table(real: Sequence[StudyRow]) -> StudyTable:
    body = [
        ["random k: c^2", *(f"{c * c:,}" for c in RATIOS)],
        ["the paper: c^4 / (2c - 1)^2", *(f"{PAPER_ITERATIONS[c]:,}" for c in RATIOS)],
        [
            "normal, exact",
            *(f"{theory.iterations(theory.gaussian_error(1 / c)):,.0f}" for c in RATIOS),
        ],
        [
            "Laplace, exact",
            *(f"{theory.iterations(theory.laplace_error(1 / c)):,.0f}" for c in RATIOS),
        ],
    ]
    body += [[f"u of {r['u']}, measured", *(f"{n:,.0f}" for n in r["counts"])] for r in real]
    note = "1 / delta^2 for compression c = d/k. The paper's bound is worth a factor of 4 over "
    note += "random k"
    if real:
        gains = [PAPER_ITERATIONS[RATIOS[0]] / r["counts"][0] for r in real]
        note += f"; measured u needs {min(gains):,.0f} to {max(gains):,.0f} times fewer again"
    note += "."
    columns = ["iterations of Theorem 2", *(f"c = {c:,}" for c in RATIOS)]
    return StudyTable("Iterations until the rate is that of dense SGD", columns, body, note)


STUDY = Study(
    name="bounds",
    title="What top-k leaves behind",
    figures="Shi et al. (2019), Figures 3 and 5, Theorems 1 and 2",
    cells=cells,
    measure=measure,
    page=page,
    files=("mnist", "cifar10", "ptb", "an4"),
)
