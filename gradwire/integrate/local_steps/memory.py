"""Memory that local steps hold on a rank, beside the weights and the optimiser."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradwire.accumulate import Bundle
from gradwire.accumulate.schedule import entry_count
from gradwire.exchange import EXCHANGES

if TYPE_CHECKING:
    from gradwire.integrate.local_steps.handle import LocalSteps

_HOST = "in host memory"
_ALWAYS = ("x", "outer momentum", "residual", "owned part")
_CHOSEN, _DELIVERED, _UNPACKED = 12, 8, 8
"""Bytes of an entry that is sent: while its bundle is exchanged (index, value, rounded value), from
then until an update lands later, and in the message of each rank."""
_OWNED = 5
"""Bytes of an entry of the part that this rank owns: its rounding, and a flag against padding."""


def memory_use(local: "LocalSteps") -> dict[str, int]:
    """Return the bytes by their use.

    All but the first are on the weights' device. The residual counts with what its bundles keep
    beside it. The last four are of an exchange, which holds the differences of one bundle, whose
    memory the update takes, and the entries of all ranks. With overlap those of a fragment are
    there until it lands, and its weights too. With offload two bundles' x and momentum are there.
    """
    bundles = local.bundles
    fragments = [local.bundles_of(number) for number in range(local.fragments)]
    at_once = fragments if local.overlap else [[bundle] for bundle in bundles]
    kept = [0] * local.fragments
    for name, part in local.parts.read().items():
        kept[local.fragment_of[name]] += part.nbytes if local.overlap else 0
    largest = max((_sent(local, [bundle]) for bundle in bundles), default=0)
    entries = (_CHOSEN + _UNPACKED * local.group.size) * largest
    if local.overlap:
        entries += _DELIVERED * max(_sent(local, fragment) for fragment in fragments)
    owned = EXCHANGES[local.config.exchange].owns_parts
    x, momentum = (sum(4 * v.numel() for v in some.values()) for some in local.vectors)
    size = sum(bundle.size for bundle in bundles)
    largest_size = max((bundle.size for bundle in bundles), default=0)
    differences = [4 * sum(bundle.size for bundle in some) for some in at_once]
    return {
        _HOST: x + momentum if local.offload else 0,
        "x": 0 if local.offload else x,
        "outer momentum": 0 if local.offload else momentum,
        "residual": local.memory_bytes,
        "owned part": _OWNED * size // local.group.size if owned else 0,
        "difference and update": max(differences, default=0),
        "weights at the difference": max(kept),
        "entries that are sent": entries,
        "x and momentum on their way": 16 * largest_size if local.offload else 0,
    }


def _sent(local: "LocalSteps", bundles: Sequence[Bundle]) -> int:
    """Return the entries that a rank sends of some bundles; all of those that go whole."""
    return sum(b.size if b.dense else entry_count(local.config.density, b.entries) for b in bundles)


def describe_memory(local: "LocalSteps") -> str:
    """Return one phrase of bytes per parameter of this rank's part."""
    entries = max(1, sum(part.numel() for part in local.parts.read().values()))
    use = {name: count / entries for name, count in memory_use(local).items()}
    always = ", ".join(f"{name} {use[name]:.3g}" for name in _ALWAYS if use[name])
    more = sum(count for name, count in use.items() if name not in (_HOST, *_ALWAYS))
    host = f"; {use[_HOST]:.3g} in host memory" if use[_HOST] else ""
    return f"bytes per parameter: {always}; {more:.3g} more in an exchange{host}"
