import pytest
import torch

from gradwire.errors import ConfigError
from gradwire.workbench.models import model_spec
from gradwire.workbench.train.options import resolve
from gradwire.workbench.train.saved import options_from_dict, resume_options


def test_the_model_brings_its_recipe():
    own, digits = resolve({"model": "resnet20", "data_dir": "x"}), resolve({"model": "resnet20"})
    recipe = model_spec("resnet20")
    assert (own.batch, own.lr, own.epochs) == (32, 0.1, recipe.epochs)
    assert (digits.lr, digits.epochs) == (recipe.embedded.lr, recipe.embedded.epochs)
    assert (own.data, digits.data) == ("cifar10", "digits")


def test_lstm_ptb_has_no_momentum_but_on_embedded_phrases():
    assert resolve({"model": "lstm-ptb", "data_dir": "x"}).momentum == 0
    assert resolve({"model": "lstm-ptb"}).momentum == 0.9
    assert resolve({"model": "lstm-ptb", "data_dir": "x", "momentum": 0.5}).momentum == 0.5
    assert resolve({"model": "resnet20", "data_dir": "x"}).momentum == 0.9


def test_what_was_chosen_comes_before_the_recipe():
    options = resolve({"model": "fnn3", "batch": 7, "lr": 0.5, "epochs": None})
    assert (options.batch, options.lr) == (7, 0.5)
    assert options.epochs == model_spec("fnn3").embedded.epochs


def test_a_method_may_name_its_exchange():
    options = resolve({"method": "topk/dense"})
    assert (options.method, options.exchange) == ("topk", "dense")
    assert resolve({}).exchange == "allgather"


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"model": "resnet2"}, "Did you mean 'resnet20'"),
        ({"method": "topq"}, "Did you mean 'topk'"),
        ({"density": 4}, "density must be in"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"epochs": -1}, "epochs must be at least 1, got -1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"lr": 0.0}, "lr must be above 0"),
        ({"lr": float("nan")}, "lr must be above 0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum above 0"),
        ({"optimizer": "adam"}, "unknown optimizer 'adam'. Did you mean 'adamw'"),
        ({"nesterov": True, "optimizer": "adamw"}, "nesterov is for optimizer sgd"),
        ({"beta2": 1.0}, r"beta2 must be in \[0, 1\), got 1.0"),
        ({"eps": 0.0}, "eps must be above 0, got 0.0"),
        ({"masking": False}, "masking can only be left out with momentum_correction"),
        ({"clip": -1.0}, "clip must be at least 0, got -1.0"),
        ({"local_clip": -1.0}, "clip must be a number of at least 0"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"lr_drop": (4, 2)}, "lr_drop must be rising epochs"),
        ({"lr_drop": (4,), "cosine": True}, "one schedule: lr_drop or cosine"),
        ({"recipe": "plain"}, "unknown recipe 'plain'. Did you mean 'plain-union'"),
        ({"recipe": "plain-union", "optimizer": "adamw"}, "'plain-union' is for optimizer sgd"),
        ({"recipe": "plain-union", "nesterov": True}, "'plain-union' has no momentum: leave"),
        ({"recipe": "plain-union", "momentum_correction": True}, "has no momentum: leave"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"compare": ("dens",)}, "Did you mean 'dense'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(choices, words):
    with pytest.raises(ConfigError, match=words):
        resolve(choices)


@pytest.mark.parametrize(
    ("choices", "kind", "values"),
    [
        ({}, "SGD", {"momentum": 0.9, "nesterov": False}),
        (
            {"momentum_correction": True, "momentum": 0.75},
            "SGD",
            {"momentum": 0, "weight_decay": 0.4},
        ),
        ({"recipe": "dgc"}, "SGD", {"lr": 0.5, "momentum": 0, "weight_decay": 1.0}),
        (
            {"recipe": "plain-union", "momentum": 0.75},
            "SGD",
            {"lr": 3.0, "momentum": 0, "weight_decay": 0.3},
        ),
        ({"optimizer": "adamw", "beta2": 0.9}, "AdamW", {"betas": (0.9, 0.9), "eps": 1e-8}),
        ({"model": "gpt-nano", "eps": 1e-4}, "AdamW", {"betas": (0.9, 0.99), "eps": 1e-4}),
        ({"model": "gpt-nano", "momentum_correction": True}, "AdamW", {"betas": (0.0, 0.99)}),
    ],
)
def test_the_optimiser(choices, kind, values):
    """Momentum correction takes the place of the optimiser's momentum, and SGD's decays with it."""
    made = resolve(choices | {"lr": 0.5, "weight_decay": 0.1}).make_optimizer([torch.zeros(1)])
    assert type(made).__name__ == kind
    for name, value in ({"lr": 0.5, "weight_decay": 0.1} | values).items():
        assert made.defaults[name] == pytest.approx(value)


def test_torchruns_ranks_are_the_workers():
    assert resolve({}, workers=3).workers == 3
    with pytest.raises(ConfigError, match="--workers 4, but torchrun started 3 ranks"):
        resolve({"workers": 4}, workers=3)


def test_json_round_trip():
    options = resolve({"compare": ("dense",), "warmup": (0.25, 0.1), "warmup_steps": 3})
    assert options_from_dict(options.asdict()) == options
    with pytest.raises(ConfigError, match="another version: it has the option 'colour'"):
        options_from_dict(options.asdict() | {"colour": 1})


def test_a_resumed_run_keeps_its_choices():
    saved = resolve({"density": 0.02, "workers": 2})
    same, notes = resume_options(saved, {"density": 0.02, "workers": None, "device": "auto"})
    assert (same, notes) == (saved, [])


@pytest.mark.parametrize("change", [{"density": 0.5}, {"seed": 1}, {"compare": ("dense",)}])
def test_a_resumed_run_refuses_other_choices_by_name(change):
    (name,) = change
    with pytest.raises(ConfigError, match=f"has {name} = .*start a new run"):
        resume_options(resolve({}), change)


def test_a_resumed_run_may_have_other_workers_and_more_epochs_and_says_so():
    changed, notes = resume_options(resolve({"workers": 2}), {"workers": 4, "epochs": 99})
    assert (changed.workers, changed.epochs) == (4, 99)
    assert notes[0] == "workers was 2, is now 4"


def test_a_comparison_differs_in_nothing_but_the_method():
    options = resolve({"density": 0.02, "values": "bf16", "dense_steps": 5, "seed": 4})
    other = options.with_method("randk")
    assert (other.method, other.density, other.values) == ("randk", 0.02, "bf16")
    dense = options.with_method("dense")
    assert (dense.method, dense.exchange, dense.values) == ("dense", "dense", "fp32")
    assert (dense.seed, dense.lr, dense.batch) == (4, options.lr, options.batch)


def test_a_comparison_keeps_the_options_that_the_other_has():
    texts = ("rows=3", "ratio=5")
    options = resolve({"method": "topk/gs-sgd", "options": texts})
    assert options.config().exchange_options == {"rows": 3, "ratio": 5.0}
    assert options.with_method("topk/sketched").options == texts
    assert options.with_method("topk/oktopk").options == ()
    assert options.with_method("topk").options == ()
    assert options.with_method("dense").options == ()


def test_momentum_is_in_sgd_or_in_the_gradients():
    plain = resolve({"momentum": 0.8, "nesterov": True})
    assert (plain.config().momentum, plain.config().nesterov) == (0.0, False)
    assert _momentum(plain) == (0.8, True)
    choices = {"momentum": 0.8, "nesterov": True, "momentum_correction": True, "local_clip": 2.0}
    ours = resolve(choices | {"masking": False})
    config = ours.config()
    assert (config.momentum, config.nesterov, config.masking, config.clip) == (0.8, True, False, 2)
    assert _momentum(ours) == (0, False)
    assert ours.title.endswith("momentum correction")
    dense = ours.with_method("dense")
    assert _momentum(dense) == (0.8, True)
    assert (dense.config().momentum, dense.config().clip) == (0, 0)


def _momentum(options):
    made = options.make_optimizer([torch.zeros(1)]).defaults
    return made["momentum"], made["nesterov"]


def test_the_learning_rate_drops_after_each_of_the_epochs():
    options = resolve({"lr": 1.0, "lr_drop": (2, 3)})
    assert [options.lr_at(e) for e in range(4)] == pytest.approx([1, 1, 0.1, 0.01])


def test_the_learning_rate_is_warmed_up_and_falls_like_a_cosine():
    options = resolve({"lr": 2.0, "epochs": 10, "cosine": True})
    rates = [options.lr_at(tenth / 10) for tenth in range(101)]
    assert [rates[i] for i in (0, 5, 10, 55, 100)] == pytest.approx([0.02, 1, 2, 1, 0])
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_recipe_is_what_was_measured_together():
    choices = {"recipe": "plain-union", "lr": 0.4, "epochs": 60, "weight_decay": 1e-4}
    options = resolve(choices)
    assert options.lr_at(0) == pytest.approx(6.0)
    assert options.title == "topk/union at 0.2 %, bf16, packed, plain-union"
    config = options.config(epoch_steps=97)
    assert (config.density, config.warmup, config.warmup_steps) == (0.002, (), 0)
    dgc = resolve({"recipe": "dgc", "epochs": 60}).config(epoch_steps=97)
    assert (dgc.momentum, dgc.density, dgc.warmup_steps) == (0.9, 0.001, 97)
    own = resolve({"recipe": "dgc", "warmup_steps": 5, "density": 0.1})
    assert (own.config(97).warmup_steps, own.density) == (5, 0.1)


def test_dense_beside_a_recipe_is_trained_as_dense_is():
    choices = {"lr": 0.4, "weight_decay": 1e-4, "cosine": True}
    dense = resolve(choices | {"recipe": "plain-union", "follow_lr": True}).with_method("dense")
    assert dense.lr_at(3) == resolve(choices).lr_at(3)
    made, usual = (o.make_optimizer([torch.zeros(1)]).defaults for o in (dense, resolve(choices)))
    assert made == usual
    assert not dense.follow_lr
    assert (dense.config().warmup, dense.config().exchange) == ((), "dense")


def test_titles_say_what_was_done():
    assert resolve({"density": 0.01}).title == "topk/allgather at 1 %"
    assert resolve({"values": "bf16"}).title == "topk/allgather at 0.1 %, bf16"
    assert resolve({"method": "dense"}).title == "dense"


def test_options_are_frozen():
    options = resolve({})
    with pytest.raises(AttributeError):
        options.density = 0.5


def test_a_model_may_have_several_data_sets():
    assert resolve({"model": "lstm-ptb", "data_dir": "x"}).data == "ptb"
    other = resolve({"model": "lstm-ptb", "data_dir": "x", "data": "wikitext2"})
    assert (other.data, other.lr, other.clip, other.size) == ("wikitext2", 22, 0.25, {})
    with pytest.raises(ConfigError, match="unknown data set of lstm-ptb 'mnist'"):
        resolve({"model": "lstm-ptb", "data": "mnist"})


def test_on_embedded_data_the_large_networks_are_small():
    options = resolve({"model": "lstm-an4"})
    assert (options.data, options.embedded) == ("tones", True)
    assert options.size == model_spec("lstm-an4").embedded.size
    assert not resolve({"model": "lstm-an4", "data_dir": "x"}).embedded


def test_a_model_without_data_is_refused():
    with pytest.raises(ConfigError, match="'resnet50' is here for its size: there is no reader"):
        resolve({"model": "resnet50"})
