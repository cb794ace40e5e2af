"""One row of the table: a fault, the number of tries, and their outcome."""

from dataclasses import dataclass, field


@dataclass
class Row:
    """The tries of one fault.

    survived: the tries after which the run went on, or ended as documented and could be resumed.
    All others are lost. slowest: the most seconds from the fault to the last survivor's error.
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
        """Count a try; `loss` describes the loss, "" for none."""
        self.times += 1
        if seconds is not None:
            self.slowest = round(max(self.slowest or 0.0, seconds), 1)
        if loss:
            self.losses.append(loss)
        else:
            self.survived += 1
