import pytest

from gradwire.study.study import Settings, repeatable


@pytest.fixture(autouse=True)
def alone():
    """Small networks on busy cores are far slower with threads."""
    with repeatable(Settings()):
        yield
