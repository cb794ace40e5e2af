"""Figures 3 and 5: how much top-k leaves behind, against the bounds, and where they fail."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.workbench.report.chart import GREY, Chart, Line
from gradwire.workbench.simulate.simulation import Simulation
from gradwire.workbench.study import theory
from gradwire.workbench.study.study import (
    Cell,
    Page,
    Row,
    Settings,
    Study,
    Table,
    listed,
    repeatable,
)
from gradwire.workbench.train.options import resolve

SIZE = 100_000
SHARES = [1e-4, 3e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.0625, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5]
RATIOS = (1000, 250, 100)
PROFILED = ("normal", "Laplace", "clipped normal", "near a constant", "lenet5", "resnet20")
POINTS = 120
NETWORKS = ("fnn3", "lenet5", "resnet20", "vgg16-cifar", "lstm-ptb", "lstm-an4")
REAL = [(model, 400) for model in NETWORKS]
PAPER = {1000: 250_250, 250: 15_688, 100: 2_525}
"""c^4 / (2c - 1)^2 of Theorem 2."""

MADE = {
    "normal": "independent normal entries",
    "Laplace": "independent Laplace entries",
    "t, 3 degrees": "heavy tails",
    "clipped normal": "a normal cut off at its deviation",
    "near a constant": "+-1 with a tenth of noise",
}


def vector(name: str, size: int, seed: int) -> Tensor:
    """A made-up u."""
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randn(size, generator=draw, dtype=torch.float64)
    if name == "Laplace":
        flat = torch.rand(size, generator=draw, dtype=torch.float64) - 0.5
        return -flat.sign() * torch.log1p(-2 * flat.abs())
    if name == "t, 3 degrees":
        others = torch.randn(3, size, generator=draw, dtype=torch.float64)
        return noise / others.square().mean(0).sqrt()
    if name == "clipped normal":
        return noise.clamp(-1, 1)
    if name == "near a constant":
        return torch.where(noise > 0, torch.ones_like(noise), -1.0) + 0.1 * torch.randn(
            size, generator=draw, dtype=torch.float64
        )
    return noise


def trained(settings: Settings, model: str, steps: int) -> Tensor:
    """u of worker 1 of 4 after `steps` steps of top-k at 0.1 %."""
    given = {"model": model, "workers": 4, "density": 0.001, "seed": settings.seed}
    options = resolve(given | {"data_dir": settings.data_dir, "device": settings.device})
    simulation = Simulation.from_options(options)
    with repeatable(settings):
        for step in range(steps):
            simulation.step(watch=(0,) if step == steps - 1 else ())
    return simulation.u()


def cells(settings: Settings) -> list[Cell]:
    """Made-up vectors, then u of networks in training."""
    real = [("lenet5", 60), ("lstm-ptb", 60)] if settings.small else REAL
    return [{"u": name} for name in MADE] + [{"u": m, "steps": steps} for m, steps in real]


def measure(settings: Settings, cell: Cell) -> list[Row]:
    """One row: the errors, the profile and the iteration counts of one u."""
    real = "steps" in cell
    name = cell["u"]
    u = trained(settings, name, cell["steps"]) if real else vector(name, SIZE, settings.seed)
    d = u.numel()
    ks = [max(1, round(p * d)) for p in SHARES] + [max(1, d // c) for c in RATIOS]
    errors = theory.topk_errors(u, ks)
    places, squares = theory.profile(u, POINTS)
    row = {"u": name, "real": real, "d": d, "steps": cell.get("steps", 0), "p": SHARES}
    row |= {"errors": errors[: len(SHARES)], "places": places, "squares": squares}
    bounds = (theory.paper_bound(k / d) for k in ks)
    row["holds"] = [e <= b for e, b in zip(errors, bounds, strict=True)][: len(SHARES)]
    row["counts"] = [theory.iterations(error) for error in errors[len(SHARES) :]]
    return [row]


def page(rows: Sequence[Row]) -> Page:
    """Figures 3 and 5, the energy left, and the counts of Theorem 2."""
    real, fails = [r for r in rows if r["real"]], [r for r in rows if not all(r["holds"])]
    at, says = SHARES.index(1e-3), ""
    for normal in (r for r in rows if r["u"] == "normal"):
        says = (
            f"On {normal['d']:,} normal entries and k = 0.001 d, top-k leaves "
            f"{normal['errors'][at]:.4f} of the energy; the closed form says "
            f"{theory.gaussian_error(1e-3):.4f}, the paper's bound {theory.paper_bound(1e-3):.4f}, "
            "so the bound holds but is far from tight. "
        )
    if fails:
        says += f"The bound fails for {listed(r['u'] for r in fails)}. "
    if real:
        broken = [r["u"] for r in real if not all(r["holds"])]
        says += f"On u of {listed(r['u'] for r in real)} the bound "
        says += f"fails for {listed(broken)}." if broken else "holds at every k shown."
    charts = [_profile(rows), _figure5(rows), *([_real(real)] if real else []), _ratio(rows)]
    return Page(says, [_errors(rows), _counts(real)], charts)


def _profile(rows: Sequence[Row]) -> Chart:
    chord = Line("the paper's chord", [0, 1], [1, 0], "dashes", GREY)
    lines = [Line(r["u"], r["places"], r["squares"]) for r in rows if r["u"] in PROFILED]
    caption = "Figure 3: squares by rank, and the line the bound is read from"
    return Chart("profile", caption, "i / d", "i-th largest square / largest", [*lines, chord])


def _figure5(rows: Sequence[Row]) -> Chart:
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


def _real(rows: Sequence[Row]) -> Chart:
    p = rows[0]["p"]
    lines = [Line(f"{r['u']}, step {r['steps']}", r["p"], r["errors"], "dots") for r in rows]
    lines += [
        Line("(1 - k/d)^2, the paper's", p, [theory.paper_bound(x) for x in p], "dashes", GREY),
        Line("normal", p, [theory.gaussian_error(x) for x in p], "dotted", GREY),
        Line("Laplace", p, [theory.laplace_error(x) for x in p], "dotted"),
    ]
    caption = "Figure 5: energy that top-k leaves of gradient + residual"
    return Chart("bounds-real", caption, "k / d", "energy left", lines, log_x=True)


def _ratio(rows: Sequence[Row]) -> Chart:
    lines = [Line("the bound", [SHARES[0], SHARES[-1]], [1, 1], "dashes", GREY)]
    for r in rows:
        ratios = [e / theory.paper_bound(p) for e, p in zip(r["errors"], r["p"], strict=True)]
        lines.append(Line(r["u"], r["p"], ratios, "dots" if r["real"] else "line"))
    caption = "What is left over the paper's bound: above 1 the bound fails"
    chart = Chart("ratio", caption, "k / d", "left / (1 - k/d)^2", lines, log_x=True)
    return chart.within(0, 1.6)


def _errors(rows: Sequence[Row]) -> Table:
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
        found = [f"{r['errors'][SHARES.index(p)]:.5f}" for p in shares]
        body.append([f"{r['u']}, measured", *found, "holds" if all(r["holds"]) else "FAILS"])
    note = "Measured on d = 100,000 made-up entries, the size of the paper's Figure 5, or on u of "
    note += "worker 1 of 4 that train with top-k at 0.1 %. The bound must hold at every k shown."
    return Table("Energy left", ["u", *(f"k/d = {p:g}" for p in shares), "bound"], body, note)


def _counts(real: Sequence[Row]) -> Table:
    body = [
        ["random k: c^2", *(f"{c * c:,}" for c in RATIOS)],
        ["the paper: c^4 / (2c - 1)^2", *(f"{PAPER[c]:,}" for c in RATIOS)],
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
        gains = [PAPER[RATIOS[0]] / r["counts"][0] for r in real]
        note += f"; measured u needs {min(gains):,.0f} to {max(gains):,.0f} times fewer again"
    note += "."
    columns = ["iterations of Theorem 2", *(f"c = {c:,}" for c in RATIOS)]
    return Table("Iterations until the rate is that of dense SGD", columns, body, note)


STUDY = Study(
    name="bounds",
    title="What top-k leaves behind",
    figures="Shi et al. (2019), Figures 3 and 5, Theorems 1 and 2",
    cells=cells,
    measure=measure,
    page=page,
    files=("mnist", "cifar10", "ptb", "an4"),
)
