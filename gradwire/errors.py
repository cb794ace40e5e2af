"""The errors that gradwire raises. Every message names the value, the limit and the way out."""

import difflib
from collections.abc import Iterable


class GradwireError(Exception):
    """Base of every error that is raised here on purpose."""


class ConfigError(GradwireError, ValueError):
    """Argument that cannot work."""


class AttachError(GradwireError, TypeError):
    """Model, or wrapper of a model, that gradwire cannot serve."""


class MessageError(GradwireError, ValueError):
    """Bytes that are not a message of this version, or a damaged message."""


class StateError(GradwireError, ValueError):
    """Saved state that does not belong to this model or this version."""


class ExchangeError(GradwireError, RuntimeError):
    """Collective that failed, or ranks that do different things."""


class DriftError(GradwireError, RuntimeError):
    """Replicas that are no longer bit-identical; found by `watch`."""


class VersionError(GradwireError, ImportError):
    """Package, or part of torch, that is needed and that is missing or of another release."""


class LabError(GradwireError, RuntimeError):
    """Machine on which the lab cannot be built."""


def unknown(kind: str, name: object, choices: Iterable[str]) -> ConfigError:
    """Return the error for a name that is not in `choices`; the error offers the nearest name."""
    known = sorted(choices)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}")


def one_line(error: BaseException) -> str:
    """Return an error of another library as text without line breaks."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.200}" if text else type(error).__name__
