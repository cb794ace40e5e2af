"""Input of `gradwire plan`: counts, workers and nodes, and a model of one's own code."""

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from gradwire.errors import ConfigError, one_line


def as_flags(text: str) -> str:
    """Return the text of the library with flags in place of Python's arguments."""
    for name in ("step_seconds", "min_density", "bundle_mb"):
        flag = "--" + name.replace("_", "-")
        text = text.replace(f"{name}=", f"{flag} ").replace(name, flag)
    return text.replace("give the step seconds", "give --step-seconds as").replace(
        "give the optimizer", "give --optimizer"
    )


def count_workers(
    workers: int | None, nodes: int | None, gpus_per_node: int | None
) -> tuple[int, int | None]:
    """Return workers and nodes from two of the three numbers."""
    if gpus_per_node is None:
        if workers is None:
            raise ConfigError("workers must be given: --workers 16, or --measure under torchrun")
        return workers, nodes
    if gpus_per_node < 1:
        raise ConfigError(f"gpus_per_node must be at least 1, got {gpus_per_node}")
    if nodes is None:
        if workers is None or workers % gpus_per_node:
            raise ConfigError(
                f"--gpus-per-node {gpus_per_node} needs --nodes, or --workers that it divides"
            )
        nodes = workers // gpus_per_node
    if workers not in (None, nodes * gpus_per_node):
        raise ConfigError(
            f"{nodes} nodes of {gpus_per_node} GPUs are {nodes * gpus_per_node} workers, not "
            f"{workers}: leave out --workers"
        )
    return nodes * gpus_per_node, nodes


def imported_model(name: str) -> Any:
    """Return the module that `package.file:function` builds, on the meta device if it can."""
    place, _, attribute = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        build = functools.reduce(getattr, attribute.split("."), importlib.import_module(place))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model {name!r} cannot be imported: {one_line(error)}") from error
    finally:
        sys.path.pop(0)
    if not callable(build):
        raise ConfigError(f"model {name!r} is a {type(build).__name__}, not a function")
    try:
        with torch.device("meta"):
            module = build()
    except Exception:
        # Some code of models needs real numbers, for example to initialise weights.
        try:
            module = build()
        except Exception as error:
            raise ConfigError(f"model {name!r} failed: {one_line(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"model {name!r} gave a {type(module).__name__}, not an nn.Module")
    return module


def read_count(text: str) -> int | None:
    """Return the number of `70B` or `25557032`; None for an empty text."""
    if not text:
        return None
    units = {"k": 10**3, "m": 10**6, "b": 10**9}
    number, unit = text.strip().lower().replace(",", ""), 1
    if number and number[-1] in units:
        number, unit = number[:-1], units[number[-1]]
    try:
        return round(float(number) * unit)
    except (ValueError, OverflowError):
        raise ConfigError(f"params must be a number such as 25557032, 7B; got {text!r}") from None


def read_numbers(text: str) -> list[float]:
    """Return numbers with commas between."""
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"density takes numbers with commas between, got {text!r}") from None
