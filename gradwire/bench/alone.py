"""What a method costs a rank when nothing travels: the constants of the planner's check."""

import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from gradwire.bench.contender import Contender, Task
from gradwire.bench.job import Job
from gradwire.bench.laps import laps
from gradwire.cluster.mirror import Mirror
from gradwire.config import Config
from gradwire.state import State
from gradwire.train.place import Place
from gradwire.types import Slot

WARM, TIMED, LONGEST = 2, 5, 1.5
"""Steps, and seconds after which a slow method is not asked again."""
HOOK = "hook"
"""The stage of PyTorch's own hooks: everything they do."""


def alone(contender: Contender, job: Job, task: Task, place: Place) -> dict[str, float]:
    """Seconds a step of each stage, the mean over the ranks, which do the same at the same time.

    Ours among mirrors of this rank; PyTorch's own in a group of one, as what they add to noop.
    """
    if contender.name in ("noop", "barrier"):
        return {}
    place.barrier()
    if contender.wire is not None:
        wire = contender.wire
        mine = stages_alone(wire.config, wire.slots, task.device, place.world)
    else:
        mine = {HOOK: _hook_alone(contender.name, job, task)}
    sums = place.sum(*mine.values())
    return {k: round(v / place.world, 7) for k, v in zip(mine, sums, strict=True)}


def stages_alone(
    config: Config, slots: Sequence[Slot], device: torch.device, ranks: int
) -> dict[str, float]:
    """Median seconds of each stage over a few steps with gradients of noise."""
    state = State(config)
    state.open(slots, device, Mirror(ranks))
    noise = [[torch.randn(s.numel, device=device) for s in b.slots] for b in state.bundles]
    seen: list[dict[str, float]] = []
    begin = time.perf_counter()
    while len(seen) <= WARM or (len(seen) < WARM + TIMED and time.perf_counter() - begin < LONGEST):
        state.begin()
        for bundle, gradients in zip(state.bundles, noise, strict=True):
            state.process(bundle, gradients)
        seen.append(state.clock.seconds())
    before, after = seen[WARM - 1 : -1], seen[WARM:]
    return {
        name: statistics.median(b[name] - a[name] for a, b in zip(before, after, strict=True))
        for name in seen[0]
        if name != "exchange"
    }


def _hook_alone(name: str, job: Job, task: Task) -> float:
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    both = [Contender.of(n, job, task, own) for n in ("noop", name)]
    times = []
    for contender in both:
        for _ in range(WARM + 1):  # PowerSGD begins with its third step
            contender.step(task)
        times.append(statistics.median(laps(partial(contender.step, task), TIMED, task.device)))
    return max(0.0, times[1] - times[0])
