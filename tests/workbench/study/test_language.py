import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from gradwire.errors import ConfigError
from gradwire.workbench.data import DataError
from gradwire.workbench.simulate.language_run import rate_factor
from gradwire.workbench.study.language import cells, choices, page
from gradwire.workbench.study.language.recipes import RATES, RECIPES
from gradwire.workbench.study.study import Settings

TINY = {"model": "gpt-tiny", "width": "32", "depth": "1", "tokens": "1024", "workers": "2"}


def settings(**chosen):
    return Settings(small=True, chosen=TINY | chosen)


def trained(**chosen):
    """The rows of one run of a tiny network."""
    chosen = {"lr": "0.01", "steps": "8", "recipe": "muon"} | chosen
    (cell,) = choices.list_cells(settings(**chosen))
    return cells.measure(settings(), cell)


def test_every_choice_is_free_and_lists_are_combined():
    found = choices.list_cells(
        Settings(seed=3, seeds=2, chosen=TINY | {"recipe": "muon,diloco", "lr": "0.1,0.2"})
    )
    assert len(found) == 8
    assert {(c["recipe"], c["lr"], c["seed"]) for c in found} == {
        (recipe, lr, seed) for recipe in ("muon", "diloco") for lr in (0.1, 0.2) for seed in (3, 4)
    }
    assert all(c["width"] == 32 and c["steps"] == 700 and c["data"] == "books" for c in found)


def test_without_choices_it_is_the_grid_of_all_recipes():
    found = choices.list_cells(Settings())
    assert {c["recipe"] for c in found} == set(RECIPES)
    for name, recipe in RECIPES.items():
        assert [c["lr"] for c in found if c["recipe"] == name] == [*RATES[recipe.optimizer]]
    assert {(c["model"], c["workers"], c["width"]) for c in found} == {("gpt-11m", 4, 384)}


def test_every_is_of_recipes_with_rounds():
    found = choices.list_cells(settings(recipe="dense-muon,muon", every="7", lr="1"))
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
        choices.list_cells(settings(**chosen))


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
    rows = trained(recipe="muon-whole", every="2", steps="4")
    assert rows[0]["valid"] > 5, "nothing was exchanged after one step"
    assert rows[1]["valid"] == rows[2]["valid"] < rows[0]["valid"]


def test_a_run_repeats_and_goes_on_where_it_was_saved():
    cell = {"lr": "0.01", "steps": "4", "recipe": "muon", "every": "2"}
    (cell,) = choices.list_cells(settings(**cell))
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


KILLED = """
import sys
from tests.workbench.study.test_language import settings
from gradwire.workbench.study import unfinished
from gradwire.workbench.study.language import cells, choices
from dataclasses import replace
unfinished.PAUSE, unfinished.SAVE_SHARE = 0.0, 1e9
(cell,) = choices.list_cells(settings(**{chosen}))
cells.measure(replace(settings(), unfinished=sys.argv[1]), cell)
"""


def test_a_run_that_was_killed_goes_on_between_two_evaluations(tmp_path, capsys):
    """A run of 8 steps has a row after every second; it is killed once step 3 is saved."""
    chosen = {"lr": "0.01", "steps": "8", "recipe": "muon", "every": "2", "back": "int4"}
    (cell,) = choices.list_cells(settings(**chosen))
    program = [sys.executable, "-c", KILLED.format(chosen=chosen), str(tmp_path)]
    with subprocess.Popen(program, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "step 3 of 8" in line:
                process.send_signal(signal.SIGKILL)
                break
    assert process.wait() == -signal.SIGKILL
    resumed = cells.measure(replace(settings(), unfinished=str(tmp_path)), cell)
    assert re.search(r"goes on after step [3-7] of 8", capsys.readouterr().err)
    whole = cells.measure(settings(), cell)
    times = {"seconds": 0, "memory": 0}
    assert [line | times for line in resumed] == [line | times for line in whole]


def test_a_run_that_diverges_ends_at_once(monkeypatch):
    monkeypatch.setattr(cells.LanguageRun, "score", lambda *given: float("nan"))
    rows = trained(recipe="dense-adamw")
    assert len(rows) == 1
    assert rows[0]["step"] == 2
    assert rows[0]["test"] == float("inf")


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


def table(found):
    """The first table of the page, as a dictionary by recipe and column."""
    result = page.make_page(found).tables[0]
    return {line[0]: dict(zip(page.COLUMNS, line, strict=True)) for line in result.rows}


def test_the_page_takes_each_recipe_at_its_best_rate():
    found = [row("dense-adamw", lr, loss, 1000) for lr, loss in ((1, 2.2), (2, 2.0), (4, 2.1))]
    found += [row("dense-muon", 4, 1.9, 1000)]
    found += [row("muon", 4, 1.901, 20), row("muon", 8, 1.95, 20), row("muon-wan", 4, 1.95, 2)]
    summary = page.make_page(found).summary
    assert "muon-wan sends 500 times fewer bytes and ends at a test loss of 1.9500" in summary
    assert "-2.5 % of dense-adamw" in summary
    assert "muon sends 50 times fewer bytes and ends at a test loss of 1.9010" in summary
    body = table(found)
    assert [*body][:4] == ["dense-muon", "muon", "muon-wan", "dense-adamw"]
    adamw, muon = body["dense-adamw"], body["muon"]
    assert adamw["lr"] == "2"
    assert adamw["note"] == ""
    assert (adamw["valid at half the lr"], adamw["valid at twice the lr"]) == ("2.1000", "2.0000")
    assert muon["note"] == "not tuned: lr 2 not run (--extend)"
    assert muon["valid at half the lr"] == "not run"
    assert (muon["against dense-adamw"], muon["against dense-muon"]) == ("-4.9 %", "+0.1 %")
    assert muon["fewer bytes"] == "50x"
    assert muon["bits per round"] == f"{64 * 5 / 50:.3g}"
    command = "gradwire study language --model gpt-11m --workers 4 --recipe muon --lr 4"
    assert muon["command"] == f"{command} --seed 0 --seeds 1"


def test_what_was_not_run_is_a_row_that_says_so():
    body = table([row("muon", 4, 1.9)])
    assert set(body) == set(RECIPES)
    assert {name for name, line in body.items() if line["note"] == "not run"} == {*RECIPES} - {
        "muon"
    }


def test_the_page_takes_the_mean_over_seeds():
    found = [row("muon", 4, 1.9, seed=0), row("muon", 4, 2.1, seed=1)]
    found += [row("muon", 8, 1.99), row("muon", 8, 2.03, seed=1)]
    line = table(found)["muon"]
    assert line["lr"] == "4"
    assert line["test"] == "2.0000, 1.9000 to 2.1000"
    assert line["seeds"] == "0, 1"


def test_a_rate_with_more_seeds_is_compared_by_the_seeds_that_all_have():
    """The other seeds of --extend run at the best rate only."""
    found = [row("muon", 4, 1.9), row("muon", 8, 1.95), row("muon", 4, 2.1, seed=1)]
    line = table(found)["muon"]
    assert (line["lr"], line["seeds"]) == ("4", "0, 1")


def test_a_run_that_diverged_is_worse_than_any():
    found = [row("muon", 8, float("nan")), row("muon", 4, 1.9), row("muon", 2, float("inf"))]
    line = table(found)["muon"]
    assert line["valid at half the lr"] == line["valid at twice the lr"] == "diverged"
    assert (line["lr"], line["note"]) == ("4", "")


def test_changes_are_contenders_and_tasks_have_their_own_tables():
    found = [row("muon", 4, 1.9), row("muon", 4, 1.95, every=15, decay=0.9)]
    found += [row("muon", 4, 1.8, workers=8), row("muon", 4, 1.7, text="another")]
    result = page.make_page(found)
    names = [[line[0] for line in table.rows if line[-2] != "not run"] for table in result.tables]
    assert names == [["muon", "muon, H = 15, decay 0.9"], ["muon"], ["muon"]]
    assert "--every 15 --decay 0.9" in result.tables[0].rows[1][-1]
    assert len({chart.name for chart in result.charts}) == 3


def test_losses_far_above_the_lowest_are_named_and_not_drawn():
    (chart,) = page.make_page([row("muon", 4, 1.2), row("topk-adamw", 4, 2.5)]).charts
    assert [line.label for line in chart.lines] == ["muon"]
    assert "topk-adamw 2.500" in chart.x


def test_extend_goes_on_until_the_best_rate_has_a_worse_one_on_both_sides():
    settings = Settings(chosen={"recipe": "muon"}, extend=True, seeds=3)
    loss = {0.002: 1.5, 0.004: 1.3, 0.008: 1.2, 0.016: 1.1, 0.032: 1.15}
    rows, todo, runs = [], choices.list_cells(settings), []
    assert [cell["lr"] for cell in todo] == [0.004, 0.008, 0.016]
    while todo:
        runs += [(cell["lr"], cell["seed"]) for cell in todo]
        rows += [row("muon", c["lr"], loss[c["lr"]]) | c for c in todo]
        todo = [c for c in cells.more_cells(settings, rows) if (c["lr"], c["seed"]) not in runs]
    assert runs[3:] == [(0.032, 0), (0.016, 1), (0.016, 2)]
    assert table(rows)["muon"]["note"] == ""


def test_extend_begins_at_given_rates_and_is_of_each_line_apart():
    chosen = {"recipe": "muon,muon-wan", "lr": "0.008", "workers": "4,8"}
    settings = Settings(chosen=chosen, extend=True)
    rows = [row("muon", 0.008, 1.2) | c for c in choices.list_cells(settings)[:1]]
    more = cells.more_cells(settings, rows)
    assert [(c["recipe"], c["workers"], c["lr"]) for c in more] == [
        ("muon", 4, 0.004),
        ("muon", 4, 0.016),
    ]
    assert cells.more_cells(Settings(chosen=chosen), rows) == []
    # Nothing is asked beside a run that is on its way, of this line only.
    wan = rows[0] | {"recipe": "muon-wan", "every": 30}
    assert cells.more_cells(settings, rows, [wan]) == more
    assert cells.more_cells(settings, rows, [more[0]]) == []


def test_changes_of_a_recipe():
    chosen = {"recipe": "dense-muon,muon-whole-30", "lr": "1", "every": "15"}
    chosen |= {"decay": "0.9", "outer_momentum": "0,0.5", "back": "two-bit", "values": "two-bit"}
    dense, none, usual = choices.list_cells(Settings(chosen=chosen))
    assert {*choices.CHANGES}.isdisjoint(dense)
    assert none["outer_momentum"] == 0
    # 0.5 is what the recipe has.
    assert "outer_momentum" not in usual
    rounds = choices.cell_recipe(none).rounds
    expected = {"exchange": "owner", "options": {"back": "two-bit"}, "values": "two-bit"}
    expected |= {"every": 15, "decay": 0.9, "outer_momentum": 0.0, "method": "dense"}
    assert {name: rounds[name] for name in expected} == expected
    assert choices.cell_recipe(dense) is RECIPES["dense-muon"]


def test_a_rival_has_no_options_of_the_library():
    """Its `exchange` is its own; only what it has itself, `decay` here, can be changed."""
    chosen = {"recipe": "demo,sparseloco", "lr": "1", "exchange": "owner", "decay": "0.5"}
    demo, sparseloco = choices.list_cells(Settings(chosen=chosen))
    assert {*choices.CHANGES}.isdisjoint(demo)
    assert choices.cell_recipe(sparseloco).rounds["decay"] == 0.5
    assert "exchange" not in sparseloco


@pytest.mark.parametrize("recipe", [*RECIPES])
def test_extend_begins_inside_the_grid_of_gpt_11m(recipe):
    settings = Settings(chosen={"recipe": recipe}, extend=True)
    rates = [cell["lr"] for cell in choices.list_cells(settings)]
    grid = RATES[RECIPES[recipe].optimizer]
    assert len(rates) == 3
    assert rates[0] >= grid[0] / 2.01
    assert rates[-1] <= grid[-1] * 2.01


def test_a_changed_recipe_trains():
    chosen = {"recipe": "muon-whole", "every": "2", "steps": "4", "values": "two-bit"}
    rows = trained(**chosen, back="int4")
    assert rows[-1]["valid"] < 6
    # (2.1 + 4.1) / 2 bits of half of the parts, every two steps; short vectors travel whole.
    assert 1.5 < rows[-1]["bits"] < 2.5
