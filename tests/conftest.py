import multiprocessing
import os
import sys

import pytest

from tests.rank_pool import PRELOAD, Ranks

# Packages are installed without their bytecode: processes that tests start would compile all they
# import anew, and time out.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that take all cores each wait for each other. Read when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture
def forked(monkeypatch):
    """Workers of `launch` come from a server that has imported torch, not from a new Python each.

    They take that server for a parent that is gone: not for work that asks whether to stop.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    monkeypatch.setattr("torch.multiprocessing.get_context", lambda method: context)
