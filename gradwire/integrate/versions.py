"""The releases that the integrations are known to work with."""

import re
import warnings
from importlib import metadata

import torch

from gradwire.errors import VersionError
from gradwire.torch_internals import KNOWN_TORCH, check_steps, torch_is_unknown

OLDEST = {"lightning": "2.6", "accelerate": "1.15", "transformers": "5.22"}
"""What the extras of the package ask for; docs/integrations.md has the releases that CI tests."""


def note_torch() -> None:
    """Warn, in one line, of a torch that was not tested; raise for one that lacks a name."""
    if not KNOWN_TORCH[0] <= _numbers(torch.__version__) <= KNOWN_TORCH[1]:
        warnings.warn(torch_is_unknown(), stacklevel=3)
    check_steps()


def require(package: str) -> None:
    """Raises VersionError unless `package` is installed and new enough."""
    oldest = OLDEST[package]
    fix = f"pip install '{package}>={oldest}'"
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise VersionError(
            f"gradwire.integrate.{package} needs {package} {oldest} or newer, and there is none: "
            f"{fix}"
        ) from None
    if _numbers(found) < _numbers(oldest):
        raise VersionError(
            f"gradwire.integrate.{package} needs {package} {oldest} or newer, got {found}: {fix}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor: what comes after does not change an interface."""
    return tuple(int(n) for n in re.findall(r"\d+", version)[:2])
