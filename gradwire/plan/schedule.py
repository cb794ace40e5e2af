"""Schedule of a step: bundles go one after another, beside the backward pass."""

from collections.abc import Sequence

from gradwire.plan.work import Work
from gradwire.plan.workload import BACKWARD


def step_end(
    seconds: float,
    ahead: float,
    shares: Sequence[float],
    works: Sequence[Work],
    nets: Sequence[float],
    has_spare_core: bool,
) -> float:
    """Return the seconds at which the step ends: the backward pass, or the last bundle.

    ahead: seconds on the network beside the forward pass.
    """
    device, network_free = max(ahead, (1 - BACKWARD) * seconds), 0.0
    for share, local_work, net in zip(shares, works, nets, strict=True):
        # A bundle starts when its gradients are there and the bundle before it is exchanged.
        device += BACKWARD * seconds * share
        network_free = max(device, network_free) + local_work.total + net
        device += 0.0 if has_spare_core else local_work.total
    return max(device, network_free)
