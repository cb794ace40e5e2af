import pytest

from gradwire.workbench.study import adam, language, local_steps
from gradwire.workbench.study.language import LanguageRecipe
from gradwire.workbench.study.study import Settings

SMALL = Settings(small=True)


def rows(recipe, tests, sent, data="shakespeare", seed=0):
    fixed = {
        "model": "gpt-nano",
        "data": data,
        "recipe": recipe,
        "seed": seed,
        "d": 100,
        "loss": 1.0,
        "lr": 0.001,
    }
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
    assert "30 local steps: good sends at most 1/500 of the dense bytes" in page.summary
    body = {row[0]: row[1:] for row in page.tables[0].rows}
    assert body["good"] == ["0.001", "1.000", "2.030", "+1.5 %", "2.030", "1", "4 B", "500x fewer"]
    assert body["dense"][3] == body["dense"][-1] == ""
    assert page.charts[0].lines[1].ys == [3.0, 2.03]


def test_a_dense_run_that_overfits_is_taken_at_its_lowest():
    found = rows("dense", [2.0, 3.0], 1000)
    found += rows("far", [2.5, 2.1], 2) + rows("good", [2.03, 2.1], 2)
    assert "30 local steps: good sends" in local_steps.page(found).summary


def test_seeds_are_compared_in_pairs():
    """Only the seeds that dense has too; the mean of the pairs decides."""
    found = rows("dense", [2.0], 1000) + rows("dense", [4.0], 1000, seed=1)
    found += rows("a", [2.07], 2) + rows("a", [4.0], 2, seed=1) + rows("a", [9.0], 2, seed=2)
    page = local_steps.page(found)
    assert "30 local steps: a sends" in page.summary
    line = page.tables[0].rows[1]
    assert line[3:6] == ["5.023", "+1.7 % (+0.0 to +3.5)", "5.023"]
    assert page.charts[0].lines[0].ys == [3.0]


def test_adam_names_the_closest_and_the_farthest():
    page = adam.page(
        rows("dense", [2.0], 9) + rows("a", [2.1], 9) + rows("b", [2.5], 9) + rows("c", [2.2], 9)
    )
    assert "a (+5.0 %) comes closest to dense AdamW, b (+25.0 %) stays farthest" in page.summary
    assert "has no pair of runs yet" in adam.page(rows("a", [2.1], 9)).summary


@pytest.mark.parametrize("study", [local_steps, adam])
def test_every_cell_has_its_run(study):
    for settings in (SMALL, Settings(data_dir="x", seed=5)):
        cells = study.cells(settings)
        assert {cell["recipe"] for cell in cells} == set(study.RECIPES)
        assert all(not settings.small or cell["data"] == "phrases" for cell in cells)
        seeds = {cell["seed"] for cell in cells}
        assert seeds == {0} if settings.small else seeds == {5, 6, 7}


def follow(monkeypatch, recipe):
    """Four steps of a tiny network; virtual workers, so bytes are those of real ranks."""
    monkeypatch.setattr(language, "EVALUATIONS", 2)
    monkeypatch.setitem(language.BATCH, ("gpt-nano", "phrases"), 1)
    cell = {"model": "gpt-nano", "data": "phrases", "recipe": "", "seed": 0}
    found = list(language.train_rows(SMALL, cell, recipe, 4))
    assert [row["step"] for row in found] == [2, 4]
    assert found[1]["dense"] == 2 * found[0]["dense"] == 4 * 24 * found[0]["d"]
    assert all(3 < row["test"] < 5.5 for row in found)
    return found


def test_a_run_of_gradients(monkeypatch):
    found = follow(monkeypatch, LanguageRecipe(1e-3, options={"method": "topk", "density": 0.01}))
    assert found[1]["bytes"] == 2 * found[0]["bytes"] < found[1]["dense"] / 10


@pytest.mark.parametrize("keep", [False, True])
def test_a_run_of_local_steps_that_ends_with_a_flush(monkeypatch, keep):
    local = {"every": 2, "outer": "average", "density": 0.05, "values": "sign", "flush": True}
    recipe = LanguageRecipe(1e-3, options={"method": "dense"}, local=local | {"keep_unsent": keep})
    found = follow(monkeypatch, recipe)
    half = found[0]["bytes"]
    assert half < found[0]["dense"] / 50
    everything = (found[1]["bytes"] - half) / (24 * found[0]["d"])
    assert 1 <= everything < 1.02, "the last exchange sends all, slots padded"
