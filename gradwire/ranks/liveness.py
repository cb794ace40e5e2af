"""Names of the ranks that are silent after a collective failed.

Every rank that fails signs in the store of the process group, which outlives single ranks. After a
short wait the ranks without a signature are named.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from gradwire.torch_internals import default_store

PATIENCE = 2.0
"""Seconds that the other ranks get to sign."""
_BEAT = 0.02
"""Seconds between two looks into the store."""


def sign_stopped(group: str, rank: int) -> None:
    """Sign in the store that `rank` of `group` is alive and has stopped."""
    _ask_store(lambda: default_store().set(_key(group, rank), "1"))


def explain_stop(group: str, rank: int, why: str) -> None:
    """Tell the other ranks of `group` why this rank stops, before it breaks the connections."""
    _ask_store(lambda: default_store().set(f"{_key(group, rank)}/why", why))


def roll_call(group: str, size: int) -> str:
    """Return a sentence on the ranks that did not sign within `PATIENCE` seconds.

    A rank signs when it fails too, so a rank that signed is alive.
    """
    answers: list[tuple[list[int], str]] = []
    _ask_store(lambda: answers.append(_find_cause(group, size)))
    if not answers:
        return "The store of the process group does not answer either: its host may be gone."
    silent, reasons = answers[0]
    if reasons:
        return reasons
    if not silent:
        return "Every rank is alive and has stopped: one of them says why in its log."
    ranks = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
    return (
        f"No word from {ranks} for {PATIENCE:g} s: killed, hanging or cut off. Start again from "
        f"the last checkpoint."
    )


def _find_cause(group: str, size: int) -> tuple[list[int], str]:
    """Return the ranks without a signature, and the reasons that ranks have left.

    Waits until there is a reason, until all ranks have signed, or until `PATIENCE` is over.
    """
    end = time.monotonic() + PATIENCE
    store = default_store()
    while True:
        silent = [r for r in range(size) if not store.check([_key(group, r)])]
        left = [r for r in range(size) if store.check([f"{_key(group, r)}/why"])]
        if left or not silent or time.monotonic() > end:
            reasons = [(r, store.get(f"{_key(group, r)}/why").decode()) for r in left]
            return silent, " ".join(f"Rank {r} has stopped: {why}." for r, why in reasons)
        time.sleep(_BEAT)


def _ask_store(ask: Callable[[], object]) -> None:
    """Run `ask` in a thread, and wait for a few seconds only.

    A store that is cut off, or that another thread holds, may answer after hours.
    """

    def work() -> None:
        with suppress(RuntimeError, ValueError):
            ask()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(2 * PATIENCE)


def _key(group: str, rank: int) -> str:
    # torchrun may keep its store over a restart. Signatures of an earlier attempt must not count.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"gradwire/stopped/{attempt}/{group}/{rank}"
