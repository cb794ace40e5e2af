"""Silent ranks are named after a failure, and a store that is gone holds no rank up."""

import threading
import time

import pytest
import torch.distributed as dist

from gradwire.ranks import liveness


@pytest.fixture
def store(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(liveness, "default_store", lambda: store)
    monkeypatch.setattr(liveness, "PATIENCE", 0.5)
    return store


def test_those_who_did_not_sign_are_named(store):
    liveness.sign_stopped("g", 0)
    liveness.sign_stopped("other", 1)
    assert liveness.roll_call("g", 2).startswith(
        "No word from rank 1 for 0.5 s: killed, hanging or"
    )
    assert liveness.roll_call("g", 3).startswith("No word from ranks 1, 2 for")


def test_those_who_sign_late_are_waited_for(store):
    liveness.sign_stopped("g", 0)
    late = threading.Timer(0.05, liveness.sign_stopped, ("g", 1))
    late.start()
    assert liveness.roll_call("g", 2).startswith("Every rank is alive and has stopped")


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

    monkeypatch.setattr(liveness, "default_store", broken)
    monkeypatch.setattr(liveness, "PATIENCE", 0.2)
    begin = time.monotonic()
    liveness.sign_stopped("g", 0)
    assert "store of the process group does not answer" in liveness.roll_call("g", 2)
    assert time.monotonic() - begin < 5
    done.set()
