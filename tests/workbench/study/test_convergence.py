import pytest

from gradwire.compress import METHODS
from gradwire.workbench.study import convergence, operators
from gradwire.workbench.study.study import Settings
from gradwire.workbench.train.options import resolve

SMALL = Settings(small=True)


def rows(recipe, seed, scores, model="fnn3", sent=10):
    fixed = {"model": model, "recipe": recipe, "seed": seed, "epochs": len(scores), "d": 100}
    fixed |= {"residual_bytes": 6400, "task": "classify", "loss": 1.0}
    return [
        fixed | {"epoch": i, "score": score, "bytes": i * sent}
        for i, score in enumerate(scores, start=1)
    ]


def test_the_page_pairs_the_seeds():
    page = convergence.page(
        rows("dense", 0, [0.5, 0.90], sent=1000)
        + rows("topk/allgather", 0, [0.4, 0.89])
        + rows("randk/allgather", 0, [0.1, 0.20])
        + rows("dense", 1, [0.5, 0.92], sent=1000)
        + rows("topk/allgather", 1, [0.4, 0.90])
        + rows("randk/allgather", 1, [0.1, 0.10])
    )
    table = {row[0]: row[1:] for row in page.tables[0].rows}
    topk = ["89.5 %", "89.0 % to 90.0 %", "-1.5 points +- 0.7 points", "-0.6 to -0.8 points"]
    assert table["topk/allgather"] == [*topk, "20 B", "100x fewer"]
    assert table["dense"][:3] == ["91.0 %", "90.0 % to 92.0 %", ""]
    assert "topk/allgather (-1.5 points) comes closest to dense" in page.summary
    assert "randk/allgather (-76.0 points) stays farthest" in page.summary
    assert [chart.name for chart in page.charts] == ["fnn3-2-epoch", "fnn3-2-bytes"]
    assert page.charts[0].lines[1].ys == pytest.approx([40, 89.5])


def test_lower_perplexity_is_closer():
    page = convergence.page(
        rows("dense", 0, [80.0], "lstm-ptb")
        + rows("topk/allgather", 0, [82.0], "lstm-ptb")
        + rows("randk/allgather", 0, [300.0], "lstm-ptb")
    )
    assert "topk/allgather (+2.00) comes closest" in page.summary
    assert "randk/allgather (+220.00) stays farthest" in page.summary


def test_a_study_that_was_stopped_before_the_first_pair_says_so():
    page = convergence.page(rows("dense", 0, [0.5]))
    assert "fnn3, 1 epochs, has no pair of runs yet" in page.summary


def test_runs_of_two_lengths_are_not_one_run():
    short = rows("dense", 0, [0.5]) + rows("topk/union", 0, [0.4])
    long = rows("topk/union", 0, [0.4, 0.8]) + rows("dense", 0, [0.5, 0.9])
    page = convergence.page(long + short)
    names = [f"fnn3-{epochs}-{x}" for epochs in (2, 1) for x in ("epoch", "bytes")]
    assert [chart.name for chart in page.charts] == names
    assert [table.title for table in page.tables] == ["fnn3 after 2 epochs", "fnn3 after 1 epochs"]
    assert [line.ys for line in page.charts[0].lines] == [pytest.approx([50, 90]), [40, 80]]
    assert "1 epochs, k = 0.001 d, 16 workers: topk/union (-10.0 points)" in page.summary


def test_a_recipe_has_its_place_and_colour_whoever_was_ready_first():
    names = ["topk/gs-sgd", "topk/union", "dense"]
    both = convergence.page([row for name in names for row in rows(name, 0, [0.5])]).charts[0]
    assert [line.label for line in both.lines] == names[::-1]
    alone = convergence.page(rows("topk/union", 0, [0.5])).charts[0]
    assert alone.lines[0].colour == both.lines[1].colour != both.lines[2].colour


def test_a_run_gives_a_row_an_epoch(monkeypatch):
    monkeypatch.setitem(convergence.SMALL, "fnn3", {"epochs": 9, "batch": 100, "lr": 0.1})
    cell = {"model": "fnn3", "recipe": "topk/union", "seed": 1, "epochs": 2}
    found = convergence.measure(SMALL, cell)
    assert [row["epoch"] for row in found] == [1, 2]
    assert found[0]["bytes"] * 2 == found[1]["bytes"] > 0
    assert found[0]["residual_bytes"] == 16 * 4 * 199_210
    assert found[0]["activations"] == "fp32"
    assert found == convergence.measure(SMALL, cell)


def test_only_a_network_that_can_has_its_workers_in_one_batch(monkeypatch):
    class Asked(Exception):
        pass

    def simulation(options, data, batched):
        raise Asked(options.model, batched)

    monkeypatch.setattr(convergence, "Simulation", simulation)
    monkeypatch.setattr(convergence, "load_examples", lambda options: None)
    asked = {}
    for model in convergence.RUNS:
        cell = {"model": model, "recipe": "dense", "seed": 0, "epochs": 1}
        with pytest.raises(Asked) as given:
            convergence.measure(Settings(data_dir="data"), cell)
        asked |= dict([given.value.args])
    assert [model for model, batched in asked.items() if batched] == ["resnet20"]
    assert set(asked) == set(convergence.RUNS)


def test_the_page_says_which_activations():
    old = rows("dense", 0, [0.9])
    new = [row | {"activations": "bf16"} for row in rows("dense", 1, [0.9])]
    assert "Activations: fp32. " in convergence.page(old).tables[0].note
    assert "Activations: bf16 and fp32. " in convergence.page(old + new).tables[0].note


def test_only_what_this_version_has_is_asked_for():
    recipes = {cell["recipe"] for cell in convergence.cells(SMALL)}
    assert {"dense", "topk/allgather", "topk/union", "topk/gtopk", "randk/allgather"} <= recipes
    assert all(recipe.partition("/")[0] in METHODS for recipe in recipes)
    full = convergence.cells(Settings())
    assert {c["model"] for c in full} == {"resnet20", "vgg16-cifar", "lstm-ptb", "lstm-an4"}


def test_operators_measures_the_floor_torch_and_every_method(monkeypatch):
    # One bundle: each of them has to learn its threshold.
    monkeypatch.setattr("gradwire.workbench.bench.compress.ROTATED_BYTES", 1)
    found = operators.measure(SMALL, {"millions": 1})
    assert {row["method"] for row in found} == {
        "floor",
        "torch.topk",
        *METHODS,
        *operators.AS_PUBLISHED,
    }
    page = operators.page(found)
    table = {row[0]: row for row in page.tables[0].rows}
    assert table["torch.topk"][3] == "13.6"
    assert float(table["floor"][4]) == 1
    assert table["topk"][5] == "1.000"
    assert "At 1 M entries" in page.summary
    assert len(page.charts[0].lines) == len(found)


def test_a_seed_that_dense_does_not_have_yet_makes_no_pair():
    done = rows("dense", 0, [0.5]) + rows("topk/allgather", 0, [0.4])
    page = convergence.page(done + rows("topk/allgather", 1, [0.9]))
    assert "topk/allgather (-10.0 points) comes closest" in page.summary
    seeds = {row[0]: row[2] for row in page.tables[0].rows}
    assert seeds["dense"] == "50.0 % to 50.0 %, 1 of them"
    assert seeds["topk/allgather"] == "40.0 % to 90.0 %"
    assert page.tables[0].note.startswith("2 seeds, ")


def test_a_small_study_has_one_sketch_and_a_whole_one_both():
    for settings, seeds in ((SMALL, [0]), (Settings(), [0, 1, 2])):
        cells = [c for c in convergence.cells(settings) if c["model"] in ("fnn3", "resnet20")]
        found = {n: [c["seed"] for c in cells if c["recipe"] == n] for n in convergence.SLOW}
        assert found == {"topk/sketched": [] if settings.small else seeds, "topk/gs-sgd": seeds}


def test_convergence_has_all_that_the_papers_compare():
    options = {}
    for name in convergence.RECIPES:
        given = {"model": "fnn3", "method": name.partition(" ")[0], "workers": 2}
        options[name] = resolve(given | convergence.RECIPES[name]).config()
    assert {c.method for c in options.values()} == {"dense", "topk", "randk", "gaussiank", "dgc"}
    assert {"gtopk", "sketched", "gs-sgd"} < {c.exchange for c in options.values()}
    assert options["dgc/allgather with momentum"].momentum == 0.9
    found = [c.bound_method.keeps_rest for c in options.values() if c.method == "randk"]
    assert found == [True, False]


def test_convergence_can_be_cut_down():
    cells = convergence.cells(Settings(seeds=1, epochs=7, seed=2))
    assert {(cell["seed"], cell["epochs"]) for cell in cells} == {(2, 7)}
    assert {c["epochs"] for c in convergence.cells(Settings())} == {120, 20, 40}
