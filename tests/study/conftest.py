import pytest

from gradwire.study.study import Settings, one_thread


@pytest.fixture(autouse=True)
def alone():
    """Small networks on busy cores are far slower with threads."""
    with one_thread(Settings()):
        yield
