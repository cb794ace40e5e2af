"""Who is silent after a collective failed: asked of the store, which outlives the ranks."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from gradwire.torch_internals import default_store

PATIENCE = 2.0
BEAT = 0.02


def sign(group: str, rank: int) -> None:
    """Leaves word that `rank` of `group` is alive and has stopped."""
    _briefly(lambda: default_store().set(_key(group, rank), "1"))


def roll_call(group: str, size: int) -> str:
    """A sentence on the ranks that have not signed within `PATIENCE`; who signs has failed too."""
    found: list[list[int]] = []
    _briefly(lambda: found.append(_silent(group, size)))
    if not found:
        return "The store of the process group does not answer either: its host may be gone."
    if not found[0]:
        return "Every rank is alive and has stopped: one of them says why in its log."
    ranks = f"rank{'s' * (len(found[0]) > 1)} {', '.join(map(str, found[0]))}"
    return (
        f"No word from {ranks} for {PATIENCE:g} s: killed, hanging or cut off. Start again from "
        f"the last checkpoint."
    )


def _silent(group: str, size: int) -> list[int]:
    end = time.monotonic() + PATIENCE
    while True:
        silent = [r for r in range(size) if not default_store().check([_key(group, r)])]
        if not silent or time.monotonic() > end:
            return silent
        time.sleep(BEAT)


def _briefly(ask: Callable[[], object]) -> None:
    """Asks the store in a thread: cut off, or held by another thread, it may answer after hours."""

    def work() -> None:
        with suppress(RuntimeError, ValueError):
            ask()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(2 * PATIENCE)


def _key(group: str, rank: int) -> str:
    # torchrun's store may be the same after a restart: what was signed before must not count.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"gradwire/stopped/{attempt}/{group}/{rank}"
