"""The page holds everything, and nothing that runs."""

import re

import pytest

import gradwire
from gradwire.errors import ConfigError
from gradwire.workbench.report.plan_text import as_table, shown


@pytest.fixture(scope="module")
def found():
    return gradwire.plan(
        params=30_000_000, step_seconds=0.2, workers=8, nodes=2, link="1gbit", gpu="v100"
    )


def test_the_page_has_a_bar_a_method_and_is_self_contained(found, tmp_path):
    pytest.importorskip("matplotlib")
    from gradwire.workbench.report.plan_page import write_page

    text = write_page(found, tmp_path / "new" / "plan.html").read_text()
    assert text.count('class="bar"') == len(shown(found))
    assert "gaussiank" in text
    assert "topk/hierarchical" in text
    assert "link, Mbit/s" in text
    assert found.recommendation.reason in text
    assert "<script" not in text
    assert not re.search(r'(?:src|href)="(?!#)', text.replace("xlink:href=", "href="))


def test_names_are_escaped(tmp_path):
    pytest.importorskip("matplotlib")
    import torch

    from gradwire.workbench.report.plan_page import page

    file = tmp_path / "<b>&.pt"
    torch.save([[100_000]], file)
    odd = gradwire.plan(file, step_seconds=0.1, workers=2, gpu="v100", methods=("topk",))
    text = page(odd)
    assert "&lt;b&gt;&amp;" in text
    assert "<b>&" not in text


def test_a_page_needs_a_name(found, tmp_path):
    from gradwire.workbench.report.plan_page import write_page

    with pytest.raises(ConfigError, match="--html takes a name"):
        write_page(found, tmp_path / "plan.txt")


def test_the_table_has_one_line_a_method_or_all(found):
    lines = as_table(found).row_count
    assert lines == len({p.way.method for p in found.predictions}) - 2 + 2 + len(
        {p.way.exchange for p in found.predictions if p.way.method == "topk"}
    )
    assert as_table(found, everything=True).row_count == len(found.predictions)
    assert found.recommendation.prediction in shown(found)
