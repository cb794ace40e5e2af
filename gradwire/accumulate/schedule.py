"""The density of each step."""

from dataclasses import dataclass

PAPER = (0.25, 0.0625, 0.015625, 0.004)
"""The warm-up of Lin et al. (2018), on the way to 0.001."""


@dataclass(frozen=True)
class Schedule:
    """First `dense_steps` at 1, then `warmup_steps` at each density of `warmup`, then `density`."""

    density: float
    dense_steps: int = 0
    warmup: tuple[float, ...] = ()
    warmup_steps: int = 0

    def at(self, step: int) -> float:
        """The density of step 0, 1, 2, ..."""
        step -= self.dense_steps
        if step < 0:
            return 1.0
        phase = step // self.warmup_steps if self.warmup_steps else len(self.warmup)
        return self.warmup[phase] if phase < len(self.warmup) else self.density

    def changes(self) -> list[int]:
        """The steps at which the density may change, the first included."""
        phases = range(len(self.warmup) + 1)
        return [0, *(self.dense_steps + phase * self.warmup_steps for phase in phases)]


def entries(density: float, size: int) -> int:
    """k = max(1, floor(density * size + 0.5)), the number of entries a density stands for."""
    return min(size, max(1, int(density * size + 0.5)))
