"""The service is started for the ranks of a GPU, and ended; a script stands in for it."""

from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch

from gradwire.errors import LabError
from gradwire.workbench.lab.mps import CONTROL, LOGS, PIPES, shared_gpu

LAB = SimpleNamespace(inside=lambda rank: nullcontext())


@pytest.fixture
def heard(monkeypatch, tmp_path):
    """A machine with a GPU; what its control program was told."""
    log = tmp_path / "heard"
    control = tmp_path / CONTROL
    control.write_text(f'#!/bin/sh\necho "$1$(/bin/cat) ${PIPES}" >> {log}\n')
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return log


def test_it_runs_while_the_ranks_do_and_ends_after_an_error(heard):
    with suppress(KeyError), shared_gpu(LAB) as environment:
        assert heard.read_text() == f"-d {environment[PIPES]}\n"
        raise KeyError
    assert heard.read_text() == f"-d {environment[PIPES]}\nquit {environment[PIPES]}\n"
    assert environment.keys() == {PIPES, LOGS}


def test_without_a_gpu_or_with_the_users_own_nothing_is_started(heard, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 0)
        with shared_gpu(LAB) as environment:
            assert environment == {}
    monkeypatch.setenv(PIPES, "/somewhere")
    with shared_gpu(LAB) as environment:
        assert environment == {}
    assert not heard.exists()


def test_a_service_that_is_not_there_or_does_not_start_is_named(heard):
    (heard.parent / CONTROL).write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(LabError, match=f"{CONTROL} does not work"), shared_gpu(LAB):
        pass
    (heard.parent / CONTROL).unlink()
    with pytest.raises(LabError, match="which is not in PATH"), shared_gpu(LAB):
        pass
