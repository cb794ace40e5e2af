"""What the ranks at hand measure for `gradwire plan --measure`."""

from typing import Any

import torch.distributed as dist

from gradwire.plan.measure import measure_link, node_count
from gradwire.plan.network import GOODPUT
from gradwire.ranks.group import DistributedGroup
from gradwire.workbench.train.place import Place


def between_ranks(place: Place) -> dict[str, Any]:
    """Link, latency and the shape of the cluster, measured by the ranks at hand; a collective."""
    assert dist.group.WORLD is not None
    group = DistributedGroup(dist.group.WORLD, place.device)
    rate, latency = place.share(measure_link(group.all_gather, place.world, place.device))
    return {
        "rank": place.rank,
        "ranks": place.world,
        "nodes": node_count(place.world),
        "link": 8 * rate / GOODPUT,
        "latency": latency,
    }
