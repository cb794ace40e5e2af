import pytest

from gradwire.errors import LabError
from gradwire.workbench.study import scaling
from gradwire.workbench.study.study import Settings


def test_the_page_has_the_papers_table_and_a_chart_a_network(monkeypatch):
    monkeypatch.setattr(scaling, "WORKERS", (16, 64))
    settings = Settings(small=True)
    cells = scaling.cells(settings)
    assert cells[0] == {"what": "table"}
    wanted = [cell for cell in cells if cell["what"] in ("table", "alexnet", "70B")]
    rows = [row for cell in wanted for row in scaling.measure(settings, cell)]
    page = scaling.page(rows)
    assert "within 9 %" in page.summary
    assert "not measured" in page.summary
    (table,) = page.tables
    assert len(table.rows) == 4
    assert "2.068 / 2.115 (+2.3%)" in table.rows[1]
    assert [chart.name for chart in page.charts] == ["scaling-alexnet", "scaling-70B"]
    large = {line.label: line.ys for line in page.charts[1].lines}
    assert large["DDP, fp32 (PyTorch)"][0] > 50 * large["topk/gtopk"][0]
    # Twice the bytes for four times the workers would be a ring; all-gather sends four times.
    assert large["topk/allgather"][1] == pytest.approx(4.2 * large["topk/allgather"][0], rel=0.2)


def step_row(model, method, seconds, **more):
    """A row of `gradwire bench step --json`, as far as it is looked at."""
    row = {"model": model, "method": method, "exchange": "", "values": "fp32", "indices": "int32"}
    row |= {"density": 0.001, "bundle_bytes": None, "ranks": 4, "device": "NVIDIA H200", "cores": 8}
    row |= {"link": {"measured": 9.5e9}, "noop_seconds": 0.01, "seconds": {"median": seconds}}
    return {"what": "lab", "model": model, "ranks": 4, "row": row | more}


def test_the_lab_stands_beside_planner_and_paper():
    rows = [
        step_row("alexnet", "noop", 0.01),
        step_row("alexnet", "dense", 0.317),
        step_row("alexnet", "topk", 0.03, exchange="allgather", bundle_bytes=10**9),
    ]
    page = scaling.page(rows)
    (table,) = page.tables
    dense, topk = table.rows
    assert dense[:2] == ["alexnet", "dense"]
    assert dense[2] == "317"
    assert abs(float(dense[4].strip("%"))) < 15
    assert dense[5:] == ["31.70", "7.09"]
    assert topk[1] == "topk"
    assert topk[5:] == ["3.00", "11.07"]
    assert "of 2 steps are within 15 % of the planner" in page.summary


def test_only_the_full_study_asks_for_the_lab(monkeypatch):
    assert not any(c["what"] == "lab" for c in scaling.cells(Settings(small=True)))
    lab = [c for c in scaling.cells(Settings()) if c["what"] == "lab"]
    assert [c["model"] for c in lab] == ["alexnet", "vgg16", "resnet50", "inception-v4"]
    asked = []

    def refuse(job, ranks, say):
        asked.append((job.model, job.methods, job.link, ranks))
        raise LabError("the lab needs root")

    monkeypatch.setattr(scaling, "bench_step", refuse)
    with pytest.raises(LabError):
        scaling.measure(Settings(), lab[0])
    methods = ("noop", "dense", "topk", "dgc", "gaussiank")
    assert asked == [("alexnet", methods, "10gbit", 4)]
