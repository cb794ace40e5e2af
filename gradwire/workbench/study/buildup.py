"""Measure build-up: the sum of sparse messages is denser than each message.

Workers choose different entries, so the union of their choices grows with their number.
"""

from collections.abc import Sequence

from gradwire.accumulate.schedule import entry_count
from gradwire.workbench.report.chart import GREY, Chart, Line
from gradwire.workbench.simulate.simulation import Simulation
from gradwire.workbench.study.study import (
    Cell,
    Page,
    Settings,
    Study,
    StudyRow,
    StudyTable,
    is_registered,
    join_names,
    repeatable,
)
from gradwire.workbench.train.options import resolve

DENSITY = 0.001
RECIPES = ("topk/allgather", "topk/union", "topk/gtopk", "dgc", "micro", "exdyna", "deft")
WORKERS, SMALL_WORKERS = (2, 4, 8, 16, 32), (2, 4, 8, 16)
STEPS, SMALL_STEPS = 200, 16


def cells(settings: Settings) -> list[Cell]:
    """List a cell per method and number of workers."""
    model, steps = ("fnn3", SMALL_STEPS) if settings.small else ("resnet20", STEPS)
    workers = SMALL_WORKERS if settings.small else WORKERS
    recipes = [name for name in RECIPES if is_registered(name)]
    return [
        {"model": model, "recipe": recipe, "workers": count, "steps": steps}
        for recipe in recipes
        for count in workers
    ]


def measure(settings: Settings, cell: Cell) -> list[StudyRow]:
    """Train; return a row per step with the entries of the update and those sent, both over k."""
    fields = {"model": cell["model"], "method": cell["recipe"], "workers": cell["workers"]}
    fields |= {"density": DENSITY, "seed": settings.seed, "device": settings.device, "batch": 8}
    options = resolve(fields | {"data_dir": settings.data_dir})
    simulation = Simulation.from_options(options)
    k, sent, rows = entry_count(DENSITY, simulation.entries), 0.0, []
    with repeatable(settings):
        for step in range(1, cell["steps"] + 1):
            simulation.step()
            stats = simulation.cluster.stats()
            total = stats.achieved_density * simulation.entries * step
            union = int((simulation.update != 0).sum())
            share = (
                stats.seconds["compress"]
                * simulation.options.workers
                / simulation.computing.seconds
            )
            rows.append(cell | {"step": step, "k": k, "d": simulation.entries, "compress": share})
            rows[-1] |= {"union": union / k, "sent": (total - sent) / k}
            sent = total
    return rows


def independent_union(workers: int) -> float:
    """Return union / k for independent random choices: (1 - (1 - p)^P) / p."""
    return (1 - (1 - DENSITY) ** workers) / DENSITY


def page(rows: Sequence[StudyRow]) -> Page:
    """Show the entries of the update against workers and steps."""
    ends = _ends(rows)
    recipes = list(dict.fromkeys(recipe for recipe, _ in ends))
    counts = sorted({workers for _, workers in ends})
    most = counts[-1]
    words = [f"{r} {ends[r, most]['union']:.1f} k" for r in recipes if (r, most) in ends]
    summary = (
        f"{rows[0]['model']}, {most} workers, k = {DENSITY:g} d: the update has "
        f"{join_names(words)} entries; choices without anything in common would make "
        f"{independent_union(most):.1f} k."
    )
    if missing := [name for name in RECIPES if not is_registered(name)]:
        summary += f" Not measured, because not in this version: {join_names(missing)}."
    charts = [
        _workers_chart(ends, recipes, counts),
        _steps_chart(rows, recipes, most, "union", "Entries of the update"),
        _steps_chart(rows, recipes, most, "sent", "Achieved density over the one asked for"),
        _choosing_chart(ends, recipes, counts),
    ]
    return Page(summary, [_buildup_table(ends, recipes, counts)], charts)


Ends = dict[tuple[str, int], StudyRow]
"""By recipe and number of workers, the means over the second half of a run."""


def _ends(rows: Sequence[StudyRow]) -> Ends:
    """Return the means over the second half of every run."""
    runs: dict[tuple[str, int], list[StudyRow]] = {}
    for row in rows:
        runs.setdefault((row["recipe"], row["workers"]), []).append(row)
    ends = {}
    for key, run in runs.items():
        half = run[len(run) // 2 :]
        means = {name: sum(r[name] for r in half) / len(half) for name in ("union", "sent")}
        ends[key] = run[-1] | means
    return ends


def _workers_chart(ends: Ends, recipes: Sequence[str], counts: Sequence[int]) -> Chart:
    lines = [
        Line("nothing in common", counts, [independent_union(c) for c in counts], "dashes", GREY)
    ]
    for recipe in recipes:
        measured = [c for c in counts if (recipe, c) in ends]
        lines.append(Line(recipe, measured, [ends[recipe, c]["union"] for c in measured], "dots"))
    caption = "Entries of the update against workers"
    return Chart("workers", caption, "workers", "entries / k", lines, log_x=True, log_y=True)


def _steps_chart(
    rows: Sequence[StudyRow], recipes: Sequence[str], most: int, name: str, title: str
) -> Chart:
    lines = []
    for recipe in recipes:
        run = [r for r in rows if r["recipe"] == recipe and r["workers"] == most]
        lines.append(Line(recipe, [r["step"] for r in run], [r[name] for r in run]))
    caption = f"{title} by step, {most} workers"
    return Chart(f"{name}-steps", caption, "step", "entries / k", lines)


def _choosing_chart(ends: Ends, recipes: Sequence[str], counts: Sequence[int]) -> Chart:
    lines = []
    for recipe in recipes:
        measured = [c for c in counts if (recipe, c) in ends]
        shares = [100 * ends[recipe, c]["compress"] for c in measured]
        lines.append(Line(recipe, measured, shares, "dots"))
    caption = "Time to choose over time of the passes"
    return Chart("choosing", caption, "workers", "%", lines, log_x=True, log_y=True)


def _buildup_table(ends: Ends, recipes: Sequence[str], counts: Sequence[int]) -> StudyTable:
    body = [["nothing in common", *(f"{independent_union(c):.2f}" for c in counts), "", ""]]
    for recipe in recipes:
        unions = [f"{ends[recipe, c]['union']:.2f}" if (recipe, c) in ends else "" for c in counts]
        measured = [ends[recipe, c] for c in counts if (recipe, c) in ends]
        sent = [end["sent"] for end in measured]
        spread = f"{min(sent):.2f} to {max(sent):.2f}"
        body.append([recipe, *unions, spread, f"{100 * measured[-1]['compress']:.1f} %"])
    columns = ["entries of the update / k", *(f"{c} workers" for c in counts), "sent / k"]
    note = "Means over the second half of the run. sent: entries a worker sends, its achieved "
    note += "density over the one asked for, over all numbers of workers. The last column, of the "
    note += "most: time to choose over time of the passes, on this machine. Of the papers only "
    note += "abstracts are at hand: they name the growth with workers and give no number for it."
    return StudyTable("Build-up", [*columns, "choosing / computing"], body, note)


STUDY = Study(
    name="buildup",
    title="How dense the sum becomes",
    figures="Yoon and Oh (2022) and after: DEFT, MiCRO, ExDyna",
    cells=cells,
    measure=measure,
    page=page,
    files=("cifar10",),
)
