"""A long run that was stopped goes on in the middle, and ends with the same numbers."""

import errno
from dataclasses import replace

import pytest
import torch

from gradwire.errors import StateError
from gradwire.state.saved import files
from gradwire.workbench.simulate.local_sgd import LocalSgdSimulation
from gradwire.workbench.simulate.simulation import Simulation
from gradwire.workbench.study import accuracy, convergence, unfinished
from gradwire.workbench.study.run import run_study
from gradwire.workbench.study.study import Page, Settings, Study

SMALL = Settings(small=True, device="cuda" if torch.cuda.is_available() else "cpu")
RUNS = [
    (convergence, "dense"),
    (convergence, "topk/union"),
    (convergence, "dgc/allgather with momentum"),
    (accuracy, "topk-0.2"),
    (accuracy, "keep-8-half"),
]


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Few workers and steps, and a save after every epoch."""
    for study, small in ((convergence, convergence.SMALL["fnn3"]), (accuracy, accuracy.SMALL)):
        monkeypatch.setattr(study, "WORKERS", 3)
        monkeypatch.setitem(small, "batch", 200)
    monkeypatch.setattr(unfinished, "PAUSE", 0.0)
    monkeypatch.setattr(unfinished, "SAVE_SHARE", 1e9)


def cell(recipe, epochs=3):
    return {"model": "fnn3", "recipe": recipe, "seed": 1, "epochs": epochs}


def stopped(monkeypatch, study, settings, epoch=3, recipe="topk/union"):
    """The run, killed while the score of `epoch` is found."""
    scores, score = [], Simulation.score

    def killed(simulation):
        scores.append(1)
        if len(scores) == epoch:
            raise KeyboardInterrupt
        return score(simulation)

    with monkeypatch.context() as patched:
        patched.setattr(Simulation, "score", killed)
        with pytest.raises(KeyboardInterrupt):
            study.measure(settings, cell(recipe))


def counted(monkeypatch, kind):
    """Grows with every step of such a simulation."""
    steps, step = [], kind.step
    monkeypatch.setattr(kind, "step", lambda *given: steps.append(1) or step(*given))
    return steps


@pytest.mark.parametrize(("study", "recipe"), RUNS, ids=lambda x: getattr(x, "__name__", x))
def test_it_ends_with_the_rows_of_a_run_that_was_not(monkeypatch, tmp_path, capsys, study, recipe):
    steps = counted(monkeypatch, LocalSgdSimulation if recipe == "keep-8-half" else Simulation)
    whole = study.measure(SMALL, cell(recipe))
    settings = replace(SMALL, unfinished=str(tmp_path))
    stopped(monkeypatch, study, settings, recipe=recipe)
    epoch = len(steps) // 6
    assert study.measure(settings, cell(recipe)) == whole
    assert len(steps) == 7 * epoch > 7, "only the last of three epochs is done again"
    assert "goes on after epoch 2" in capsys.readouterr().err


def long(epochs=3):
    """A study of one such run."""
    return Study(
        "convergence", "T", "F", lambda _: [cell("topk/union", epochs)],
        convergence.measure, lambda rows: Page(f"{len(rows)} rows"),
    )  # fmt: skip


def test_what_is_done_leaves_nothing_behind(monkeypatch, tmp_path):
    kept = tmp_path / "convergence" / "unfinished"
    stopped(monkeypatch, convergence, replace(SMALL, unfinished=str(kept)))
    assert len(list(kept.iterdir())) == 1
    page = run_study(long(), SMALL, tmp_path, "", print)
    assert page.summary == "3 rows"
    assert list(kept.iterdir()) == []


def test_another_cell_is_not_taken_for_it(monkeypatch, tmp_path, capsys):
    settings = replace(SMALL, unfinished=str(tmp_path))
    stopped(monkeypatch, convergence, settings)
    rows = convergence.measure(settings, cell("topk/union", 2))
    assert len(rows) == 2
    assert "goes on" not in capsys.readouterr().err


def test_a_damaged_one_is_one_line_that_says_what_to_do(monkeypatch, tmp_path):
    settings = replace(SMALL, unfinished=str(tmp_path))
    stopped(monkeypatch, convergence, settings)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(StateError, match=rf"{file} cannot be read: .* Remove it, and that run"):
        convergence.measure(settings, cell("topk/union"))


def test_a_full_disk_does_not_end_the_run(monkeypatch, tmp_path, capsys):
    def full(file, fill):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "replace_file", full)
    rows = convergence.measure(replace(SMALL, unfinished=str(tmp_path)), cell("topk/union"))
    assert len(rows) == 3
    assert "cannot be written: No space left on device" in capsys.readouterr().err
