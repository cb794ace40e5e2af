"""The learning rate of each moment of a run."""

import math

WARM = 0.1


def cosine(done: float) -> float:
    """The share of the learning rate after `done` of a run: a warm-up over a tenth, a cosine."""
    if done < WARM:
        return max(done / WARM, 0.01)
    return 0.5 * (1 + math.cos(math.pi * (done - WARM) / (1 - WARM)))
