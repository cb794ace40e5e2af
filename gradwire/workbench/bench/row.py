"""One row of `bench compress`: the same fields for every method and device."""

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradwire.version import __version__
from gradwire.workbench.bench.clock import Timing


@dataclass(frozen=True)
class Row:
    """A method's time for one error-feedback step on `size` entries, and the floor beside it.

    achieved: the entries chosen in a first step. energy: the energy of these entries / that of the
    exact top k. recall: the share of the exact top k among these entries. timed: the entries chosen
    in the last timed step. ms: the median of the timed steps, with percentiles p20, p80 and p90.
    floor_ms: the floor's median in the same run. ratio: ms / floor_ms. gbps: the floor's bytes /
    this row's time.
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
    p90: float
    gbps: float
    density: float
    device: str
    versions: str
    data: str
    energy: float | None
    recall: float | None
    timed: int

    @classmethod
    def from_timings(
        cls, method: str, size: int, density: float, k: int, achieved: int,
        time: Timing, floor: Timing, nbytes: int, device: torch.device, data: str = "gaussian",
        energy: float | None = None, recall: float | None = None, timed: int | None = None,
    ) -> "Row":  # fmt: skip
        """Return the row of a method that took `time`; nbytes: the bytes that the floor moves."""
        return cls(
            method, size, k, achieved, round(time.ms, 5), round(floor.ms, 5),
            round(time.ms / floor.ms, 4), round(time.p20, 5), round(time.p80, 5),
            round(time.p90, 5), round(nbytes / time.ms / 1e6, 1), density, device_name(device),
            software_versions(device), data, energy, recall,
            achieved if timed is None else timed,
        )  # fmt: skip

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or the processor's architecture and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def software_versions(device: torch.device) -> str:
    """Return the versions of gradwire, torch, triton (CUDA only) and Python."""
    parts = [f"gradwire {__version__}", f"torch {torch.__version__}"]
    if device.type == "cuda":
        import triton

        parts.append(f"triton {triton.__version__}")
    return ", ".join([*parts, f"python {platform.python_version()}"])
