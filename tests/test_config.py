import dataclasses
import itertools
import json

import pytest

import gradwire
from gradwire.accumulate import Schedule
from gradwire.compress import METHODS
from gradwire.config import Config, configure
from gradwire.exchange import EXCHANGES
from gradwire.registry import options_of, parse_options
from gradwire.workbench.train.options import resolve


def test_defaults_and_names():
    assert (Config().method, Config().exchange) == ("topk", "allgather")
    assert Config(method="dense").exchange == "dense"
    assert Config(method="topk/dense").exchange == "dense"
    assert Config(method="exdyna").exchange == "union"
    assert Config(dense="*.bias").dense == ("*.bias",)
    given = Config(dense=iter(["*.bias"]), warmup=(d for d in (0.5, 0.1)), warmup_steps=1)
    assert (given.dense, given.warmup) == (("*.bias",), (0.5, 0.1))
    json.dumps(Config(method="randk", options={"seed": 3}, warmup=(0.1,), warmup_steps=1).asdict())


def test_fields_on_top_of_a_config():
    base = Config(method="randk", density=0.05)
    changed = configure(base, {"density": 0.1, "shared": False})
    assert (changed.method, changed.density, changed.options) == ("randk", 0.1, {"shared": False})
    assert configure(Config(method="dense"), {"method": "topk/allgather"}).exchange == "allgather"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"density": 0}, r"density must be in \(0, 1\], got 0"),
        ({"density": 2}, "2 % is 0.02"),
        ({"density": float("nan")}, "got nan"),
        ({"density": True}, "got True"),
        ({"warmup": (0.5, 3)}, "warmup must be in"),
        ({"warmup": (0.5,)}, "warmup needs warmup_steps"),
        ({"warmup": 0.1}, r"warmup must be several densities, such as \(0.25, 0.0625\), got 0.1"),
        ({"warmup": None}, "warmup must be several densities, .* got None"),
        ({"dense": 3}, r"dense must be patterns of parameter names, such as .*bias',\), got 3"),
        ({"dense": ("*.bias", 3)}, r"dense must be patterns of .*, got \('\*.bias', 3\)"),
        ({"options": None}, "options must be a dict, such as {'seed': 1}, got None; {} is none"),
        ({"method": "randk", "options": 5, "seed": 1}, "options must be a dict, .* got 5"),
        ({"method": "top-k"}, "unknown method 'top-k'. Did you mean 'topk'"),
        ({"exchange": "allgathr"}, "unknown exchange 'allgathr'. Did you mean 'allgather'"),
        ({"method": "topk/gtopkk"}, "unknown exchange 'gtopkk'"),
        ({"method": "topk/dense", "exchange": "allgather"}, "names exchange 'dense'"),
        ({"densty": 0.1}, "unknown option 'densty'. Did you mean 'density'"),
        ({"values": "bf61"}, "unknown value encoding 'bf61'. Did you mean 'bf16'"),
        ({"values": "bf16", "exchange": "dense"}, "has no effect on exchange 'dense'"),
        ({"values": "int8", "exchange": "union"}, "fp32 or bf16, not 'int8'"),
        ({"method": "micro/allgather"}, "'micro' works with exchange 'union' only.*'allgather'"),
        ({"method": "deft", "values": "int8"}, "fp32 or bf16, not 'int8'"),
        ({"method": "randk/union", "unbiased": True}, "use exchange='allgather'"),
        ({"indices": "common"}, "chosen by methods"),
        ({"options": {"seed": 1}}, "topk/allgather has no option 'seed'; there is one of randk"),
        (
            {"momentum": 1.0},
            r"momentum must be in \[0, 1\), got 1.0. It takes the place of the opt",
        ),
        ({"momentum": "0.9"}, r"momentum must be in \[0, 1\), got '0.9'"),
        (
            {"nesterov": True},
            "nesterov=True has no effect without momentum: give e.g. momentum=0.9",
        ),
        ({"masking": False}, "masking=False has no effect without momentum"),
        ({"momentum": 0.9, "masking": 1}, "masking must be True or False, got 1"),
        ({"clip": -1.0}, r"clip must be a number of at least 0 \(0 is never\), got -1.0"),
        ({"recipe": "dcg"}, "unknown recipe 'dcg'. Did you mean 'dgc'"),
        ({"recipe": ["dgc"]}, "unknown recipe"),
        ({"recipe": "dgc"}, "recipe 'dgc' needs warmup_steps, .*: those of an epoch"),
        ({"recipe": "plain-union", "warmup": (0.1,)}, "warmup needs warmup_steps"),
        (
            {"recipe": "plain-union", "method": "topk/allgather", "exchange": "union"},
            "names exchange 'allgather', exchange='union' another",
        ),
        ({"warmup": (0.1,)}, "warmup needs warmup_steps"),
        ({"dense_steps": -1}, "dense_steps must be a whole number of at least 0, got -1"),
        ({"watch": -1}, "watch must be a whole number of at least 0, got -1"),
        ({"watch": 5}, r"watch=5 needs the parameters: use gradwire.attach, or State\(model="),
        ({"bundle_mb": 0}, "bundle_mb must be a number above 0, got 0"),
        ({"timeout": float("inf")}, "timeout must be seconds from 1 to 1e9, got inf"),
        ({"timeout": 1e300}, r"timeout must be seconds from 1 to 1e9, got 1e\+300"),
        ({"timeout": 1e-9}, "timeout must be seconds from 1 to 1e9, got 1e-09"),
        ({"timeout": "60"}, "timeout must be seconds from 1 to 1e9, got '60'"),
    ],
)
def test_bad_fields(fields, message):
    with pytest.raises(ValueError, match=message):
        gradwire.VirtualCluster(2, **fields)


def test_what_is_asked_before_a_step():
    cluster = gradwire.VirtualCluster(2, density=0.1)
    for ask, message in (
        (lambda: cluster.residual(0), "residual: there is nothing yet, .* known after a step"),
        (lambda: cluster.stats(), "stats: there is nothing yet"),
        (lambda: gradwire.State(density=0.1).residual("a"), "residual: there is nothing yet"),
        (lambda: cluster.stats(2), "rank must be in 0..1, got 2"),
        (lambda: cluster.residual("0"), "rank must be in 0..1, got '0'"),
    ):
        with pytest.raises(ValueError, match=message):
            ask()


def test_config_must_be_one():
    with pytest.raises(ValueError, match=r"config must be a gradwire.Config, got dict"):
        gradwire.VirtualCluster(2, {"density": 0.1}, density=0.1)


def test_a_recipe_is_fields_that_others_override():
    config = configure(Config(values="bf16"), {"recipe": "dgc", "warmup_steps": 5, "density": 0.01})
    assert config.warmup == (0.25, 0.0625, 0.015625, 0.004)
    assert (config.density, config.momentum, config.masking) == (0.01, 0.9, True)
    assert (config.values, config.method) == ("bf16", "topk")
    assert configure(None, {"recipe": "dgc", "warmup_steps": 5}).density == 0.001


def test_a_recipe_may_have_an_exchange_and_no_warm_up():
    config = configure(None, {"recipe": "plain-union"})
    assert (config.method, config.exchange, config.momentum) == ("topk", "union", 0)
    assert (config.values, config.indices) == ("bf16", "packed")
    assert {config.schedule.density_at(step) for step in range(1000)} == {0.002}
    assert configure(None, {"recipe": "dgc", "warmup": ()}).schedule.density_at(0) == 0.001
    kept = configure(Config(warmup_steps=7), {"recipe": "dgc"})
    assert (len(kept.warmup), kept.warmup_steps) == (4, 7)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"method": "gaussiank"}, ("gaussiank", "union")),
        ({"method": "topk/allgather"}, ("topk", "allgather")),
        ({"exchange": "allgather"}, ("topk", "allgather")),
    ],
)
def test_the_exchange_of_a_recipe_gives_way_to_one_that_is_named(given, names):
    config = configure(None, {"recipe": "plain-union", **given})
    assert (config.method, config.exchange) == names
    options = resolve({"recipe": "plain-union", **given})
    assert (options.method, options.exchange) == names


def test_options_from_texts():
    assert parse_options(["shared=false", "seed=7"], "randk") == {"shared": False, "seed": 7}
    for texts, message in (
        (["shared"], "NAME=VALUE, got 'shared'"),
        (["seed=x"], "option seed of randk must be int, got 'x'"),
        (["shared=2"], "option shared of randk must be bool, got '2'"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_options(texts, "randk")


def test_schedule():
    schedule = Schedule(0.001, dense_steps=2, warmup=(0.25, 0.0625), warmup_steps=3)
    assert [schedule.density_at(step) for step in range(10)] == [1, 1] + [0.25] * 3 + [
        0.0625
    ] * 3 + [0.001] * 2
    assert Schedule(0.01).density_at(0) == 0.01
    assert {schedule.density_at(step) for step in schedule.change_steps()} == {
        1,
        0.25,
        0.0625,
        0.001,
    }


def test_options_of_exchanges():
    config = Config(method="randk/gtopk", options={"seed": 3, "merge": "paper"})
    assert config.bound_method.options["seed"] == 3
    assert config.exchange_options == {"merge": "paper"}
    assert configure(None, {"exchange": "gs-sgd", "rows": 3}).options == {"rows": 3}
    assert configure(None, {"method": "topk/gs-sgd", "ratio": 5}).options == {"ratio": 5}
    assert configure(Config(exchange="gs-sgd"), {"rows": 3}).options == {"rows": 3}
    texts = ["rows=3", "ratio=4.5"]
    assert parse_options(texts, "topk/gs-sgd") == parse_options(texts, "topk", "gs-sgd")
    assert parse_options(texts, "topk/gs-sgd") == {"rows": 3, "ratio": 4.5}
    for fields, message in (
        ({"rows": 3}, "topk/allgather has no option 'rows'; there is one of sketched, gs-sgd"),
        ({"options": {"rows": 3}}, "topk/allgather has no option 'rows'"),
        ({"exchange": "gs-sgd", "rwos": 3}, "unknown option 'rwos'. Did you mean 'rows'"),
        ({"exchange": "gs-sgd", "options": {"rwos": 3}}, "option of topk/gs-sgd 'rwos'.*'rows'"),
        ({"exchange": "gs-sgd", "rows": True}, "option rows of gs-sgd must be int, got True"),
        ({"exchange": "gs-sgd", "ratio": "4"}, "option ratio of gs-sgd must be float, got '4'"),
        ({"exchange": "oktopk", "refresh": 0}, "refresh must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            gradwire.VirtualCluster(2, **fields)
    with pytest.raises(ValueError, match="option rows of gs-sgd must be int"):
        parse_options(["rows=3.5"], "topk", "gs-sgd")


def test_names_of_options_do_not_clash(monkeypatch):
    for method, exchange in itertools.product(METHODS, EXCHANGES):
        options_of(method, exchange)

    def greedy(message, u, group, memory, *, seed=0):
        """An exchange with an option of a method."""

    other = dataclasses.replace(EXCHANGES["allgather"], run=greedy)
    monkeypatch.setitem(EXCHANGES, "greedy", other)
    with pytest.raises(
        ValueError, match="'randk' and exchange 'greedy' both have an option 'seed'"
    ):
        Config(method="randk", exchange="greedy")


@pytest.mark.parametrize("values", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("exchange", ["union", "sketched", "gs-sgd"])
def test_exchanges_that_add_refuse_what_cannot_be_added(exchange, values):
    with pytest.raises(ValueError, match=f"'{exchange}' adds .* fp32 or bf16, not '{values}'"):
        Config(exchange=exchange, values=values)


@pytest.mark.parametrize("exchange", ["sketched", "gs-sgd", "hierarchical"])
def test_exchanges_that_choose_take_no_other_choice(exchange):
    with pytest.raises(ValueError, match=f"{exchange}' chooses the entries itself.*not 'randk'"):
        Config(method="randk", exchange=exchange)
