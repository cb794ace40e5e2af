"""Fifty steps on made gradients give the recorded bits.

The record is the same with torch 2.11, 2.13 and 2.15, with one and with two threads.
"""

import json

import pytest

from tests.golden import steps
from tests.golden.cases import DATA, digest, gradient

GOLDEN = json.loads((DATA / "steps.json").read_text())


def test_the_inputs():
    """Where this fails the inputs differ, and no other failure here says anything."""
    made = [gradient(rank, 49, steps.SIZE) for rank in range(4)]
    assert digest(steps.start(), *made) == GOLDEN["inputs"]


def test_every_case_is_recorded():
    assert GOLDEN["virtual"].keys() == steps.CASES.keys()
    assert [found.keys() for found in GOLDEN["real"]] == [steps.CASES.keys()] * 2


@pytest.mark.filterwarnings("ignore:a sketch of")
@pytest.mark.parametrize("name", steps.CASES)
def test_four_virtual_workers(name):
    assert steps.virtual(name, 4) == GOLDEN["virtual"][name]


@pytest.mark.filterwarnings("ignore:a sketch of")
@pytest.mark.parametrize("name", steps.THREE)
def test_three_virtual_workers(name):
    assert steps.virtual(name, 3) == GOLDEN["virtual3"][name]


@pytest.fixture(scope="module")
def found(ranks):
    return ranks.run(2, steps.real, list(steps.CASES))


@pytest.mark.parametrize("name", steps.CASES)
def test_two_real_ranks(found, name):
    assert [each[name] for each in found] == [each[name] for each in GOLDEN["real"]]
    first, second = (each[name] for each in GOLDEN["real"])
    assert first["parameters"] == second["parameters"]
    assert first["updates"] == second["updates"]
