"""A virtual environment with one torch release, the trainers, and the packages of the tests."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTING = ("numpy", "hypothesis>=6.100", "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6")
TRAINERS = ("lightning", "accelerate", "transformers", "ray[train]")


def build(folder: Path, torch: str) -> Path:
    """Return the environment's Python; build the environment unless it is there already."""
    python = folder.absolute() / "bin" / "python"
    ready = folder / ".ready"
    if ready.exists():
        return python
    print(f"torch {torch}: building {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    _install(python, f"torch=={torch}", *TESTING)
    _install(python, f"torch=={torch}", *trainers())
    ready.touch()
    return python


def trainers() -> list[str]:
    """Return the trainers, in the releases of constraints.txt.

    The pins of torch and triton there belong to one torch release, and must not apply.
    """
    pins = dict(re.findall(r"^(\w+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    return [f"{name}=={pins[name.partition('[')[0]]}" for name in TRAINERS]


def _install(python: Path, *packages: str) -> None:
    # A release takes gigabytes, so no cache of it, and no bytecode of modules never imported.
    options = ("--quiet", "--no-compile", "--no-cache-dir", "--disable-pip-version-check")
    subprocess.run([str(python), "-m", "pip", "install", *options, *packages], check=True)
