"""The house: the first folders are the path, and the library stands without its workbench."""

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire

PACKAGE = Path(gradwire.__file__).parent
MOST = 25
"""Entries of the package's own folder."""
LOADED, SECONDS = 100, 0.2
"""The most modules after `from gradwire import *`, and the most processor time beside torch."""
ASKS = {("plan/given.py", "gradwire.workbench.models.workload")}
"""Where the library asks the workbench, while a function runs: `gradwire.plan`, for a name."""


def python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_first_folders_are_the_path_in_order():
    names = [path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(names) <= MOST
    folders = sorted(name for name in names if (PACKAGE / name).is_dir())
    assert folders[:4] == ["accumulate", "compress", "encode", "exchange"]


def test_the_library_never_imports_the_workbench():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith("workbench/") or place == "__main__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # A name that is imported by its text.
                names = [node.value] if node.value.startswith("gradwire.workbench") else []
            found |= {(place, n) for n in names if n.startswith("gradwire.workbench")}
    assert {(p, n) for p, n in found if (p, n.rpartition(".")[0]) not in ASKS} == ASKS


def test_what_is_loaded_with_the_public_names():
    loaded = python(
        "import sys\nfrom gradwire import *\n"
        "print(*(m for m in sys.modules if m.split('.')[0] == 'gradwire'))"
    )
    assert not [name for name in loaded if name.startswith("gradwire.workbench")]
    assert len(loaded) <= LOADED


def test_the_public_names_are_there_at_once():
    code = (
        "import time, torch.distributed, torch.nn.parallel\nstart = time.process_time()\n"
        "from gradwire import *\nprint(time.process_time() - start)"
    )
    # Compiled by the first of them.
    assert min(float(*python(code)) for _ in range(4)) <= SECONDS


def test_a_method_is_loaded_when_it_is_used():
    loaded = python(
        "import sys, torch, gradwire\n"
        "gradwire.VirtualCluster(2, density=0.1).average([torch.ones(99), torch.ones(99)])\n"
        "print(*(m for m in sys.modules if m.startswith('gradwire.')))"
    )
    assert "gradwire.compress.topk" in loaded
    assert "gradwire.compress.randk" not in loaded
    assert "gradwire.exchange.gtopk" not in loaded


@pytest.mark.parametrize("command", ["import gradwire", "gradwire --version"])
def test_torch_is_not_needed_before_something_is_used(command):
    code = f"{command}\n"
    if command.startswith("gradwire"):
        code = (
            "import runpy, sys\nsys.argv = ['gradwire', '--version']\n"
            "runpy.run_module('gradwire', run_name='__main__')\n"
        )
    assert "torch" not in python(f"{code}\nimport sys\nprint(*sys.modules)")


def test_functions_stay_functions_when_packages_of_their_names_are_loaded():
    said = python(
        "import gradwire, gradwire.plan.ways, gradwire.compress.topk\n"
        "print(type(gradwire.plan).__name__, type(gradwire.compress).__name__)\n"
        "from gradwire import plan, compress\n"
        "print(type(plan).__name__, type(compress).__name__)"
    )
    assert said == ["function"] * 4


def test_the_module_is_pickled_by_name():
    assert pickle.loads(pickle.dumps(gradwire)) is gradwire


def test_a_module_is_there_after_importing_the_package_alone():
    said = python(
        "import gradwire\nprint(gradwire.errors.ConfigError.__name__, hasattr(gradwire, 'nobody'))"
    )
    assert said == ["ConfigError", "False"]
