"""Every launch of a kernel test checks that its key tells Triton's compilations apart."""

import importlib.util
from collections import defaultdict

import pytest

SEEN = defaultdict(dict)


@pytest.fixture(autouse=True)
def keys_tell_compilations_apart(monkeypatch):
    if importlib.util.find_spec("triton") is None:
        return
    from tests.kernels.specialisation import specialisation  # isort: skip
    from gradwire.kernels.triton.launch import Launcher, overtakes

    launch = Launcher.__call__

    def checked(self, grid, on, *args):
        device = on.get_device()
        given = (*args, overtakes(device)) if self._overlap_launch else args
        if hasattr(self._kernel, "kwargs") or hasattr(self._kernel, "params"):
            chosen = specialisation(self._kernel, given)
            known = SEEN[self].setdefault(self.key(device, *given), chosen)
            assert known == chosen, f"{self._kernel.fn.__name__}: one key, two compilations"
        return launch(self, grid, on, *args)

    monkeypatch.setattr(Launcher, "__call__", checked)
