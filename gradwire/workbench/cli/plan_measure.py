"""What the ranks at hand measure for `gradwire plan --measure`."""

from typing import Any

import torch.distributed as dist

from gradwire.plan.measure import measure_link, node_count
from gradwire.plan.network import GOODPUT
from gradwire.ranks.group import DistributedGroup
from gradwire.workbench.train.worker import Worker


def between_ranks(worker: Worker) -> dict[str, Any]:
    """Link, latency and the shape of the cluster, measured by the ranks at hand; a collective."""
    assert dist.group.WORLD is not None
    group = DistributedGroup(dist.group.WORLD, worker.device)
    rate, latency = worker.share(measure_link(group.all_gather, worker.world, worker.device))
    return {
        "rank": worker.rank,
        "ranks": worker.world,
        "nodes": node_count(worker.world),
        "link": 8 * rate / GOODPUT,
        "latency": latency,
    }
