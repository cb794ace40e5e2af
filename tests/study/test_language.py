import pytest

from gradwire.study import adam, language, local_steps
from gradwire.study.study import Settings

SMALL = Settings(small=True)


def rows(recipe, tests, sent, data="shakespeare"):
    fixed = {"data": data, "recipe": recipe, "seed": 0, "d": 100, "loss": 1.0}
    return [
        fixed | {"step": i, "tokens": 9 * i, "test": test, "bytes": i * sent, "dense": 1000 * i}
        for i, test in enumerate(tests, start=1)
    ]


def test_the_target_takes_both_few_bytes_and_the_loss():
    found = rows("dense", [3.0, 2.0], 1000)
    found += rows("good", [3.0, 2.03], 2)
    found += rows("far", [3.0, 2.05], 2)
    found += rows("long", [3.0, 2.0], 3)
    page = local_steps.page(found)
    assert "30 local steps: good sends at most 1/500 of the dense bytes" in page.says
    body = {row[0]: row[1:] for row in page.tables[0].rows}
    assert body["good"] == ["1.000", "2.030", "+1.5 %", "2.030", "4 B", "500x fewer"]
    assert body["dense"][2] == body["dense"][-1] == ""
    assert page.charts[0].lines[1].ys == [3.0, 2.03]


def test_adam_names_the_closest_and_the_farthest():
    page = adam.page(
        rows("dense", [2.0], 9) + rows("a", [2.1], 9) + rows("b", [2.5], 9) + rows("c", [2.2], 9)
    )
    assert "a (+5.0 %) comes closest to dense AdamW, b (+25.0 %) stays farthest" in page.says
    assert "has no pair of runs yet" in adam.page(rows("a", [2.1], 9)).says


def test_every_cell_has_its_run():
    for study, names in ((local_steps, local_steps.RECIPES), (adam, adam.RECIPES | adam.LOCAL)):
        for settings in (SMALL, Settings(data_dir="x")):
            cells = study.cells(settings)
            assert {cell["recipe"] for cell in cells} == set(names)
            assert all(not settings.small or cell["data"] == "phrases" for cell in cells)


@pytest.mark.parametrize("name", ["flush", "adam"])
def test_a_run_gives_a_row_a_look(name, monkeypatch):
    """Ten steps of a tiny network; virtual workers, so bytes are those of real ranks."""
    monkeypatch.setattr(language, "LOOKS", 2)
    monkeypatch.setitem(language.SMALL, "batch", 1)
    cell = {"data": "phrases", "recipe": name, "seed": 0}
    options = language.options_of(SMALL, cell, method="topk", density=0.01)
    local = {"every": 2, "outer": "average", "density": 0.05, "flush": True}
    found = list(language.follow(SMALL, cell, options, 4, local if name == "flush" else None))
    assert [row["step"] for row in found] == [2, 4]
    assert found[1]["dense"] == 2 * found[0]["dense"] == 4 * 24 * found[0]["d"]
    if name == "flush":
        half = found[0]["bytes"]
        assert half < found[0]["dense"] / 50
        everything = (found[1]["bytes"] - half) / (24 * found[0]["d"])
        assert 1 <= everything < 1.02, "the last exchange sends all, slots padded"
    else:
        assert found[1]["bytes"] == 2 * found[0]["bytes"] < found[1]["dense"] / 10
    assert all(3 < row["test"] < 5.5 for row in found)
