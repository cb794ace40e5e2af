"""The picture of a plan: no hidden lines, labels apart, your own link marked."""

import itertools
import re

import pytest

import gradwire
from gradwire.workbench.report.plan_chart import (
    ALIKE,
    MOST_LINES,
    link_rates,
    rate_curves,
    render_rates,
    spread,
)
from gradwire.workbench.report.plan_page import headline
from gradwire.workbench.report.plan_text import plan_table, prediction_cells, shown_predictions


@pytest.fixture(scope="module")
def plan():
    return gradwire.plan("gpt-124m", workers=8, step_seconds=0.1, link="25Gbps", gpu="h100")


def test_labels_that_would_meet_are_moved_apart():
    assert spread([0.1, 0.5, 0.9], 0.1) == pytest.approx([0.1, 0.5, 0.9])
    assert spread([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    places = spread([0.0, 0.02, 0.09, 0.16, 0.8], 0.1)
    assert all(b - a > 0.0999 for a, b in itertools.pairwise(places))
    assert places[-1] == pytest.approx(0.8)


def test_every_line_is_seen_and_has_a_colour_of_its_own(plan):
    curves = rate_curves(plan, link_rates(plan))
    assert 3 <= len(curves) <= MOST_LINES
    assert len({c.colour for c in curves}) == len(curves)
    assert [c.is_chosen for c in curves].count(True) == 1
    for i, a in enumerate(curves):
        for b in curves[:i]:
            pairs = zip(a.seconds, b.seconds, strict=True)
            assert max(max(x / y, y / x) for x, y in pairs) >= ALIKE


def test_the_own_link_is_in_the_middle_and_named(plan):
    pytest.importorskip("matplotlib")
    rates = link_rates(plan)
    assert rates[len(rates) // 2] == pytest.approx(25e9)
    text = render_rates(plan)
    assert "your link, 25 Gbit/s" in text
    for curve in rate_curves(plan, rates):
        assert curve.label in text
    assert "e+" not in re.sub("<[^>]*>", "", text)


def test_the_title_answers_the_question(plan):
    best = plan.recommendation
    assert headline(plan).startswith("Use recipe muon: ")
    assert headline(plan).endswith(" ms")
    fast = gradwire.plan("resnet50", workers=4, step_seconds=1.0, link="1tbit", gpu="h100")
    assert headline(fast).startswith("Do not compress: ")
    assert best.dense.way.sends_all


def test_what_ruins_the_optimiser_is_shown_once_and_says_so(plan):
    sparse = [p for p in shown_predictions(plan) if p.way.method == "topk" and not p.way.recipe]
    assert len(sparse) == 1
    assert prediction_cells(plan, sparse[0], (1e-3, "ms"))[0].endswith(", not with AdamW")
    assert plan_table(plan).columns[-1].header == "memory"
