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


def test_nodes_of_gpus_and_a_recipe(main):
    asked = ["--params", "2M", "--step-seconds", "0.01", "--gpu", "h100", "--json"]
    shape = ["--nodes", "2", "--gpus-per-node", "8", "--inner-link", "nvlink4"]
    _, out, _ = main(*asked, *shape, "--link", "100 Mbit/s", "--optimizer", "muon")
    said = json.loads(out)
    found = [said["asked"][name] for name in ("workers", "nodes", "inner_link", "link")]
    assert found == [16, 2, "3.6 Tbit/s", "100 Mbit/s"]
    assert said["recommendation"]["recipe"] == "muon-wan"
    assert {p["method"] for p in said["predictions"]} > {"ddp", "bf16-hook", "hsdp-bf16"}
    _, out, _ = main(*asked, "--workers", "16", "--gpus-per-node", "4", "--local-link", "pcie4")
    assert [json.loads(out)["asked"][name] for name in ("nodes", "inner_link")] == [
        4,
        "252 Gbit/s",
    ]


def test_a_model_of_ones_own_code(main, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n"
        "def build():\n    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))\n\n"
        "def real():\n    return nn.Linear(int(nn.Linear(4, 4).weight.sum() * 0) + 3, 5)\n\n"
        "def text():\n    return 'no module'\n\n"
        "def broken():\n    raise OSError('no weights')\n"
    )
    monkeypatch.chdir(tmp_path)
    asked = ["--workers", "4", "--step-seconds", "0.1", "--gpu", "h100", "--json"]
    for name, entries, optimizer in (("build", 850, "adamw"), ("real", 20, "sgd")):
        _, out, _ = main("--model", f"mine:{name}", *asked)
        said = json.loads(out)["asked"]
        assert (said["parameters"], said["optimizer"]) == (entries, optimizer)
    for name, words in (
        ("mine:text", "model 'mine:text' gave a str, not an nn.Module"),
        ("mine:broken", "model 'mine:broken' failed: OSError: no weights"),
        ("mine:nobody", "model 'mine:nobody' cannot be imported"),
        ("nowhere:build", "model 'nowhere:build' cannot be imported"),
    ):
        code, out, err = main("--model", name, *asked)
        assert (code, out) == (2, "")
        assert words in err
        assert err.count("\n") == 1


def test_the_names_of_models(main):
    _, out, _ = main("--models")
    for words in ("resnet50       25.6 million", "gpt-124m", "7b             6.74 billion"):
        assert words in out


def test_the_paper_is_shown_side_by_side(main):
    _, out, _ = main("--check", "paper")
    assert len(out.splitlines()) == 17
    assert out.endswith("16 of 16 within 15%\n")
    assert "+8.7%" in out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "resnet50"], "workers must be given: --workers 16"),
        ([*SMALL, "--gpus-per-node", "8", "--nodes", "2"], "2 nodes of 8 GPUs are 16 workers, not"),
        ([*SMALL, "--gpus-per-node", "3"], "--gpus-per-node 3 needs --nodes, or --workers that"),
        ([*SMALL, "--optimizer", "adan"], "unknown optimizer 'adan'. Did you mean 'adamw'?"),
        ([*SMALL, "--recipe", "moun"], "unknown recipe 'moun'. Did you mean 'muon'?"),
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
