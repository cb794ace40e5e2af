"""The releases that the integrations are known to work with."""

import re
import warnings
from importlib import metadata

import torch

from gradwire.errors import VersionError
from gradwire.torch_internals import KNOWN_TORCH, check_steps, torch_is_unknown

OLDEST = {"lightning": "2.6", "accelerate": "1.15", "transformers": "5.22"}
"""The oldest releases that the package's extras allow; docs/integrations.md lists tested ones."""


def note_torch(stacklevel: int = 3) -> None:
    """Warn in one line if this torch was not tested; raise VersionError if it lacks a name.

    stacklevel: of the warning; 3 names the line that called the caller of this function.
    """
    if not KNOWN_TORCH[0] <= _major_minor(torch.__version__) <= KNOWN_TORCH[1]:
        warnings.warn(torch_is_unknown(), stacklevel=stacklevel)
    check_steps()


def require(package: str) -> None:
    """Raise VersionError unless `package` is installed and new enough."""
    oldest = OLDEST[package]
    fix = f"pip install '{package}>={oldest}'"
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise VersionError(
            f"gradwire.integrate.{package} needs {package} {oldest} or newer, and there is none: "
            f"{fix}"
        ) from None
    if _major_minor(installed) < _major_minor(oldest):
        raise VersionError(
            f"gradwire.integrate.{package} needs {package} {oldest} or newer, got {installed}: "
            f"{fix}"
        )


def _major_minor(version: str) -> tuple[int, ...]:
    """Return the major and minor number, because a patch release changes no interface."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
