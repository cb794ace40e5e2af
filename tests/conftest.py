import os

import pytest

from tests.ranks import Ranks

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers that take all cores each wait for each other. Read when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks(4)
    yield pool
    pool.close()
