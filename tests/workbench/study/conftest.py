import functools

import pytest

from gradwire.workbench.data import digits
from gradwire.workbench.study.study import Settings, repeatable

read = functools.cache(digits._read_images)


@pytest.fixture(autouse=True)
def read_once(monkeypatch):
    """The digits are text that takes two seconds to read."""
    monkeypatch.setattr(digits, "_read_images", read)


@pytest.fixture(autouse=True)
def alone():
    """Small networks on busy cores are far slower with threads."""
    with repeatable(Settings()):
        yield
