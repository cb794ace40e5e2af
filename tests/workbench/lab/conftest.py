import os

import pytest

from gradwire.errors import LabError
from gradwire.workbench.lab.lab import Lab


def why_not():
    """Why the real thing cannot be tried here, or nothing."""
    try:
        with Lab(2, "100mbit"):
            return ""
    except LabError as error:
        return str(error)


@pytest.fixture
def real():
    """Namespaces of this machine: one such test at a time, and only where somebody asks for it."""
    if os.environ.get("GRADWIRE_LAB") != "1":
        pytest.skip("builds namespaces as root: GRADWIRE_LAB=1 pytest -n 0 tests/workbench/lab")
    if reason := why_not():
        pytest.skip(reason)
