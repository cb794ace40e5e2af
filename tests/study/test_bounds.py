import pytest

from gradwire.study import bounds, distributions, theory
from gradwire.study.study import Settings

SMALL = Settings(small=True)


@pytest.fixture(scope="module")
def rows():
    return [bounds.measure(SMALL, {"u": name})[0] for name in bounds.MADE]


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
    assert "fails for clipped normal and near a constant" in page.says
    assert "On u of lenet5 it holds" in page.says
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
    page = distributions.page(rows)
    assert len(page.charts) == 1
    assert page.charts[0].caption == "Figure 2: lstm-ptb, topk, by iteration"
    assert page.tables[0].rows[0][:2] == ["lstm-ptb, topk", "4"]
    assert "of 2 histograms" in page.says


def test_every_model_of_table_1_is_in_the_distributions():
    wanted = {"fnn3", "lenet5", "resnet20", "vgg16-cifar", "lstm-ptb", "lstm-an4"}
    cells = distributions.cells(Settings())
    assert {c["model"] for c in cells} == wanted
    assert {(c["every"], c["last"], c["workers"]) for c in cells} == {(200, 1600, 16)}
