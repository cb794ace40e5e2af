"""Training runs whose workers exchange weights every few steps."""

import warnings

import pytest
import torch

from gradwire.errors import ConfigError
from gradwire.workbench import data, models
from gradwire.workbench.report import headline, read_runs, write_report
from gradwire.workbench.train import checkpoint
from gradwire.workbench.train.folder import read_config, read_json, write_config, write_json
from gradwire.workbench.train.options import resolve
from gradwire.workbench.train.saved import options_from_dict
from gradwire.workbench.train.task import TASKS
from tests.workbench.train import jobs

TINY = {"model": "gpt-tiny", "recipe": "muon", "device": "cpu"}


@pytest.fixture(scope="module")
def books(tmp_path_factory):
    """Texts of 40 windows to train on, and 6 to score on."""
    folder = tmp_path_factory.mktemp("books")
    words = b"It is a truth universally acknowledged, that %d men want %d wives.\n"
    for part, windows in (("train", 40), ("valid", 6), ("test", 6)):
        text = b"".join(words % (i, 3 * i) for i in range(200))
        (folder / f"{part}.txt").write_bytes(text[: 128 * windows + 1])
    return folder


@pytest.fixture(scope="module")
def sittings(ranks, books, tmp_path_factory):
    """A run of 15 steps in one go and in three sittings, which end between two exchanges."""
    folder = tmp_path_factory.mktemp("runs")
    run = jobs.options(books, epochs=3, batch=4, lr=0.01, **TINY | {"density": 0.5})
    for name in ("whole", "parts", "begun"):
        write_config(folder / name, run)
    return folder, ranks.run(2, jobs.pooled, jobs.whole_and_in_parts, run, folder)[0]


def test_a_run_in_parts_ends_with_the_same_bits(sittings):
    _, (whole, parts, _) = sittings
    assert [part["steps"] for part in parts] == [4, 13, 15]
    assert parts[-1]["parameters_sha256"] == whole["parameters_sha256"]
    assert parts[-1]["test_loss"] == whole["test_loss"]
    assert parts[-1]["bytes_sent"] == whole["bytes_sent"]
    assert parts[0]["parameters_sha256"] != whole["parameters_sha256"]


def test_replicas_count_as_identical_though_ranks_keep_what_is_unsent(sittings):
    _, (whole, parts, begun) = sittings
    assert all(result["replicas_identical"] is True for result in (whole, *parts, begun))
    assert whole["residual_norm"] > 0
    assert whole["bytes_dense"] / whole["bytes_sent"] > 40


def test_the_shared_weights_are_scored_and_saved(sittings, books):
    """The score of the last epoch is that of the weights in the checkpoint, on one process."""
    folder, (whole, *_) = sittings
    content, _ = checkpoint._read(folder / "whole" / "checkpoint" / checkpoint.TRAINER)
    text = data.load_dataset("books", books, (128,))
    model = models.build("gpt-tiny")
    model.load_state_dict(content["model"])
    with torch.no_grad():
        sums = TASKS["bytes"].count(model, text.test_batch(0, text.test_examples))
    assert TASKS["bytes"].score(sums) == pytest.approx(whole["test_loss"], abs=1e-5)


def test_the_last_round_is_exchanged_though_it_is_short(ranks, books, tmp_path):
    """Five steps in rounds of sixteen: without the exchange the loss is that of fresh weights."""
    run = jobs.options(books, epochs=1, batch=4, lr=0.01, **TINY | {"every": 16, "density": 0.5})
    write_config(tmp_path, run)
    result = ranks.run(2, jobs.pooled, jobs.train, run, tmp_path)[0]
    assert result["steps"] == 5
    assert result["test_loss"] < 4


def test_the_usual_options_of_a_recipe_with_rounds():
    run = resolve(TINY)
    spec = models.model_spec("gpt-tiny")
    assert (run.optimizer, run.every, run.density, run.values) == ("muon", 5, 0.5, "sign")
    assert run.lr == spec.embedded.muon_lr == 2 * spec.embedded.lr
    assert resolve({"model": "gpt-11m", "data_dir": "x", "recipe": "muon"}).lr == 0.008
    assert (run.cosine, run.weight_decay, run.clip) == (True, 0.1, 1.0)
    assert resolve(TINY | {"recipe": "muon-wan", "every": 7}).every == 7
    assert resolve(TINY | {"lr_drop": (1,)}).cosine is False
    made = run.optimizer_for(spec.build())
    assert {group["rule"] for group in made.param_groups} == {"muon", "adamw"}
    assert all(group["lr"] > 0 for group in made.param_groups)
    assert options_from_dict(run.asdict()) == run
    assert run.rounds()["recipe"] == "muon"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"momentum_correction": True}, "exchanges weights, not gradients: leave momentum_corr"),
        ({"follow_lr": True}, "leave follow_lr out"),
        ({"recipe": None, "every": 5}, "every is for a recipe with rounds: give recipe muon or"),
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"compare": ("topk",)}, "recipe 'muon' can only be compared with dense, not topk"),
        ({"compare": ("dense-lion",)}, "dense-lion"),
        ({"optimizer": "moun"}, "moun"),
    ],
)
def test_settings_that_contradict(more, words):
    with pytest.raises(ConfigError, match=words):
        resolve(TINY | more)


def test_dense_with_another_optimiser_has_its_own_usual_rate():
    run = resolve(TINY)
    adamw = run.with_method("dense-adamw")
    assert (adamw.title, adamw.lr, adamw.recipe, adamw.every) == ("dense AdamW", 0.008, "", 0)
    assert run.with_method("dense").title == "dense Muon"
    assert run.with_method("dense-muon").lr == run.lr
    # A rate that was chosen is everyone's.
    assert resolve(TINY | {"lr": 0.01}).with_method("dense-adamw").lr == 0.01
    assert adamw.cosine
    assert adamw.weight_decay == run.weight_decay


def test_the_report_names_every_dense_run(sittings, tmp_path):
    folder, _ = sittings
    options = read_config(folder / "whole")
    result = read_json(folder / "whole" / "result.json")
    lines = (folder / "whole" / "metrics.jsonl").read_text()
    compared = ["dense-muon", "dense-adamw"]
    main = resolve(options.asdict() | {"compare": tuple(compared)})
    for place, made in (
        (tmp_path, main),
        *((tmp_path / f"compare-{name}", options.with_method(name)) for name in compared),
    ):
        write_config(place, made)
        (place / "metrics.jsonl").write_text(lines)
        write_json(place / "result.json", result)
    score = f"{result['test_loss']:.4f}"
    words = headline(read_runs(tmp_path))
    assert words.startswith(f"muon, Muon inside rounds of 5 reached {score} test loss against ")
    assert f"{score} dense Muon and {score} dense AdamW" in words
    assert "dense AdamW" in write_report(tmp_path).read_text()


@pytest.mark.parametrize(("density", "said"), [(0.01, 1), (0.5, 0)])
def test_a_sparse_method_in_front_of_adamw_warns(ranks, books, tmp_path, density, said):
    run = jobs.options(books, epochs=1, batch=20, **{"model": "gpt-tiny", "density": density})
    write_config(tmp_path, run)
    assert ranks.run(2, jobs.pooled, warned, run, tmp_path) == [said, 0]


def warned(worker, run, folder):
    """How often this rank hears of Adam, and of the recipe."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jobs.train(worker, run, folder)
    return sum("recipe='muon'" in str(w.message) for w in caught)
