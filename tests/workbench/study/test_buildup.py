import pytest

from gradwire.workbench.study import buildup
from gradwire.workbench.study.study import Settings, is_registered

SMALL = Settings(small=True)


def run(recipe, workers, steps=3):
    cell = {"model": "fnn3", "recipe": recipe, "workers": workers, "steps": steps}
    return buildup.measure(SMALL, cell)


@pytest.fixture(scope="module")
def rows():
    return [*run("topk/allgather", 2), *run("topk/allgather", 4), *run("topk/gtopk", 4)]


def test_a_worker_sends_k_and_the_update_has_up_to_p_times_as_many(rows):
    for row in rows:
        assert row["k"] == 199
        if row["recipe"] == "topk/gtopk":
            assert row["union"] <= 1
        else:
            assert row["sent"] == pytest.approx(1)
            assert 1 < row["union"] <= row["workers"]
    assert [row["step"] for row in rows] == [1, 2, 3] * 3


def test_the_page_has_the_union_by_workers(rows):
    page = buildup.page(rows)
    table = {row[0]: row[1:] for row in page.tables[0].rows}
    assert table["nothing in common"][:2] == ["2.00", "3.99"]
    assert 1 < float(table["topk/allgather"][0]) < float(table["topk/allgather"][1]) < 4
    assert table["topk/gtopk"][0] == ""
    assert "4 workers, k = 0.001 d: the update has topk/allgather" in page.summary
    assert table["topk/allgather"][-2] == "1.00 to 1.00"
    names = ["workers", "union-steps", "sent-steps", "choosing"]
    assert [chart.name for chart in page.charts] == names
    union, sent, choosing = page.charts[1:]
    assert union.lines[0].ys == [r["union"] for r in rows[3:6]]
    assert sent.lines[0].ys == pytest.approx([1, 1, 1])
    shares = [100 * rows[i]["compress"] for i in (2, 5)]
    assert choosing.lines[0].ys == pytest.approx(shares)
    assert shares[0] > 0


def test_choices_without_anything_in_common():
    assert buildup.independent_union(16) == pytest.approx(15.88, abs=0.01)
    assert buildup.independent_union(32) == pytest.approx(31.51, abs=0.01)


def test_only_what_this_version_has_is_asked_for():
    recipes = {cell["recipe"] for cell in buildup.cells(SMALL)}
    assert {"topk/allgather", "topk/union", "topk/gtopk"} <= recipes
    assert all(map(is_registered, recipes))
    assert not is_registered("nothing")
    assert not is_registered("topk/nothing")
