"""The page holds everything, and nothing that runs."""

import re

import pytest

import gradwire
from gradwire.errors import ConfigError
from gradwire.workbench.report.plan_text import plan_table, shown_predictions


@pytest.fixture(scope="module")
def plan():
    return gradwire.plan(
        params=30_000_000, step_seconds=0.2, workers=8, nodes=2, link="1gbit", gpu="v100"
    )


def test_the_page_has_a_bar_a_method_and_is_self_contained(plan, tmp_path):
    pytest.importorskip("matplotlib")
    from gradwire.workbench.report.plan_page import write_plan_page

    text = write_plan_page(plan, tmp_path / "new" / "plan.html").read_text()
    assert text.count('class="bar"') == len(shown_predictions(plan))
    assert "topk/hierarchical" in text
    assert "DDP, bf16 hook (PyTorch)" in text
    assert "your link, 1 Gbit/s" in text
    assert plan.recommendation.reason[1:] in text
    assert "<script" not in text
    assert not re.search(r'(?:src|href)="(?!#)', text.replace("xlink:href=", "href="))


def test_names_are_escaped(tmp_path):
    pytest.importorskip("matplotlib")
    import torch

    from gradwire.workbench.report.plan_page import render_plan

    file = tmp_path / "<b>&.pt"
    torch.save([[100_000]], file)
    plan = gradwire.plan(file, step_seconds=0.1, workers=2, gpu="v100", methods=("topk",))
    text = render_plan(plan)
    assert "&lt;b&gt;&amp;" in text
    assert "<b>&" not in text


def test_a_page_needs_a_name(plan, tmp_path):
    from gradwire.workbench.report.plan_page import write_plan_page

    with pytest.raises(ConfigError, match="--html takes a name"):
        write_plan_page(plan, tmp_path / "plan.txt")


def test_the_table_has_one_line_a_method_or_all(plan):
    shown = [p.way.name for p in shown_predictions(plan)]
    assert plan_table(plan).row_count == len(shown) == len(set(shown))
    assert {"ddp", "bf16-hook", "hsdp-bf16", "topk/union", "topk/hierarchical"} < set(shown)
    # What is never recommended is shown with --all only.
    assert not {"gaussiank/allgather", "topk/gs-sgd", "dense-bf16", "dgc", "muon"} & set(shown)
    assert plan_table(plan, everything=True).row_count == len(plan.predictions)
    assert plan.recommendation.prediction in shown_predictions(plan)
