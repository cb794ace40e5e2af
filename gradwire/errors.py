"""What gradwire raises. Every message names the value, the limit and the way out."""

import difflib
from collections.abc import Iterable


class GradwireError(Exception):
    """The base of everything raised here on purpose."""


class ConfigError(GradwireError, ValueError):
    """An argument that cannot work."""


class AttachError(GradwireError, TypeError):
    """A model, or a way of wrapping it, that gradwire cannot serve."""


class MessageError(GradwireError, ValueError):
    """Bytes that are not a message of this version, or a damaged one."""


class StateError(GradwireError, ValueError):
    """A saved state that does not belong to this model or this version."""


class ExchangeError(GradwireError, RuntimeError):
    """A collective that failed, or ranks that are not doing the same thing."""


class DriftError(GradwireError, RuntimeError):
    """Replicas that are no longer bit-identical; found by `watch`."""


class VersionError(GradwireError, ImportError):
    """A package that an integration needs and that is missing, or too old."""


class LabError(GradwireError, RuntimeError):
    """A machine on which the lab cannot be built."""


def unknown(kind: str, name: object, choices: Iterable[str]) -> ConfigError:
    """The error for a name that is not in `choices`, with the nearest one offered."""
    known = sorted(choices)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}")


def one_line(error: BaseException) -> str:
    """What another library says, without its line breaks."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.200}" if text else type(error).__name__
