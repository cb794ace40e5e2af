import pytest
import torch

from gradwire.errors import ConfigError
from gradwire.workbench.data import DataError
from gradwire.workbench.simulate.language_run import rate_factor
from gradwire.workbench.study.language import cells, page
from gradwire.workbench.study.language.recipes import RATES, RECIPES
from gradwire.workbench.study.study import Settings

TINY = {"model": "gpt-tiny", "width": "32", "depth": "1", "tokens": "1024", "workers": "2"}


def settings(**chosen):
    return Settings(small=True, chosen=TINY | chosen)


def trained(**chosen):
    """The rows of one run of a tiny network."""
    chosen = {"lr": "0.01", "steps": "8", "recipe": "muon"} | chosen
    (cell,) = cells.list_cells(settings(**chosen))
    return cells.measure(settings(), cell)


def test_every_choice_is_free_and_lists_are_combined():
    found = cells.list_cells(
        Settings(seed=3, seeds=2, chosen=TINY | {"recipe": "muon,diloco", "lr": "0.1,0.2"})
    )
    assert len(found) == 8
    assert {(c["recipe"], c["lr"], c["seed"]) for c in found} == {
        (recipe, lr, seed) for recipe in ("muon", "diloco") for lr in (0.1, 0.2) for seed in (3, 4)
    }
    assert all(c["width"] == 32 and c["steps"] == 700 and c["data"] == "books" for c in found)


def test_without_choices_it_is_the_grid_of_all_recipes():
    found = cells.list_cells(Settings())
    assert {c["recipe"] for c in found} == set(RECIPES)
    for name, recipe in RECIPES.items():
        assert [c["lr"] for c in found if c["recipe"] == name] == [*RATES[recipe.optimizer]]
    assert {(c["model"], c["workers"], c["width"]) for c in found} == {("gpt-11m", 4, 384)}


def test_every_is_of_recipes_with_rounds():
    found = cells.list_cells(settings(recipe="dense-muon,muon", every="7", lr="1"))
    assert [c["every"] for c in found] == [1, 7]


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"recipe": "moun"}, "moun"),
        ({"lr": "fast"}, "--lr takes numbers, got 'fast'"),
        ({"workers": "0"}, "--workers must be above 0, got 0"),
    ],
)
def test_choices_that_cannot_be(chosen, words):
    with pytest.raises(ConfigError, match=words):
        cells.list_cells(settings(**chosen))


def test_tokens_are_whole_windows_and_there_must_be_enough():
    with pytest.raises(ConfigError, match=r"1,000 tokens per step are no whole number of windows"):
        trained(tokens="1000")
    with pytest.raises(DataError, match=r"novels has 5,344 windows of 128, 900 steps"):
        trained(steps="900")


@pytest.mark.parametrize("recipe", ["dense-adamw", "dense-muon", "topk-adamw"])
def test_gradients_train(recipe):
    rows = trained(recipe=recipe)
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert rows[-1]["valid"] < rows[0]["valid"] < 6
    assert abs(rows[-1]["test"] - rows[-1]["valid"]) < 0.5
    share = rows[-1]["bytes"] / rows[-1]["dense"]
    assert share < 0.1 if recipe == "topk-adamw" else share == pytest.approx(1, rel=0.01)
    assert rows[-1]["dense"] == 8 * 2 * 4 * rows[-1]["d"]


def test_rounds_train_and_say_what_they_sent():
    rows = trained(recipe="muon", every="2")
    assert rows[-1]["valid"] < rows[0]["valid"] < 6
    assert rows[0]["bytes"] * 4 == pytest.approx(rows[-1]["bytes"], rel=0.05)
    # Half of all entries as sign, every two steps: about 1.6 / 2 bits.
    assert 0.7 < rows[-1]["bits"] < 0.9


def test_the_shared_weights_are_scored():
    """After 3 of 4 steps the workers have moved on; the score is of the last exchange."""
    rows = trained(recipe="muon-5-whole", every="2", steps="4")
    assert rows[0]["valid"] > 5, "nothing was exchanged after one step"
    assert rows[1]["valid"] == rows[2]["valid"] < rows[0]["valid"]


def test_a_run_repeats_and_goes_on_where_it_was_saved():
    cell = {"lr": "0.01", "steps": "4", "recipe": "muon", "every": "2"}
    (cell,) = cells.list_cells(settings(**cell))
    device = torch.device("cpu")

    def opened():
        return cells._open(settings(), cell, device)

    whole, first, second = opened(), opened(), opened()
    losses = [float(whole.step()) for _ in range(4)]
    assert [float(first.step()) for _ in range(3)] == losses[:3]
    for _ in range(2):
        second.load_state_dict(first.state_dict())
    assert float(second.step()) == losses[3]
    assert second.score(second.text.test) == whole.score(whole.text.test)


def test_the_rate_rises_and_falls():
    factors = [rate_factor(step, 1000) for step in range(1000)]
    assert factors[0] == 0.01
    assert factors[99] == max(factors) == 1
    assert 0.1 < factors[-1] < 0.1001
    assert rate_factor(9, 40) == 1


def row(recipe, lr, test, sent=100, seed=0, **more):
    fixed = {"model": "gpt-11m", "width": 384, "depth": 6, "data": "books", "workers": 4}
    fixed |= {"tokens": 65536, "steps": 1500, "d": 11_000_000, "bits": 48 / 1000 * sent}
    fixed |= {"recipe": recipe, "every": RECIPES[recipe].rounds.get("every", 1), "lr": lr}
    fixed |= {"valid": test - 0.1, "test": test, "bytes": sent, "dense": 1000, "seed": seed}
    return fixed | {"seconds": 150.0, "memory": 2**30, "step": 1500, "loss": 1.0} | more


def test_the_page_takes_each_recipe_at_its_best_rate():
    found = [row("dense-adamw", lr, loss, 1000) for lr, loss in ((1, 2.2), (2, 2.0), (4, 2.1))]
    found += [row("dense-muon", 4, 1.9, 1000)]
    found += [row("muon", 4, 1.901, 20), row("muon", 8, 1.95, 20), row("muon-wan", 4, 1.95, 2)]
    result = page.make_page(found)
    assert (
        "muon-wan sends 500 times fewer bytes and ends at a test loss of 1.9500" in result.summary
    )
    assert "-2.5 % of dense-adamw" in result.summary
    assert "muon sends 50 times fewer bytes and ends at a test loss of 1.9010" in result.summary
    body = {line[0]: line[1:] for line in result.tables[0].rows}
    assert list(body) == ["dense-muon", "muon", "muon-wan", "dense-adamw"]
    assert body["dense-adamw"][0] == "2"
    assert body["muon"][0] == "4 (at the edge)"
    assert body["muon"][3:5] == ["-4.9 %", "+0.1 %"]
    assert body["muon"][6] == "50x"
    assert "Not run: muon-5-whole" in result.tables[0].note
    assert all(name not in result.tables[0].note for name in ("Not run: muon,", "muon-wan,"))


def test_the_page_takes_the_mean_over_seeds():
    found = [row("muon", 4, 1.9, seed=0), row("muon", 4, 2.1, seed=1), row("muon", 8, 1.99)]
    body = page.make_page(found).tables[0].rows
    assert body[0][1] == "8 (at the edge)"
    found += [row("muon", 8, 2.03, seed=1)]
    line = page.make_page(found).tables[0].rows[0]
    assert line[1] == "4 (at the edge)"
    assert line[3] == "2.0000 (1.9000 to 2.1000)"
    assert line[-2] == "0, 1"


def test_other_rounds_are_other_recipes_and_tasks_have_their_own_tables():
    found = [row("muon", 4, 1.9), row("muon", 4, 1.95, every=15), row("muon", 4, 1.8, workers=8)]
    result = page.make_page(found)
    assert [[line[0] for line in table.rows] for table in result.tables] == [
        ["muon", "muon, H = 15"],
        ["muon"],
    ]
    assert len(result.charts) == 2
    assert len({chart.name for chart in result.charts}) == 2
