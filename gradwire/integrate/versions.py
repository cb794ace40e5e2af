"""The oldest release of each trainer that an integration works with."""

import re
from importlib import metadata

from gradwire.errors import VersionError

OLDEST = {"lightning": "2.6", "accelerate": "1.15", "transformers": "5.22"}
"""What the extras of the package ask for; docs/integrations.md has the releases that CI tests."""


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
