import pytest
import torch

from gradwire.workbench.study import bounds, distributions, theory
from gradwire.workbench.study.study import Settings

SMALL = Settings(small=True)


@pytest.fixture(scope="module")
def rows():
    return [bounds.measure(SMALL, {"u": name})[0] for name in bounds.MADE_UP]


def test_the_bound_fails_where_it_must(rows):
    assert {r["u"]: all(r["holds"]) for r in rows} == {
        "normal": True,
        "Laplace": True,
        "t, 3 degrees": True,
        "clipped normal": False,
        "near a constant": False,
    }


def test_figure_5_as_it_was_published(rows):
    # What 100,000 normal entries gave: .98746, .91584, .56086 at k = 100, 1000, 10000.
    found = [rows[0]["errors"][bounds.SHARES.index(p)] for p in (1e-3, 1e-2, 0.1)]
    assert found == pytest.approx([0.98746, 0.91584, 0.56086], abs=3e-3)


def test_the_page_sets_the_paper_beside_ours(rows):
    real = bounds.measure(SMALL, {"u": "lenet5", "steps": 2})
    page = bounds.page([*rows, *real])
    assert "The bound fails for clipped normal and near a constant" in page.summary
    assert "On u of lenet5 the bound holds" in page.summary
    alone = bounds.page(real)
    assert alone.summary == "On u of lenet5 the bound holds at every k shown."
    assert len(alone.charts) == 4
    counts = {row[0]: row[1:] for row in page.tables[1].rows}
    assert counts["the paper: c^4 / (2c - 1)^2"] == ["250,250", "15,688", "2,525"]
    assert counts["normal, exact"] == ["6,204", "610", "140"]
    assert float(counts["u of lenet5, measured"][0].replace(",", "")) < 6_204
    assert [chart.name for chart in page.charts] == ["profile", "bounds", "bounds-real", "ratio"]


def test_small_and_full_ask_for_different_runs():
    assert len(bounds.cells(SMALL)) < len(bounds.cells(Settings()))


def test_distributions_of_a_short_run():
    cell = {"model": "lstm-ptb", "method": "topk", "workers": 2, "every": 2, "last": 4}
    rows = distributions.measure(SMALL, cell)
    assert [r["step"] for r in rows] == [2, 4]
    for row in rows:
        # What lies beyond ten deviations is in no bin.
        assert 0.98 < sum(row["histogram"]) * 20 / 81 <= 1.0001
        assert row["errors"][0] <= theory.random_error(1e-3)
        assert row["sent"] == pytest.approx(1, rel=0.02)
    page = distributions.page(rows)
    assert len(page.charts) == 1
    assert page.charts[0].caption == "Figure 2: lstm-ptb, topk, by iteration"
    assert page.tables[0].rows[0][:2] == ["lstm-ptb, topk", "4"]
    assert "normal is the likeliest in 0 of 2 with topk" in page.summary
    assert page.tables[0].rows[0][2] == "1"


def test_gaussiank_is_the_papers_and_not_top_k_by_another_name():
    cell = {"model": "lenet5", "workers": 2, "every": 1, "last": 2}
    topk, gaussian = (
        distributions.measure(SMALL, cell | {"method": name})[-1] for name in ("topk", "gaussiank")
    )
    assert topk["rms"] != gaussian["rms"]
    assert topk["sent"] == pytest.approx(1, rel=0.02)
    assert abs(gaussian["sent"] - 1) > 0.3


def test_every_model_of_table_1_is_in_the_distributions():
    wanted = {"fnn3", "lenet5", "resnet20", "vgg16-cifar", "lstm-ptb", "lstm-an4"}
    cells = distributions.cells(Settings())
    assert {c["model"] for c in cells} == wanted
    assert len(cells) == 18
    assert {(c["every"], c["last"], c["workers"]) for c in cells} == {(200, 1600, 4)}


def test_a_bin_counts_beyond_what_fp32_can():
    many = 2**24 + 3
    found = distributions.histogram(torch.zeros(many))
    assert found[40] * 20 / 81 == pytest.approx(1, abs=1e-9)
    assert sum(found) == found[40]


def test_what_is_beyond_the_edges_is_in_no_bin():
    found = distributions.histogram(torch.tensor([-10.1, -9.99, 0.0, 9.99, 10.1, float("inf")]))
    assert [i for i, x in enumerate(found) if x] == [0, 40, 80]
    assert sum(found) * 20 / 81 == pytest.approx(0.5)


def test_figure_5_has_both_closed_forms_and_what_was_measured(rows):
    lines = {line.label: line.ys for line in bounds.page(rows).charts[1].lines}
    assert len(lines) == 6
    at = bounds.SHARES.index(1e-3)
    for name in ("normal", "Laplace"):
        assert lines[f"{name}, measured"][at] == pytest.approx(
            lines[f"{name}, closed form"][at], abs=4e-3
        )
