import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks(4)
    yield pool
    pool.close()
