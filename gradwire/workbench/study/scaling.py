"""Compare the planner with Table 2 of Shi et al. (2019) and with the lab.

Also predict the step time of each method for 16 to 1024 workers.
"""

from collections.abc import Sequence

from gradwire.plan.machine import find_machine
from gradwire.plan.network import Network, link_rate
from gradwire.plan.planner import Question, plan_for
from gradwire.plan.predict import Way
from gradwire.plan.ways import recipe_ways, torch_ways
from gradwire.plan.workload import by_count
from gradwire.workbench.bench.job import Job
from gradwire.workbench.bench.start import bench_step
from gradwire.workbench.models.workload import workload_by_name
from gradwire.workbench.plan_check import paper
from gradwire.workbench.plan_check.compare import compare_rows
from gradwire.workbench.report.chart import GREY, Chart, Line
from gradwire.workbench.study.study import Cell, Page, Settings, Study, StudyRow, StudyTable

WORKERS = (16, 32, 64, 128, 256, 512, 1024)
LOCAL, LINK, GPU = 4, "10gbit", "v100"
"""Workers per node, the link between nodes, and the GPU, as in the paper."""
LARGE, LARGE_SECONDS, LARGE_LINK, LARGE_LATENCY = 70_000_000_000, 10.0, "1gbit", 0.02
"""70 B parameters with one worker per region: 10 s of computing, 20 ms between regions."""
WAYS = (
    Way("ddp", ""),
    Way("bf16-hook", ""),
    Way("topk", "allgather", "bf16", "packed", 0.001),
    Way("topk", "union", "bf16", "packed", 0.001),
    Way("topk", "gtopk", "bf16", "packed", 0.001),
    Way("topk", "oktopk", "bf16", "packed", 0.001),
    Way("topk", "hierarchical", "bf16", "packed", 0.001),
    Way("topk", "gs-sgd", "bf16", "int32", 0.001),
)
"""Ways whose growth with the number of workers is predicted."""
LARGE_WAYS = tuple(recipe_ways(["muon", "muon-wan"]))
"""Ways for the large model beside these: a transformer, before whose AdamW top-k must not stand."""
RANKS, BATCH, SECONDS = 4, 32, 3.0
"""Ranks, batch per rank and seconds per method of a measurement in the lab."""


def cells(settings: Settings) -> list[Cell]:
    """List Table 2, the growth of each network and of the large model, and the lab's steps.

    A small study leaves out the lab.
    """
    predicted: list[Cell] = [{"what": name} for name in ("table", *paper.TABLE, "70B")]
    if settings.small:
        return predicted
    return predicted + [{"what": "lab", "model": model, "ranks": RANKS} for model in paper.TABLE]


def measure(settings: Settings, cell: Cell) -> list[StudyRow]:
    """Return predictions, or measured steps for a cell of the lab, which needs Linux and root."""
    part = cell["what"]
    if part == "lab":
        job = Job(
            cell["model"], ("noop", *paper.METHODS), batch=BATCH, seconds=SECONDS, link=LINK,
            values="fp32", indices="int32", device=settings.device,
        )  # fmt: skip
        return [cell | {"row": row} for row in bench_step(job, cell["ranks"], lambda text: None)]
    if part == "table":
        fitted, rows = paper.fit_and_compare()
        constants = {"rate": fitted.rate, "step": fitted.step, **fitted.select}
        return [
            {"what": part, "constants": constants, "error": row.error, **vars(row)} for row in rows
        ]
    return [row for workers in WORKERS for row in _predicted_rows(part, workers)]


def _predicted_rows(name: str, workers: int) -> list[StudyRow]:
    """Return a row per way for a network of the paper, or for "70B"."""
    if name == "70B":
        device = find_machine("h100")
        load = by_count(LARGE, LARGE_SECONDS)
        network = Network(workers, workers, link_rate(LARGE_LINK), LARGE_LATENCY)
    else:
        device = find_machine(GPU)
        load = workload_by_name(name, device, None, paper.compute_seconds(name))
        network = Network(workers, workers // LOCAL, link_rate(LINK))
    ways = [w.name for w in WAYS if w.exchange]
    kinds = [("bf16", "packed"), ("bf16", "int32")]
    question = Question(ways, 0.001, encodings=kinds)
    others = [*torch_ways(load, network, ways), *(LARGE_WAYS if name == "70B" else ())]
    predictions = plan_for(load, device, network, question, others).predictions
    return [
        {"what": name, "workers": workers, "way": p.way.name, "seconds": p.seconds,
         "compute": p.compute, "bytes": p.bytes}
        for p in predictions
        if p.way in (*WAYS, *LARGE_WAYS)
    ]  # fmt: skip


def page(rows: Sequence[StudyRow]) -> Page:
    """Show both tables side by side, and a chart per network of seconds against workers."""
    table = [row for row in rows if row["what"] == "table"]
    lab = [row["row"] for row in rows if row["what"] == "lab"]
    grown = [row for row in rows if row["what"] not in ("table", "lab")]
    tables, summary = [], ""
    if table:
        new = [abs(row["error"]) for row in table if not row["fitted"]]
        c = table[0]["constants"]
        summary = (
            f"Five constants fitted on AlexNet and ResNet-50 predict VGG-16 and Inception-V4 of "
            f"Table 2 within {100 * max(new):.0f} %: a link of {8e-9 * c['rate']:.1f} Gbit/s, "
            f"{1e3 * c['step']:.0f} ms a step, and {c['topk']:.1f}, {c['dgc']:.1f} and "
            f"{c['gaussiank']:.1f} ns an entry for topk, dgc and gaussiank. "
        )
        tables.append(_paper_table(table))
    if lab:
        tables.append(_lab_table(lab))
        errors = [abs(step.error) for step in compare_rows(lab)]
        summary += f"In the lab {sum(e <= 0.15 for e in errors)} of {len(errors)} steps are within "
        summary += "15 % of the planner. "
    summary += "Everything else here is computed by the planner, not measured."
    names = dict.fromkeys(row["what"] for row in grown)
    charts = [_growth_chart(name, [r for r in grown if r["what"] == name]) for name in names]
    return Page(summary, tables, charts)


def _paper_table(rows: Sequence[StudyRow]) -> StudyTable:
    body = []
    for model in paper.TABLE:
        by_method = {row["method"]: row for row in rows if row["model"] == model}
        in_order = [by_method[method] for method in paper.METHODS]
        cells = [f"{r['paper']:.3f} / {r['predicted']:.3f} ({r['error']:+.1%})" for r in in_order]
        body.append([model, "fitted" if by_method["dense"]["fitted"] else "predicted", *cells])
    note = "The paper's seconds an iteration / ours (error). 16 V100, 4 nodes, 10 GbE, k = 0.001 d."
    return StudyTable("Table 2", ["", "", *paper.METHODS], body, note)


def _lab_table(rows: Sequence[StudyRow]) -> StudyTable:
    """Return the table of measured steps, with the planner's predictions."""
    body = []
    for c in compare_rows(rows):
        noop = next(r["noop_seconds"] for r in rows if r["model"] == c.model)
        times = f"{1e3 * c.measured:.4g}", f"{1e3 * c.prediction.seconds:.4g}", f"{c.error:+.1%}"
        seconds = paper.TABLE[c.model][0][paper.METHODS.index(c.method)]
        theirs = f"{seconds / paper.compute_seconds(c.model):.2f}"
        body.append([c.model, c.method, *times, f"{c.measured / noop:.2f}", theirs])
    note = f"{RANKS} ranks on one device, a link of {LINK} each, batch {BATCH}, fp32, k = 0.001 d: "
    note += "medians. Over computing: the step over one that sends nothing; the paper's is of 16 "
    note += "V100, four on a link."
    columns = ["", "method", "measured, ms", "planner, ms", "error", "over computing", "paper"]
    return StudyTable("Measured in the lab", columns, body, note)


def _growth_chart(name: str, rows: Sequence[StudyRow]) -> Chart:
    lines = []
    for way in (*WAYS, *LARGE_WAYS):
        found = (row for row in rows if row["way"] == way.name)
        points = sorted((row["workers"], row["seconds"]) for row in found)
        if points:
            xs, ys = zip(*points, strict=True)
            lines.append(Line(way.label, xs, ys, "dots"))
    counts = sorted({row["workers"] for row in rows})
    alone = [rows[0]["compute"]] * len(counts)
    lines.append(Line("computing alone", counts, alone, "dashes", GREY))
    setting = f"{LINK}, nodes of {LOCAL} {GPU}"
    if name == "70B":
        setting = f"{LARGE_LINK} and 20 ms between regions"
    caption = f"{name}, {setting}, density 0.1 %: seconds per step, predicted"
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
