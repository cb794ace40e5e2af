import math

import pytest

from gradwire.accumulate.schedule import entry_count
from gradwire.encode import Encoding
from gradwire.exchange import EXCHANGES
from gradwire.integrate.virtual_cluster import VirtualCluster
from gradwire.recipes import RECIPES
from gradwire.workbench.study import accuracy
from gradwire.workbench.study.accuracy_page import page, upper_limit
from gradwire.workbench.study.study import Settings
from gradwire.workbench.train.options import cosine_factor, resolve

SMALL = Settings(small=True)


def rows(recipe, seed, scores, share=0.002, sent=3, epochs=2):
    fixed = {"model": "fnn3", "recipe": recipe, "seed": seed, "epochs": epochs, "d": 1000}
    fixed |= {"residual_bytes": 6400, "loss": 1.0}
    return [
        fixed
        | {"epoch": i, "score": score, "bytes": i * sent, "dense": 100 * i, "steps": 10 * i}
        | {"entries": share * 1000 * 10 * i}
        for i, score in enumerate(scores, start=1)
    ]


def pairs(recipe, lost, share=0.002):
    """Runs that end so many points below dense."""
    found = []
    for seed, points in enumerate(lost):
        found += rows("dense", seed, [0.5, 0.9], 1.0, 100)
        found += rows(recipe, seed, [0.5, 0.9 - points / 100], share)
    return found


def test_the_limit_is_students():
    lost = [0.0, 0.1, 0.2, 0.3, 0.0, 0.1, 0.2, 0.3]
    spread = math.sqrt(sum((x - 0.15) ** 2 for x in lost) / 7)
    assert upper_limit(lost) == pytest.approx(0.15 + 1.895 * spread / math.sqrt(8))
    assert upper_limit([0.1]) == math.inf
    assert upper_limit([0.0, 1.0] * 50) < 0.7


def test_the_target_takes_entries_mean_limit_and_seeds():
    cases = {
        "good": pairs("good", [0.0, 0.1] * 4),
        "none": pairs("many", [0.0, 0.1] * 4, share=0.0021)
        + pairs("some", [0.0, 0.1] * 3)
        + pairs("low", [0.1, 0.2] * 4)
        + pairs("wide", [-1.0, 1.1] * 4),
    }
    for name, found in cases.items():
        assert f"is reached by {name}." in page(found).summary
    assert "many comes closest" not in page(cases["none"]).summary


def test_the_table_pairs_the_seeds():
    found = pairs("a", [0.1, 0.3]) + rows("a", 5, [0.1, 0.2])
    body = {row[0]: row[1:] for row in page(found).tables[0].rows}
    assert body["dense"][:5] == ["90.00", "90.00 to 90.00", "2", "", ""]
    assert body["a"][2:5] == ["3", "-0.20 +- 0.14", "0.83"]
    assert body["a"][5:] == ["0.2 %", "3 %", "6 B"]


def test_a_dense_run_with_more_rate_and_decay_stands_beside_dense():
    tuned = [
        row
        for name, score in (("dense-plain", 0.9), ("dense-2-2", 0.905), ("dense-1.5-3", 0.89))
        for seed in (0, 1)
        for row in rows(name, seed, [0.5, score], 1.0, 100)
    ]
    tuned += rows("dense-lucky", 0, [0.5, 0.99], 1.0, 100)
    found = page(pairs("a", [-0.2, -0.4]) + tuned)
    assert "Against dense-2-2 a ends at -0.20 +- 0.14, at most 0.83 lost." in found.summary
    columns = found.tables[0].columns
    body = {row[0]: dict(zip(columns, row, strict=True)) for row in found.tables[0].rows}
    told = [body[name]["points against dense-2-2"] for name in ("dense", "dense-2-2", "a")]
    assert told == ["-0.50 +- 0.00", "", "-0.20 +- 0.14"]
    assert body["a"]["most lost against dense-2-2"] == "0.83"
    assert body["a"]["points against dense"] == "+0.30 +- 0.14"
    alone = page(pairs("a", [0.1]))
    assert "dense-2-2" not in alone.summary
    assert "points against dense-2-2" not in alone.tables[0].columns


def test_tuned_dense_alone_is_what_recipes_are_compared_with():
    found = [row for row in pairs("a", [0.0, 0.1] * 4) if row["recipe"] == "a"]
    found += [r for seed in range(8) for r in rows("dense-2-2", seed, [0.5, 0.9], 1.0, 100)]
    told = page(found)
    assert "a comes closest to dense-2-2 (-0.05 points)" in told.summary
    assert "is reached by a." in told.summary
    assert "points against dense" not in told.tables[0].columns
    assert "points against dense-2-2" in told.tables[0].columns


def test_every_seed_ends_somewhere_and_the_mean_goes_there():
    ends, way = page(pairs("a", [1.0, 3.0])).charts
    assert [(line.label, line.ys) for line in ends.lines] == [
        ("dense", pytest.approx([90, 90])),
        ("a", pytest.approx([89, 87])),
    ]
    assert [list(line.xs) for line in ends.lines] == [[100, 100], [3, 3]]
    assert way.lines[1].ys == pytest.approx([50, 88])
    assert ends.name != way.name


def test_rows_may_come_in_any_order():
    found = pairs("a", [0.1, 0.3, 0.2])
    assert page(found) == page(sorted(found, key=lambda r: (r["recipe"] == "dense", -r["epoch"])))


def test_a_study_without_a_pair_says_so():
    assert "no pair of runs within 0.2 % yet" in page(rows("a", 0, [0.5])).summary


def test_cells_are_chosen_by_seeds_and_epochs():
    cells = accuracy.cells(Settings(seeds=2, seed=3, epochs=5))
    assert [(c["seed"], c["epochs"]) for c in cells[:: len(accuracy.RECIPES)]] == [(3, 5), (4, 5)]
    assert len(accuracy.cells(Settings())) == 8 * len(accuracy.RECIPES)


def test_recipes_of_equal_bytes_send_no_more_than_two_in_a_thousand_entries():
    size, ranks = 269_722, accuracy.WORKERS

    def a_step(name):
        recipe = accuracy.RECIPES[name]
        given = accuracy.FULL | recipe.options | {"workers": ranks}
        config = resolve(given).config()
        encoding = Encoding(config.values, config.indices)
        k = entry_count(config.density, size)
        if config.method == "randk":
            encoding = Encoding(config.values, "common")
        sent = EXCHANGES[config.exchange].bytes(ranks, size, k, encoding)
        return sent / max(1, recipe.every)

    limit = a_step("topk-0.2")
    names = [name for name in accuracy.RECIPES if name.startswith("bytes-")]
    for name in names:
        assert 0.9 * limit < a_step(name) <= limit, name
    assert len(names) == 8


def test_a_run_counts_its_entries_and_repeats(monkeypatch):
    monkeypatch.setitem(accuracy.SMALL, "batch", 50)
    cell = {"recipe": "keep-8-half", "seed": 1, "epochs": 5}
    first, *_, last = found = accuracy.measure(SMALL, cell)
    assert [row["epoch"] for row in found] == [1, 2, 3, 4, 5]
    steps, d = last["steps"], last["d"]
    assert steps == 25
    # Exchanges after steps 8, 16 and 24, and everything once at the end.
    assert last["entries"] == 3 * round(0.0104 * d) + d
    assert first["bytes"] == first["entries"] == 0
    assert last["dense"] == steps * 2 * 15 * 4 * d
    assert found == accuracy.measure(SMALL, cell)


@pytest.mark.parametrize(
    "name", ["plain-front-1.5-1.5", "momentum-front-more", "plain-union-front-1.5-1.5"]
)
def test_more_entries_early_are_as_many_in_all(monkeypatch, name):
    monkeypatch.setattr(accuracy, "WORKERS", 2)
    monkeypatch.setitem(accuracy.SMALL, "batch", 1000)
    first, *_, last = accuracy.measure(SMALL, {"recipe": name, "seed": 1, "epochs": 10})
    recipe, d, steps = accuracy.RECIPES[name], last["d"], last["steps"] // 10
    assert first["entries"] == steps * entry_count(recipe.early[1], d)
    later = entry_count(recipe.options["density"], d)
    assert last["entries"] - first["entries"] == 9 * steps * later
    assert last["entries"] == pytest.approx(10 * steps * 0.002 * d, rel=0.01)


def test_rate_and_decay_are_looked_for_alike():
    for rate, decay in accuracy.GRID:
        names = [f"{name}-{rate:g}-{decay:g}" for name in ("dense", "plain-union", "plain-front")]
        dense, *plain = (accuracy.RECIPES[name] for name in names)
        assert dense.options == {"method": "dense", "weight_decay": pytest.approx(decay * 1e-4)}
        assert dense.lr == rate
        for recipe in plain:
            assert recipe.lr == 10 * rate
            assert recipe.options["weight_decay"] == dense.options["weight_decay"]
            assert recipe.options["momentum"] == 0
    assert accuracy.RECIPES["plain-front-1-3"].early == accuracy.EARLY


def test_what_waits_follows_the_learning_rate(monkeypatch):
    rates = []
    monkeypatch.setattr(VirtualCluster, "follow_lr", lambda cluster, lr: rates.append(lr))
    monkeypatch.setattr(accuracy, "WORKERS", 2)
    monkeypatch.setitem(accuracy.SMALL, "batch", 500)
    rows = accuracy.measure(SMALL, {"recipe": "plain-follow", "seed": 1, "epochs": 2})
    steps = int(rows[-1]["steps"])
    assert rates == [
        accuracy.SMALL["lr"] * 15 * cosine_factor(step / steps) for step in range(steps)
    ]


def test_twice_as_long_is_within_the_entries_of_dense(monkeypatch):
    monkeypatch.setattr(accuracy, "WORKERS", 2)
    monkeypatch.setitem(accuracy.SMALL, "batch", 1000)
    cells = [{"recipe": name, "seed": 1, "epochs": 10} for name in ("dense", "momentum-twice")]
    dense, twice = (accuracy.measure(SMALL, cell) for cell in cells)
    assert [len(dense), len(twice)] == [10, 20]
    for column in ("steps", "dense", "epochs"):
        assert dense[-1][column] == twice[-1][column]
    body = {row[0]: row for row in page(dense + twice).tables[0].rows}
    assert body["momentum-twice"][6] == "0.198 %"
    assert dense[-1]["activations"] == "fp32"


def test_the_named_recipe_is_the_one_that_was_measured():
    study, named = accuracy.RECIPES["plain-union-1.5-3"], RECIPES["plain-union"]
    fields, dense = dict(named.fields), accuracy.FULL
    method = f"{fields.pop('method')}/{fields.pop('exchange')}"
    decay = pytest.approx(named.decay_scale * dense["weight_decay"])
    assert study.options == fields | {"method": method, "momentum": 0.0, "weight_decay": decay}
    assert study.lr == pytest.approx(named.lr_factor(0.9))
    given = {"recipe": "plain-union", "momentum": 0.9, "workers": 16}
    trained = resolve(dense | given)
    assert trained.lr_at(0) == pytest.approx(study.lr * dense["lr"])
    assert trained.config().asdict() == resolve(dense | study.options).config().asdict()


def test_the_union_takes_fewer_bytes_than_as_many_entries_in_an_all_gather():
    size, k = 269_722, entry_count(0.002, 269_722)
    union = EXCHANGES["union"].bytes(16, size, k, Encoding("bf16", "packed"))
    gathered = EXCHANGES["allgather"].bytes(16, size, k, Encoding("fp32", "int32"))
    assert 0.6 < union / gathered < 0.7
    assert union / (2 * 15 / 16 * 4 * size) == pytest.approx(0.0217, abs=1e-4)


@pytest.mark.parametrize(
    "name",
    ["topk-0.2", "momentum-front", "momentum-front-more", "plain-front-1.5-3", "plain-union-1.5-3"],
)
def test_recipes_of_two_in_a_thousand_are_within_them(name):
    recipe, size = accuracy.RECIPES[name], 269_722
    share, density = recipe.early
    early, later = entry_count(density, size), entry_count(recipe.options["density"], size)
    assert 0.00199 < (share * early + (1 - share) * later) / size <= 0.002
