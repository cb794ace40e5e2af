import dataclasses
import subprocess
import sys

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from gradwire.compress import METHODS
from gradwire.exchange import EXCHANGES
from gradwire.recipes import RECIPES
from gradwire.workbench import cli
from gradwire.workbench.cli.app import app
from gradwire.workbench.models import TRAINABLE
from gradwire.workbench.train.options import Options
from tests.workbench.report.runs import write_run


def gradwire(*args, columns="200"):
    return CliRunner().invoke(app, args, env={"COLUMNS": columns, "TERM": "dumb"})


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs `gradwire ARGS` as the console script does; exit code, stdout, stderr."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["gradwire", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return (end.value.code, *capsys.readouterr())

    return run


def test_methods_lists_methods_exchanges_and_recipes_with_their_summaries():
    said = gradwire("methods").output
    for entries in (METHODS, EXCHANGES, RECIPES):
        for name, entry in entries.items():
            assert name in said
            assert entry.summary[:40] in said


def test_the_help_of_train_teaches():
    said = " ".join(gradwire("train", "--help").output.replace("│", " ").split())
    assert "Examples:" in said
    assert said.count("gradwire train --") >= 3
    assert "torchrun --nproc-per-node" in said
    for name in TRAINABLE:
        assert name in said
    assert f"Default: {Options.density}." in said


@pytest.mark.parametrize("words", [[], ["train"], ["plan"], ["bench"], ["bench", "step"], ["lab"]])
def test_help_shows_no_type_of_an_option_that_takes_nothing(words):
    said = gradwire(*words, "--help").output
    assert "Show this message" in said
    assert "bool" not in said.lower()


def test_every_option_of_train_has_a_help_line():
    from typer.main import get_command

    train = get_command(app).commands["train"]
    silent = [p.name for p in train.params if not getattr(p, "help", None)]
    assert silent == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "--model", "lenet"], "unknown model 'lenet'. Did you mean 'lenet5'?"),
        (["train", "--density", "4"], "density must be in (0, 1], got 4.0."),
        (["train", "--warmup", "a,b"], "--warmup takes numbers with commas between, got 'a,b'."),
        (["train", "--resume", "nowhere"], "nowhere is not a run folder"),
        (["train", "--resume", "x", "--out", "y"], "leave --out and --overwrite out"),
        (["report", "nowhere"], "nowhere is not a run folder: it has no config.json."),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(main, args, words):
    code, out, err = main(*args)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_mistake_found_by_the_workers_is_one_line_too_and_leaves_nothing(main, forked, tmp_path):
    out = tmp_path / "run"
    given = ["--data-dir", str(tmp_path), "--workers", "1", "--device", "cpu"]
    code, _, err = main("train", *given, "--out", str(out))
    assert code == 2
    assert err.startswith("error: no train-images-idx3-ubyte")
    assert not out.exists()


def test_report_writes_the_page_again(main, tmp_path):
    pytest.importorskip("matplotlib")
    folder = write_run(tmp_path / "a[b]", compare=("dense",))
    code, out, _ = main("report", str(folder))
    assert code in (0, None)
    assert "against 95.6 % dense" in out
    assert f"{folder}/report.html" in out
    assert (folder / "report.html").is_file()


def test_version(main):
    from gradwire.version import __version__

    assert main("--version")[1] == f"gradwire {__version__}\n"


def test_without_typer_one_line_says_what_to_install(main, monkeypatch):
    for name in [n for n in sys.modules if n.startswith("gradwire.workbench.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    code, out, err = main("methods")
    assert code == "error: the command line needs typer: pip install 'gradwire[cli]'"
    assert (out, err) == ("", "")


def test_doctor_finds_a_backend_that_works_and_measures_the_link(main, forked):
    code, out, err = main("doctor")
    assert code in (0, None), err
    for words in ("mlxtend", "gloo  works", "between 2 ranks", "Gbit/s"):
        assert words in out


def test_study_lists_measures_and_reports(main, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from gradwire.workbench.study import STUDIES, bounds

    said = gradwire("study", "list").output
    assert all(name in said for name in STUDIES)
    monkeypatch.setattr(bounds, "cells", lambda settings: [{"u": "normal"}])
    monkeypatch.setitem(STUDIES, "bounds", dataclasses.replace(bounds.STUDY, cells=bounds.cells))
    code, out, _ = main("study", "bounds", "--small", "--out", str(tmp_path))
    assert code in (0, None)
    assert "bounds  1/1  normal" in out
    assert f"report  {tmp_path}/report.html" in out
    (tmp_path / "report.html").unlink()
    assert "report.html" in main("report", str(tmp_path))[1]
    assert "What top-k leaves behind" in (tmp_path / "report.html").read_text()


def test_a_study_that_does_not_exist_names_the_nearest(main):
    code, _, err = main("study", "bound")
    assert code == 2
    assert "unknown study 'bound'. Did you mean 'bounds'?" in err


@pytest.mark.parametrize("moment", [0.1, 0.3])  # torch takes an exception there for no numpy
def test_ctrl_c_during_the_imports_is_one_line(moment):
    code = (
        "import os, signal, sys, threading\n"
        f"threading.Timer({moment}, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "sys.argv = ['gradwire', 'train']\n"
        "from gradwire.workbench.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
