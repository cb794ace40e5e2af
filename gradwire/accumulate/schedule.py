"""The density of each step."""

from dataclasses import dataclass

PAPER_WARMUP = (0.25, 0.0625, 0.015625, 0.004)
"""The warm-up of Lin et al. (2018), before a density of 0.001."""


@dataclass(frozen=True)
class Schedule:
    """Density of each step: 1 for `dense_steps`, then the warm-up, then `density`.

    The warm-up spends `warmup_steps` steps at each density of `warmup`.
    """

    density: float
    dense_steps: int = 0
    warmup: tuple[float, ...] = ()
    warmup_steps: int = 0

    def density_at(self, step: int) -> float:
        """Return the density of step 0, 1, 2, ..."""
        step -= self.dense_steps
        if step < 0:
            return 1.0
        phase = step // self.warmup_steps if self.warmup_steps else len(self.warmup)
        return self.warmup[phase] if phase < len(self.warmup) else self.density

    def change_steps(self) -> list[int]:
        """Return the steps at which the density may change, including step 0."""
        phases = range(len(self.warmup) + 1)
        return [0, *(self.dense_steps + phase * self.warmup_steps for phase in phases)]


def entry_count(density: float, size: int) -> int:
    """Return k = max(1, floor(density * size + 0.5)), the number of entries to send."""
    return min(size, max(1, int(density * size + 0.5)))
