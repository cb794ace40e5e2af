"""Random-k: k entries drawn without looking at their values."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradwire import kernels
from gradwire.compress.draws import draw_counter
from gradwire.compress.method import Method
from gradwire.errors import ConfigError
from gradwire.hashing import hash_words
from gradwire.kernels.side_stream import SideStream, side_stream_pays
from gradwire.types import Memory, Scan, Sparse


def randk(
    u: Tensor,
    k: int,
    memory: Memory,
    scan: Scan | None = None,
    *,
    shared: bool = False,
    seed: int = 0,
    feedback: bool = True,
    unbiased: bool = False,
) -> Sparse:
    """k entries drawn uniformly, by every rank its own; what is not drawn waits in the residual.

    Rand_k of Stich et al. (2018): E ||u - C(u)||^2 = (1 - k/d) ||u||^2.
    shared: True: every rank draws the same entries, so no indices travel. An entry then comes from
    all ranks at once, after d/k steps on average, which large learning rates do not survive.
    feedback: False: entries that are not drawn are forgotten. This is the one exemption from the
    law.
    unbiased: True: d/k times the values are sent, so E C(u) = u. There is then no feedback, because
    feedback would add up the excess. memory["draws"]: the number of draws so far, on the device.
    Draw n of (seed, bundle, rank) is the same on every machine and after every resume.
    """
    prefetched = memory.prefetched.pop("drawn", None)
    indices, count = prefetched.result() if prefetched else _draw(u, k, memory, shared, seed)
    values = kernels.pick(u, indices)
    if unbiased and k:
        values = values * (memory.real_size(u) / k)
    return Sparse(indices, values, count, u.numel(), common=shared)


def prefetch_draw(u: Tensor, k: int, memory: Memory, options: Mapping[str, Any]) -> None:
    """Begin the draw while u is being made, because making u takes longer."""
    if side_stream_pays(u.numel(), u.device):
        shared, seed = options["shared"], options["seed"]
        drawn = SideStream("draw", u.device, lambda: _draw(u, k, memory, shared, seed), urgent=True)
        memory.prefetched["drawn"] = drawn


def _draw(u: Tensor, k: int, memory: Memory, shared: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Return the drawn indices and their number, and count the draw."""
    draws = draw_counter(memory, u.device)
    stream = hash_words(seed, memory.bundle, 0 if shared else memory.rank + 1)
    return kernels.draw(k, memory.real_size(u), u.numel(), draws, stream, *memory.places)


def keeps_rest(options: Mapping[str, Any]) -> bool:
    """Return True if these options feed back the entries that were not drawn."""
    return bool(options["feedback"]) and not options["unbiased"]


def check_randk(options: Mapping[str, Any], user_options: Mapping[str, Any]) -> None:
    """Raise ConfigError if one option excludes another."""
    # feedback is True by default, and unbiased then turns it off.
    if options["unbiased"] and user_options.get("feedback"):
        raise ConfigError(
            "randk: unbiased=True excludes feedback=True, which would send d/k times what is kept "
            "again and again: leave one of them out"
        )


METHOD = Method(
    randk,
    common=lambda options: bool(options["shared"]),
    keeps_rest=keeps_rest,
    block=lambda k, size, device, options: 0,
    prefetch=prefetch_draw,
    check=check_randk,
)
