"""Table 2 beside the planner and the lab, and what each method costs as workers are added."""

from collections.abc import Sequence

from gradwire.plan.machine import find_machine
from gradwire.plan.network import Network, link_rate
from gradwire.plan.planner import plan_for
from gradwire.plan.predict import Way
from gradwire.plan.workload import by_count
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.start import bench_step
from gradwire.workbench.models.workload import workload_by_name
from gradwire.workbench.plan_check import paper
from gradwire.workbench.plan_check.compare import compare
from gradwire.workbench.report.chart import GREY, Chart, Line
from gradwire.workbench.study.study import Cell, Page, Row, Settings, Study, Table

WORKERS = (16, 32, 64, 128, 256, 512, 1024)
LOCAL, LINK, GPU = 4, "10gbit", "v100"
LARGE, LARGE_SECONDS, LARGE_LINK, LARGE_LATENCY = 70_000_000_000, 10.0, "1gbit", 0.02
"""70 B parameters, a region a worker: ten seconds of computing, 20 ms from one to the next."""
WAYS = (
    Way("dense", "dense"),
    Way("dense", "dense-bf16"),
    Way("topk", "allgather", "bf16", "packed", 0.001),
    Way("topk", "union", "bf16", "packed", 0.001),
    Way("topk", "gtopk", "bf16", "packed", 0.001),
    Way("topk", "oktopk", "bf16", "packed", 0.001),
    Way("topk", "hierarchical", "bf16", "packed", 0.001),
    Way("topk", "gs-sgd", "bf16", "int32", 0.001),
)


RANKS, BATCH, SECONDS = 4, 32, 3.0


def cells(settings: Settings) -> list[Cell]:
    """The table, each network's growth, the large model's, and in full what the lab measures."""
    found: list[Cell] = [{"what": name} for name in ("table", *paper.TABLE, "70B")]
    if settings.small:
        return found
    return found + [{"what": "lab", "model": model, "ranks": RANKS} for model in paper.TABLE]


def measure(settings: Settings, cell: Cell) -> list[Row]:
    """Predictions; of the lab, which needs Linux and root, training steps on its links."""
    what = cell["what"]
    if what == "lab":
        job = Job(
            cell["model"], ("noop", *paper.METHODS), batch=BATCH, seconds=SECONDS, link=LINK,
            values="fp32", indices="int32", device=settings.device,
        )  # fmt: skip
        return [cell | {"row": row} for row in bench_step(job, cell["ranks"], lambda text: None)]
    if what == "table":
        found, rows = paper.check()
        constants = {"rate": found.rate, "step": found.step, **found.select}
        return [
            {"what": what, "constants": constants, "error": row.error, **vars(row)} for row in rows
        ]
    return [row for workers in WORKERS for row in _grown(what, workers)]


def _grown(what: str, workers: int) -> list[Row]:
    if what == "70B":
        device = find_machine("h100")
        load = by_count(LARGE, LARGE_SECONDS)
        network = Network(workers, workers, link_rate(LARGE_LINK), LARGE_LATENCY)
    else:
        device = find_machine(GPU)
        load = workload_by_name(what, device, None, paper.compute(what))
        network = Network(workers, workers // LOCAL, link_rate(LINK))
    names = [w.name for w in WAYS if w.method != "dense"]
    kinds = [("bf16", "packed"), ("bf16", "int32")]
    found = plan_for(load, device, network, names, 0.001, encodings=kinds).predictions
    return [
        {"what": what, "workers": workers, "way": p.way.name, "seconds": p.seconds,
         "compute": p.compute, "bytes": p.bytes}
        for p in found
        if p.way in WAYS
    ]  # fmt: skip


def page(rows: Sequence[Row]) -> Page:
    """The table side by side; seconds against workers, a chart a network."""
    table = [row for row in rows if row["what"] == "table"]
    lab = [row["row"] for row in rows if row["what"] == "lab"]
    grown = [row for row in rows if row["what"] not in ("table", "lab")]
    tables, says = [], ""
    if table:
        new = [abs(row["error"]) for row in table if not row["fitted"]]
        c = table[0]["constants"]
        says = (
            f"Five constants fitted on AlexNet and ResNet-50 predict VGG-16 and Inception-V4 of "
            f"Table 2 within {100 * max(new):.0f} %: a link of {8e-9 * c['rate']:.1f} Gbit/s, "
            f"{1e3 * c['step']:.0f} ms a step, and {c['topk']:.1f}, {c['dgc']:.1f} and "
            f"{c['gaussiank']:.1f} ns an entry for topk, dgc and gaussiank. "
        )
        tables.append(_paper_table(table))
    if lab:
        tables.append(_measured(lab))
        errors = [abs(c.error) for c in compare(lab)]
        says += f"In the lab {sum(e <= 0.15 for e in errors)} of {len(errors)} steps are within "
        says += "15 % of the planner. "
    says += "Everything else here is computed by the planner, not measured."
    names = dict.fromkeys(row["what"] for row in grown)
    charts = [_chart(name, [r for r in grown if r["what"] == name]) for name in names]
    return Page(says, tables, charts)


def _paper_table(rows: Sequence[Row]) -> Table:
    body = []
    for model in paper.TABLE:
        own = {row["method"]: row for row in rows if row["model"] == model}
        cells = [
            f"{own[m]['paper']:.3f} / {own[m]['predicted']:.3f} ({own[m]['error']:+.1%})"
            for m in paper.METHODS
        ]
        body.append([model, "fitted" if own["dense"]["fitted"] else "predicted", *cells])
    note = "The paper's seconds an iteration / ours (error). 16 V100, 4 nodes, 10 GbE, k = 0.001 d."
    return Table("Table 2", ["", "", *paper.METHODS], body, note)


def _measured(rows: Sequence[Row]) -> Table:
    """Steps on the lab's links, with what the planner says of them."""
    body = []
    for c in compare(rows):
        noop = next(r["noop_seconds"] for r in rows if r["model"] == c.model)
        times = f"{1e3 * c.measured:.4g}", f"{1e3 * c.prediction.seconds:.4g}", f"{c.error:+.1%}"
        seconds = paper.TABLE[c.model][0][paper.METHODS.index(c.method)]
        theirs = f"{seconds / paper.compute(c.model):.2f}"
        body.append([c.model, c.method, *times, f"{c.measured / noop:.2f}", theirs])
    note = f"{RANKS} ranks on one device, a link of {LINK} each, batch {BATCH}, fp32, k = 0.001 d: "
    note += "medians. Over computing: the step over one that sends nothing; the paper's is of 16 "
    note += "V100, four on a link."
    columns = ["", "method", "measured, ms", "planner, ms", "error", "over computing", "paper"]
    return Table("Measured in the lab", columns, body, note)


def _chart(name: str, rows: Sequence[Row]) -> Chart:
    lines = []
    for way in dict.fromkeys(w.name for w in WAYS):
        own = sorted((row["workers"], row["seconds"]) for row in rows if row["way"] == way)
        if own:
            xs, ys = zip(*own, strict=True)
            lines.append(Line(way, xs, ys, "dots"))
    counts = sorted({row["workers"] for row in rows})
    alone = [rows[0]["compute"]] * len(counts)
    lines.append(Line("computing alone", counts, alone, "dashes", GREY))
    where = f"{LINK}, nodes of {LOCAL} {GPU}"
    if name == "70B":
        where = f"{LARGE_LINK} and 20 ms between regions"
    caption = f"{name}, {where}, k = 0.001 d"
    return Chart(f"scaling-{name}", caption, "workers", "seconds", lines, log_x=True, log_y=True)


STUDY = Study(
    name="scaling",
    title="What a step costs as workers are added",
    figures="Shi et al. (2019), Table 2",
    cells=cells,
    measure=measure,
    page=page,
    timed=True,
)
