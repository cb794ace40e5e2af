"""One row of the table: a fault, how often it was tried, and what came of it."""

from dataclasses import dataclass, field


@dataclass
class Row:
    """`survived`: the run went on, or ended as documented and could be resumed; the rest is lost.

    `slowest` are the seconds from the fault to the last survivor's error, where there is one.
    """

    fault: str
    times: int = 0
    survived: int = 0
    slowest: float | None = None
    came_of_it: str = ""
    skipped: str = ""
    losses: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return self.times - self.survived

    def count(self, loss: str, seconds: float | None = None) -> None:
        """One try more; `loss` says what went wrong, "" that nothing did."""
        self.times += 1
        if seconds is not None:
            self.slowest = round(max(self.slowest or 0.0, seconds), 1)
        if loss:
            self.losses.append(loss)
        else:
            self.survived += 1
