import pytest

from tests.rank_pool import Ranks


@pytest.fixture(scope="module")
def nccl():
    pool = Ranks(2, backend="nccl")
    yield pool
    pool.close()
