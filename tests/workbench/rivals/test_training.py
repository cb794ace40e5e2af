"""The rivals as the study runs them: they train, say what they sent, and resume bit for bit."""

import io
import itertools

import pytest
import torch

from gradwire.errors import ConfigError
from gradwire.workbench.rivals import RIVAL_RATES, RIVALS
from gradwire.workbench.rivals.optimizers import RIVAL_OPTIMIZERS, AdamS
from gradwire.workbench.study.language import cells
from gradwire.workbench.study.language.recipes import RATES, RECIPES
from gradwire.workbench.study.study import Settings

TINY = {"model": "gpt-tiny", "width": "16", "depth": "3", "tokens": "512", "workers": "2"}
CPU = torch.device("cpu")


def opened(recipe, steps=12, every=6, lr=0.01):
    chosen = TINY | {"recipe": recipe, "steps": str(steps), "every": str(every), "lr": str(lr)}
    settings = Settings(small=True, chosen=chosen)
    (cell,) = cells.list_cells(settings)
    return cells._open(settings, cell, CPU)


def copied(state):
    """The state as a study saves and reads it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_the_study_lists_the_rivals_with_rates_a_factor_of_two_apart():
    assert RIVALS.items() <= RECIPES.items()
    assert {recipe.optimizer for recipe in RIVALS.values()} <= RATES.keys()
    assert {recipe.optimizer for recipe in RIVALS.values()} <= RIVAL_OPTIMIZERS.keys()
    for rates in RIVAL_RATES.values():
        assert [high / low for low, high in itertools.pairwise(rates)] == [2] * 4


@pytest.mark.parametrize(
    "recipe",
    [
        "demo",
        "demo-muon",
        "sparseloco",
        "muloco-2",
        "streaming-diloco",
        "scape-10",
        "powersgd-4-muon",
    ],
)
def test_a_run_learns_and_goes_on_where_it_was_saved(recipe):
    lr = 0.002 if recipe == "demo" else 0.01
    whole, first, second = (opened(recipe, lr=lr) for _ in range(3))
    before = whole.score(whole.text.test, 64)
    losses = [float(whole.step()) for _ in range(12)]
    # In the middle of a round, and of an update of Streaming DiLoCo that is on its way.
    assert [float(first.step()) for _ in range(8)] == losses[:8]
    saved = copied(first.state_dict())
    for _ in range(2):
        second.load_state_dict(saved)
    assert [float(second.step()) for _ in range(4)] == losses[8:]
    assert second.score(second.text.test, 64) == whole.score(whole.text.test, 64) < before - 0.02
    assert second.bytes_sent == whole.bytes_sent > 0
    assert second.part.forgotten == whole.part.forgotten
    assert (whole.part.forgotten > 0) == (recipe != "powersgd-4-muon")


@pytest.mark.parametrize(("recipe", "equal"), [("sparseloco", True), ("streaming-diloco", False)])
def test_workers_are_equal_after_an_exchange_where_the_paper_has_them_equal(recipe, equal):
    run = opened(recipe)
    for _ in range(5):
        run.step()
    differences = []
    for _ in range(2):
        one, other = (torch.cat([p.flatten() for p in m.parameters()]) for m in run.part.models)
        differences.append(not torch.equal(one, other))
        run.step()
    assert differences == [True, not equal]


def test_a_delay_is_shorter_than_a_round_and_fragments_have_blocks():
    with pytest.raises(ConfigError, match="a delay of 5 steps needs rounds of more, got --every 5"):
        opened("streaming-diloco", every=5)


def test_adams_goes_on_without_a_gradient_or_holds():
    for holds, wanted in ((False, 0.1 * 0.9 / 0.95**0.5), (True, 0.0)):
        p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = AdamS([{"params": [p]}], 0.1, eps=0.0, holds=holds)
        p.grad = torch.full_like(p, 3.0)
        optimizer.step()
        first = -p.item()
        assert first == pytest.approx(0.1 * 0.1 / 0.05**0.5)
        for step in (1, 2):
            p.grad = torch.zeros_like(p)
            optimizer.step()
            assert -p.item() == pytest.approx(first + step * wanted)
