"""Memory that local steps hold on a rank, beside the weights and the optimiser."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire.integrate.local_steps.handle import LocalSteps


def memory_use(local: "LocalSteps") -> dict[str, int]:
    """Return the bytes by their use.

    The residual counts with what its bundles keep beside it. An exchange holds the difference, and
    the update that takes its place bundle by bundle. With overlap the weights are kept too.
    """
    by_fragment = [0] * local.fragments
    kept = [0] * local.fragments
    for name, part in local.parts.read().items():
        number = local.fragment_of[name]
        by_fragment[number] += 4 * part.numel()
        kept[number] += part.nbytes if local.overlap else 0
    largest = max((4 * bundle.size for bundle in local.bundles), default=0)
    return {
        "x": sum(4 * x.numel() for x in local.reference.values()),
        "outer momentum": sum(4 * m.numel() for m in local.velocity.values()),
        "residual": local.memory_bytes,
        "difference and update": max(by_fragment) + min(largest, max(by_fragment)),
        "weights at the difference": max(kept),
    }


def describe_memory(local: "LocalSteps") -> str:
    """Return one phrase of bytes per parameter of this rank's part."""
    entries = max(1, sum(part.numel() for part in local.parts.read().values()))
    use = {name: count / entries for name, count in memory_use(local).items()}
    names = ("x", "outer momentum", "residual")
    always = ", ".join(f"{name} {use[name]:.3g}" for name in names if use[name])
    more = sum(use.values()) - sum(use[name] for name in names)
    return f"bytes per parameter: {always}; {more:.3g} more in an exchange"
