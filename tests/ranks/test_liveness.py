"""Who is silent after a failure is named, and a store that is gone holds nobody up."""

import threading
import time

import pytest
import torch.distributed as dist

from gradwire.ranks import liveness as roll


@pytest.fixture
def store(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(roll, "default_store", lambda: store)
    monkeypatch.setattr(roll, "PATIENCE", 0.2)
    return store


def test_those_who_did_not_sign_are_named(store):
    roll.sign("g", 0)
    roll.sign("other", 1)
    assert roll.roll_call("g", 2).startswith("No word from rank 1 for 0.2 s: killed, hanging or")
    assert roll.roll_call("g", 3).startswith("No word from ranks 1, 2 for")


def test_those_who_sign_late_are_waited_for(store):
    roll.sign("g", 0)
    late = threading.Timer(0.05, roll.sign, ("g", 1))
    late.start()
    assert roll.roll_call("g", 2).startswith("Every rank is alive and has stopped")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", ["gone", "closed", "mute"])
def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch, kind):
    done = threading.Event()

    def broken():
        if kind == "gone":
            raise RuntimeError("Connection reset by peer")
        if kind == "closed":
            raise ValueError("Default process group has not been initialized")
        done.wait()
        raise RuntimeError("at last")

    monkeypatch.setattr(roll, "default_store", broken)
    monkeypatch.setattr(roll, "PATIENCE", 0.2)
    begin = time.monotonic()
    roll.sign("g", 0)
    assert "store of the process group does not answer" in roll.roll_call("g", 2)
    assert time.monotonic() - begin < 5
    done.set()
