"""`gradwire lab run`: its one-line errors, and its exit code."""

import os
import sys

import pytest

pytest.importorskip("typer")

from gradwire.workbench import cli
from gradwire.workbench.lab import lab as plumbing
from gradwire.workbench.lab import processes
from tests.workbench.lab.conftest import real  # noqa: F401


@pytest.fixture
def main(monkeypatch, capfd):
    """Runs `gradwire lab run ARGS`; exit code, stdout, stderr."""
    # Handlers of a test would outlive it.
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["gradwire", "lab", "run", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return (end.value.code, *capfd.readouterr())

    return run


@pytest.fixture
def root(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    pytest.importorskip("pyroute2")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--link", "fast", "true"], "error: link must be a number and kbit"),
        (["--ranks", "1", "true"], "error: ranks must be from 2"),
        (["--latency", "5", "true"], "error: latency must be a number and s, ms or us"),
        (["no-such-program"], "error: command 'no-such-program' is not found"),
    ],
)
def test_a_mistake_is_one_line(main, root, args, said):
    code, out, err = main(*args)
    assert (code, out) == (2, "")
    assert err.startswith(said)
    assert err.count("\n") == 1


def test_without_root_is_one_line(main, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, out, err = main("--", "python", "x.py")
    assert (code, out) == (2, "")
    assert err.startswith("error: the lab needs root")
    assert err.count("\n") == 1


def test_options_after_the_command_are_its_own(main, root, monkeypatch):
    """And Ctrl-C is one line and 130."""
    seen = []

    def stop(lab, command):
        seen.append((lab.ranks, list(command)))
        raise KeyboardInterrupt

    monkeypatch.setattr(plumbing.Lab, "__enter__", lambda self: self)
    monkeypatch.setattr(plumbing.Lab, "close", lambda self: None)
    monkeypatch.setattr(plumbing.Lab, "describe", lambda self: "")
    monkeypatch.setattr(processes, "run_ranks", stop)
    for dashes in ([], ["--"]):
        code, _, err = main("--ranks", "3", *dashes, "python3", "x.py", "--ranks", "9", "-h")
        assert (code, err) == (130, "error: stopped; the lab is removed.\n")
    assert seen == [(3, ["python3", "x.py", "--ranks", "9", "-h"])] * 2


def test_it_says_what_it_measured_and_ends_as_the_ranks_did(main, real):  # noqa: F811
    code, out, _ = main("--ranks", "2", "--link", "20mbit", "--", "sh", "-c", "exit 5")
    assert code == 5
    assert out.startswith("lab: 2 ranks, asked 20 Mbit/s, measured ")
