"""`gradwire plan` on the command line."""

import json
import sys

import pytest

pytest.importorskip("typer")

from gradwire.workbench import cli


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs `gradwire plan ARGS`; exit code, stdout, stderr."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["gradwire", "plan", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return (end.value.code, *capsys.readouterr())

    return run


SMALL = ["--params", "2M", "--step-seconds", "0.01", "--workers", "4", "--gpu", "v100"]


def test_json_is_one_object(main):
    code, out, _ = main(*SMALL, "--link", "10mbit", "--methods", "topk", "--json")
    assert code in (0, None)
    said = json.loads(out)
    assert said["recommendation"]["method"] == "topk"
    assert said["asked"]["parameters"] == 2_000_000


def test_a_table_the_reason_and_a_page(main, tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "plan.html"
    code, out, _ = main(*SMALL, "--link", "100mbit", "--html", str(page))
    assert code in (0, None)
    for words in (
        "network",
        "DDP, bf16 hook",
        "topk/union",
        "per step against",
        "note: ",
        "more ways",
    ):
        assert words in out
    assert page.is_file()


def test_the_paper_is_shown_side_by_side(main):
    _, out, _ = main("--check", "paper")
    assert len(out.splitlines()) == 17
    assert out.endswith("16 of 16 within 15%\n")
    assert "+8.7%" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "resnet50"], "workers must be given: --workers 16"),
        ([*SMALL, "--measure"], "--measure needs ranks to measure between: torchrun"),
        ([*SMALL, "--params", "many"], "params must be a number such as 25557032, 7B; got 'many'"),
        ([*SMALL, "--density", "a"], "density takes numbers with commas between, got 'a'"),
        ([*SMALL, "--link", "1xbit"], "link must be a number and kbit, mbit or gbit"),
        ([*SMALL, "--html", "plan.pdf"], "--html takes a name that ends in .html"),
        ([*SMALL, "--gpu", "h20"], "unknown gpu 'h20'. Did you mean 'h200'?"),
    ],
)
def test_mistakes_are_one_line(main, monkeypatch, args, words):
    monkeypatch.delenv("RANK", raising=False)
    code, out, err = main(*args)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
