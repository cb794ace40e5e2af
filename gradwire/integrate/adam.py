"""A warning for sparse methods in front of Adam.

A sparse method sends an entry late, as the sum of several steps. Adam divides an
entry by its usual size, which such sums change.
"""

import logging
import warnings
from collections.abc import Iterable

from gradwire.exchange import EXCHANGES
from gradwire.state.state import State

log = logging.getLogger("gradwire")

HARMFUL = 0.1
"""The density below which a loss has been seen to stay high. From it on there is a log line."""
_ADVICE = (
    'use gradwire.local_steps(model, gradwire.optim.muon(model, lr=...), recipe="muon"), or SGD '
    "(docs/adam.md)"
)


def warn_of_adam(state: State, optimizers: Iterable[object]) -> None:
    """Warn in one line if the method leaves entries out and an optimiser is like Adam.

    The first steps of a language model do not show the harm: the loss falls, and stays too high.
    """
    name = next((name for name in map(_adam_like, optimizers) if name), "")
    if not name or not _is_sparse(state):
        return
    method = "auto" if state.auto is not None else state.config.method
    if state.auto is None and state.config.density >= HARMFUL:
        log.info("%s after method=%r: if the loss stays high, %s", name, method, _ADVICE)
        return
    warnings.warn(
        f"{name} after method={method!r}: entries arrive late, as sums that {name} divides by "
        f"their size. At density 0.01 a GPT of 10.7 million parameters ended 43 % above the "
        f"loss of dense AdamW. Instead, {_ADVICE}",
        stacklevel=2,
    )


def note_adam(state: State) -> None:
    """Write one line to the log if the method would harm an optimiser that is like Adam.

    It is for places that do not see the optimiser.
    """
    if _is_sparse(state) and (state.auto is not None or state.config.density < HARMFUL):
        log.info("method=%r is not for Adam: with it, %s", state.config.method, _ADVICE)


def _is_sparse(state: State) -> bool:
    """Return True if the method leaves entries out, or if "auto" may choose one that does."""
    config = state.config
    sends_all = config.method == "dense" or bool(EXCHANGES[config.exchange].whole)
    return (config.density < 1 and not sends_all) or state.auto is not None


def _adam_like(optimizer: object) -> str:
    """Return the name of an optimiser that is like Adam; an empty string for any other."""
    # Trainers wrap optimisers, some of them more than once.
    for _ in range(4):
        optimizer = getattr(optimizer, "optimizer", optimizer)
    name = type(optimizer).__name__
    groups = getattr(optimizer, "param_groups", [])
    alike = "adam" in name.lower() or any({"betas", "eps"} <= set(group) for group in groups)
    return name if alike else ""
