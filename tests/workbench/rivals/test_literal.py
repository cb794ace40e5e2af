"""Every rival against a literal program of its paper or released code, over 20 steps in fp64."""

from dataclasses import replace

import pytest
import torch

from gradwire.integrate.local_steps import local_steps
from gradwire.ranks.virtual import VirtualRanks
from gradwire.workbench.rivals import RIVALS
from gradwire.workbench.rivals.codes import ChunkBins
from gradwire.workbench.rivals.every_step import EveryStep
from gradwire.workbench.rivals.fragments import cut_into_fragments
from gradwire.workbench.simulate.language_run import OPTIMIZERS, LanguageRecipe, set_lr
from gradwire.workbench.study.language.recipes import RECIPES

from . import literal, made


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def largest_difference(found, wanted):
    assert found.keys() == wanted.keys()
    pairs = [(tensor(found[name]), tensor(wanted[name])) for name in found]
    return max(float((one - other).abs().max()) for one, other in pairs)


def moved_far(found):
    return largest_difference(found, literal.start())


def changed(name, **options):
    """A rival's recipe with other options."""
    recipe = RIVALS[name]
    which = "rounds" if recipe.rounds else "gradients"
    return replace(recipe, **{which: {**getattr(recipe, which), **options}})


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (changed("demo", keep=6), {"keep": 6}),
        (changed("demo", keep=200, values="fp32"), {"keep": 200, "value": float}),
        (
            changed("demo-paper", keep=6, mean="all"),
            {"keep": 6, "decay": 0.995, "subtract": 0.2, "over_all": True, "inside": False},
        ),
        (
            replace(changed("demo", keep=6, values="fp32"), optimizer="identity"),
            {"keep": 6, "phi": "identity", "value": float},
        ),
    ],
)
def test_demo(recipe, options):
    if options.get("value") is float:
        # fp32 on the way, fp64 in the program.
        options = options | {"value": lambda v: float(torch.tensor(v, dtype=torch.float32))}
    found = made.train(recipe, lr=0.01)
    assert moved_far(found) > 0.02
    difference = largest_difference(found, literal.demo(lr=0.01, **options))
    assert difference < 1e-8


@pytest.mark.parametrize("mean", ["senders", "all"])
def test_sparseloco(mean):
    recipe = changed("sparseloco", every=4, code=ChunkBins(8, 2), mean=mean)
    found = made.train(recipe)
    wanted = literal.rounds(
        lambda rows: literal.sparse_code(rows, 8),
        "adamw",
        4,
        0.95,
        (1.0, 0.0),
        senders=mean == "senders",
    )
    assert moved_far(found) > 0.02
    difference = largest_difference(found, wanted)
    assert difference < 1e-9


@pytest.mark.parametrize("bits", [2, 4])
def test_muloco(bits):
    found = made.train(changed(f"muloco-{bits}", every=4))
    # Three workers are nearest to one of the paper's 1, 8 and 16.
    outer = (0.9, 0.8)
    wanted = literal.rounds(
        lambda rows: literal.row_code(rows, bits), "muon", 4, 0.9, outer, again=True
    )
    assert moved_far(found) > 0.02
    difference = largest_difference(found, wanted)
    assert difference < 1e-9


def test_diloco_is_local_steps():
    """The study's recipe `diloco` is the library's local_steps, in fp32, with rounds of 4."""
    models = [made.Made().float() for _ in range(made.WORKERS)]
    optimizers = [OPTIMIZERS["adamw"](model, made.LR) for model in models]
    ranks = VirtualRanks(made.WORKERS)
    options = {**RECIPES["diloco"].rounds, "every": 4}
    handles = ranks.run(
        lambda rank: local_steps(
            models[rank], optimizers[rank], group=ranks.groups[rank], **options
        )
    )
    for step in range(made.STEPS):
        for model, optimizer, batch in zip(models, optimizers, made.batches(step), strict=True):
            set_lr(optimizer, made.rate(step))
            optimizer.zero_grad()
            made.loss(model, [part.float() for part in batch]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        ranks.run(lambda rank: handles[rank].step())
    found = {name: x.tolist() for name, x in handles[0].shared_weights().items()}

    def whole(rows):
        return {(i, j): v for i, row in enumerate(rows) for j, v in enumerate(row)}

    wanted = literal.rounds(whole, "adamw", 4, 1.0, (0.7, 0.9))
    assert moved_far(found) > 0.02
    difference = largest_difference(found, wanted)
    assert difference < 1e-4, "more than fp32 in place of fp64"


def test_streaming_diloco():
    found = made.train(changed("streaming-diloco", every=6, delay=2))
    names = cut_into_fragments(list(literal.start()), 3)
    wanted = literal.streaming(6, names, 2, 0.5, (0.4, 0.9))
    assert moved_far(found) > 0.02
    difference = largest_difference(found, wanted)
    assert difference < 1e-9


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_powersgd(rank, optimizer):
    recipe = RIVALS[f"powersgd-{rank}-{optimizer}"]
    found = made.train(recipe)
    part = made.open_part(recipe)[1]
    first, begin = {}, 0
    for name, p in made.Made().named_parameters():
        for (n, m), begins in part.exchange.groups.items():
            if begin in begins:
                assert (n, m) == tuple(p.shape)
                first[name] = part.exchange.q[n, m][begins.index(begin)].tolist()
        begin += p.numel()
    assert set(first) >= {"blocks.0.weight", "blocks.2.weight"}
    assert "norm" not in first
    assert moved_far(found) > 0.02
    wanted = literal.powersgd(rank, first, optimizer)
    # Muon rounds to bf16 inside: a last digit may differ.
    difference = largest_difference(found, wanted)
    assert difference < (1e-9 if optimizer == "adamw" else 1e-3)


def test_shared_masks():
    options = {"exchange": "shared-masks", "density": 0.2, "start": 2}
    recipe = LanguageRecipe("", "adams", gradients=options, part=EveryStep)
    found = made.train(recipe, lr=0.01)
    assert moved_far(found) > 0.02
    wanted = literal.shared_masks(0.2, 2, lr=0.01)
    difference = largest_difference(found, wanted)
    assert difference < 1e-7
