"""Who is told that a sparse method stands in front of Adam."""

import logging
import warnings

import pytest
import torch

import gradwire
from gradwire import State
from gradwire.errors import AttachError
from gradwire.integrate.adam import note_adam, refuse_for_recipe, warn_of_adam
from gradwire.plan.auto import Auto
from tests.integrate import models, trainers

WORDS = "the loss fell to 1.31 without gradwire, and to 2.07 at density 0.01. For a transformer use"
RECIPE = "gradwire.local_steps(model, gradwire.optim.muon(model, lr=...), recipe='muon')"


class Lamb(torch.optim.Optimizer):
    """Another package's, known by what it is told."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0, "betas": (0.9, 0.999), "eps": 1e-6})


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1.0, "betas": (0.9, 0.99)})


class Wrapper:
    """As trainers wrap optimisers."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def said(optimizer, **fields):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_adam(State(**fields), [optimizer])
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [
        ("AdamW", {"density": 0.01}, "AdamW after method='topk'"),
        ("Adamax", {"method": "randk", "density": 0.09}, "Adamax after method='randk'"),
        ("AdamW", {"density": 0.1}, ""),
        ("Lamb", {"density": 0.01}, "Lamb after"),
        ("wrapped AdamW", {"density": 0.01}, "AdamW after"),
        ("SGD", {"density": 0.01}, ""),
        ("Lion", {"density": 0.01}, ""),
        ("AdamW", {"method": "dense"}, ""),
        ("AdamW", {"density": 1.0}, ""),
        ("AdamW", {"method": "topk/dense-bf16", "density": 0.01}, ""),
    ],
)
def test_it_is_said_where_it_is_true(kind, fields, name):
    parameters = [torch.nn.Parameter(torch.ones(3))]
    make = {"Lamb": Lamb, "Lion": Lion}.get(kind.split()[-1])
    optimizer = (make or getattr(torch.optim, kind.split()[-1]))(parameters)
    if kind.startswith("wrapped"):
        optimizer = Wrapper(Wrapper(optimizer))
    lines = said(optimizer, **fields)
    assert len(lines) == bool(name)
    assert all(line.startswith(name) and WORDS in line and "docs/adam.md" in line for line in lines)
    assert all(RECIPE in line for line in lines)
    assert all("\n" not in line for line in lines)


@pytest.mark.parametrize(
    ("fields", "optimizers", "words"),
    [
        ({"density": 0.2}, ["AdamW"], "AdamW after method='topk': if the loss stays high, for"),
        ({"density": 0.01}, None, "method='topk' is not for Adam: with it, for a transformer"),
        ({"density": 0.2}, None, ""),
        ({"method": "dense"}, None, ""),
        ({"density": 0.2}, ["SGD"], ""),
    ],
)
def test_elsewhere_it_is_one_line_in_the_log(caplog, fields, optimizers, words):
    parameters = [torch.nn.Parameter(torch.ones(3))]
    with caplog.at_level("INFO", logger="gradwire"):
        if optimizers is None:
            note_adam(State(**fields))
        else:
            warn_of_adam(State(**fields), [getattr(torch.optim, n)(parameters) for n in optimizers])
    assert len(caplog.messages) == bool(words)
    assert all(line.startswith(words) and RECIPE in line for line in caplog.messages)


def test_attach_writes_that_line_where_it_sees_no_optimiser(ranks):
    assert ranks.run(1, noted) == [[1, 0]]


def noted(rank):
    """The lines in the log of an attach without and with the optimiser."""
    lines, counts = [], []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("gradwire")
    level = log.level
    log.addHandler(handler)
    log.setLevel("INFO")
    for seen in (False, True):
        net = models.model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        given = {"optimizer": optimizer, "scaler": torch.amp.GradScaler("cpu")} if seen else {}
        _, wire = models.wrapped(net=net, **given)
        wire.close()
        counts.append(sum("is not for Adam" in line for line in lines))
        lines.clear()
    log.removeHandler(handler)
    log.setLevel(level)
    return counts


@pytest.mark.parametrize(("kind", "before"), [("AdamW", True), ("SGD", False)])
def test_auto_is_told_of_adam_and_sends_everything(kind, before):
    state = State(method="dense")
    state.auto = Auto({})
    optimizer = getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_adam(state, [optimizer])
    assert state.auto.before_adam == before
    assert [RECIPE in str(w.message) for w in caught] == [True] * before
    assert all("sends everything before AdamW" in str(w.message) for w in caught)


def optimizer_of(kind, momentum=0.0):
    parameters = [torch.nn.Parameter(torch.ones(3))]
    if kind == "SGD":
        # Momentum in the second group only.
        groups = [{"params": parameters}, {"params": [torch.ones(2)], "momentum": momentum}]
        return torch.optim.SGD(groups, lr=0.1)
    return {"Lamb": Lamb, "AdamW": torch.optim.AdamW}[kind](parameters)


@pytest.mark.parametrize(
    ("kind", "momentum", "words"),
    [
        ("AdamW", 0.0, f"got AdamW: for a transformer use {RECIPE}"),
        ("Lamb", 0.0, "got Lamb: for a transformer"),
        ("SGD", 0.9, "got SGD with momentum=0.9: give it momentum=0 and 15 times the learning"),
        ("SGD", 0.0, ""),
    ],
)
def test_plain_union_is_for_sgd_without_momentum(kind, momentum, words):
    wrapped = Wrapper(optimizer_of(kind, momentum))
    refuse_for_recipe({"method": "topk"}, [wrapped])
    refuse_for_recipe({"recipe": "dgc"}, [wrapped])
    if not words:
        refuse_for_recipe({"recipe": "plain-union"}, [wrapped])
        return
    with pytest.raises(AttachError, match="recipe 'plain-union' is for SGD without mom") as error:
        refuse_for_recipe({"recipe": "plain-union"}, [wrapped])
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def refused(rank, way):
    """What the integration says of plain-union before an optimiser that it is not for."""
    try:
        if way == "attach":
            ddp = models.wrapped()[0]
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
            gradwire.attach(ddp, recipe="plain-union", optimizer=optimizer)
        else:
            with trainers.launched(rank):
                globals()[f"_{way}"](rank, "AdamW", recipe="plain-union")
    except AttachError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", ["attach", "accelerate", "transformers", "lightning"])
def test_every_integration_refuses_it(ranks, way):
    if way != "attach":
        pytest.importorskip(way)
        trainers.import_on(ranks, way)
    for line in ranks.run(2, refused, way):
        assert "recipe 'plain-union' is for SGD without momentum" in line


def heard(rank, way, kind):
    """What the integration says of this optimiser."""
    if way == "attach":
        scaler = torch.amp.GradScaler("cpu")
        net = models.model()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1)
            _, wire = models.wrapped(net=net, scaler=scaler, optimizer=optimizer)
        wire.close()
        return [str(w.message) for w in caught if "docs/adam.md" in str(w.message)]
    with trainers.launched(rank), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        globals()[f"_{way}"](rank, kind)
    return [str(w.message) for w in caught if "docs/adam.md" in str(w.message)]


def _accelerate(rank, kind, **fields):
    from accelerate import Accelerator

    from gradwire.integrate.accelerate import attach

    accelerator = Accelerator(cpu=True)
    net, other = models.model(), models.model(1)
    optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1)
    # That of another model is none of our business.
    foreign = torch.optim.AdamW(other.parameters())
    net, optimizer, foreign = accelerator.prepare(net, optimizer, foreign)
    attach(accelerator, net, **(fields or {"density": 0.01})).close()


def _transformers(rank, kind, **fields):
    import tempfile

    from gradwire.integrate.transformers import attach
    from tests.integrate.test_transformers import trainer_of

    with tempfile.TemporaryDirectory() as folder:
        options = {} if kind == "AdamW" else {"optim": "sgd"}
        trainer = trainer_of(folder, 1, save_strategy="no", **options)
        callback = attach(trainer, **(fields or {"density": 0.01}))
        trainer.train()
        callback.wire.close()


def _lightning(rank, kind, **fields):
    from lightning.pytorch import LightningModule, Trainer

    from gradwire.integrate.lightning import GradwireStrategy

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = models.model()

        def training_step(self, batch, _):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return getattr(torch.optim, kind)(self.parameters(), lr=0.1)

    batches = torch.utils.data.DataLoader(torch.randn(16, 31), batch_size=8)
    Trainer(
        strategy=GradwireStrategy(**(fields or {"density": 0.01})),
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), batches)


@pytest.mark.parametrize("way", ["attach", "accelerate", "transformers", "lightning"])
def test_every_integration_says_it_once(ranks, way):
    if way != "attach":
        pytest.importorskip(way)
        trainers.import_on(ranks, way)
    for lines in ranks.run(2, heard, way, "AdamW"):
        assert len(lines) == 1
        assert WORDS in lines[0]
    assert ranks.run(2, heard, way, "SGD") == [[], []]
