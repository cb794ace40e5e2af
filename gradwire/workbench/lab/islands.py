"""Islands of a lab: ranks that also have a fast network of their own.

A rank keeps its address. A route to each rank of its island leads over a second interface, so that
Gloo and NCCL, which know one interface, use the fast network inside without being told.
"""

from collections.abc import Sequence
from typing import Any

from gradwire.errors import ConfigError

INNER_LINK = "gw1"
"""A rank's interface to its island. It has no address of its own, and no limit on its rate."""


def parse_islands(text: str) -> tuple[int, int]:
    """Return the islands and the ranks in each of a text such as `2x2`; (0, 0) for ""."""
    if not text:
        return 0, 0
    islands, _, inside = text.partition("x")
    if not (islands.isdecimal() and inside.isdecimal() and int(islands) > 1 and int(inside) > 1):
        raise ConfigError(
            f"islands must be ISLANDSxRANKS, at least 2x2, got {text!r}; 2x4 is two of four ranks"
        )
    return int(islands), int(inside)


def cut_ranks(ranks: int, islands: int) -> list[range]:
    """Return the ranks of each island; none without islands. Raise if they do not come out even."""
    if not islands:
        return []
    if ranks % islands or ranks == islands:
        raise ConfigError(f"{ranks} ranks make no {islands} islands of two or more ranks each")
    inside = ranks // islands
    return [range(first, first + inside) for first in range(0, ranks, inside)]


def add_inner_link(switch: Any, bridge: int, rank: int, namespace: str) -> None:
    """Add an unlimited link from a rank's namespace to the bridge of its island."""
    port = f"inner{rank}"
    switch.link(
        "add", ifname=port, kind="veth", peer={"ifname": INNER_LINK, "net_ns_fd": namespace}
    )
    index = switch.link_lookup(ifname=port)[0]
    switch.link("set", index=index, master=bridge)
    switch.link("set", index=index, state="up")


def route_inside(routes: Any, own: str, others: Sequence[str]) -> None:
    """Lead messages from address `own` to `others` over the inner link."""
    index = routes.link_lookup(ifname=INNER_LINK)[0]
    routes.link("set", index=index, state="up")
    for other in others:
        routes.route("add", dst=f"{other}/32", oif=index, prefsrc=own, scope="link")
