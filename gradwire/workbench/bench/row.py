"""One row of a benchmark, the same fields for every method and device."""

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradwire.version import __version__
from gradwire.workbench.bench.clock import Timing


@dataclass(frozen=True)
class Row:
    """A method's time for one error-feedback step on `size` entries, and the floor beside it.

    achieved: entries that were chosen in a first step. energy: theirs over that of the exact top k.
    recall: the share of the exact top k among them. timed: entries chosen in the last step that was
    timed. floor_ms: the floor of this row in the same run. ratio: ms / floor_ms. gbps: the floor's
    bytes over this row's time.
    """

    method: str
    size: int
    k: int
    achieved: int
    ms: float
    floor_ms: float
    ratio: float
    p20: float
    p80: float
    gbps: float
    density: float
    device: str
    versions: str
    data: str
    energy: float | None
    recall: float | None
    timed: int

    @classmethod
    def of(
        cls, method: str, size: int, density: float, k: int, achieved: int,
        time: Timing, floor: Timing, nbytes: int, device: torch.device, data: str = "gaussian",
        energy: float | None = None, recall: float | None = None, timed: int | None = None,
    ) -> "Row":  # fmt: skip
        return cls(
            method, size, k, achieved, round(time.ms, 5), round(floor.ms, 5),
            round(time.ms / floor.ms, 4), round(time.p20, 5), round(time.p80, 5),
            round(nbytes / time.ms / 1e6, 1), density, device_name(device), versions(device),
            data, energy, recall, achieved if timed is None else timed,
        )  # fmt: skip

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def device_name(device: torch.device) -> str:
    """The name of the GPU, or of the processor's kind and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def versions(device: torch.device) -> str:
    """What was measured, and on top of what."""
    parts = [f"gradwire {__version__}", f"torch {torch.__version__}"]
    if device.type == "cuda":
        import triton

        parts.append(f"triton {triton.__version__}")
    return ", ".join([*parts, f"python {platform.python_version()}"])
