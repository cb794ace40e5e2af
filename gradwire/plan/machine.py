"""Speed of one worker: its memory, its arithmetic, and the fixed cost of a bundle."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gradwire.errors import unknown


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs of the code on one kind of device, measured on one such device.

    reference: bytes per second of memory on the measured device.
    bundle: seconds that a bundle takes however small it is.
    passes: the local steps of each method (accumulate, compress, settle) at density 0.1 %. The unit
    is the memory floor of 12 bytes per entry.
    slope: the passes that each 1 of density adds; "" for methods that are not named.
    most: the most passes of a method.
    encode, decode: nanoseconds per entry for plain (int32) and for packed indices.
    add: nanoseconds to add one entry into the mean.
    merge: nanoseconds per entry to merge sorted lists.
    sketch: nanoseconds per cell of a sketch.
    matrix: seconds of PowerSGD per matrix, up to rank 2 (Gram-Schmidt) and above (QR).
    fill: passes that put the mean of an all-gather into DDP's buckets.
    merging: seconds of a round of gtopk, whatever its size.
    """

    reference: float
    bundle: float
    passes: Mapping[str, float]
    slope: Mapping[str, float]
    most: float
    encode: tuple[float, float]
    decode: tuple[float, float]
    add: float
    merge: float
    sketch: float
    matrix: tuple[float, float]
    fill: float = 1.0
    merging: float = 0.0
    extra: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Nanoseconds that a code of values adds for an entry, to encode and to decode."""
    agrees: bool = False
    """True: ranks compare the name and size of a message before each exchange, as on Gloo."""


CUDA = Costs(
    reference=4.32e12,
    bundle=7e-4,
    passes={
        "topk": 1.13,
        "mstopk": 1.18,
        "dgc": 1.27,
        "threshold": 1.27,
        "bisect": 1.33,
        "trimmed": 1.18,
        "gaussiank": 1.13,
        "sidco": 1.21,
        "chunked": 1.14,
        "randk": 1.05,
        "micro": 1.54,
        "exdyna": 1.54,
        "deft": 16.5,
    },
    slope={"": 39.0},
    most=40.0,
    encode=(0.01, 0.06),
    decode=(0.01, 0.06),
    add=0.1,
    merge=0.03,
    sketch=0.028,
    matrix=(2e-4, 4e-4),
    fill=1 / 3,
    merging=1.3e-3,
    extra={"sign": (0.026, 0.018)},
)
"""One H200: benchmarks/results/methods_202611.md. micro, exdyna and deft are from
studies_202611.md, as one worker at 150 M entries.

Merging and sketches are from 138 M entries there; a table that fits in the cache takes half of
that. The time of a merge is from one row of gtopk in plan_202611.md.

`extra` was not measured on a GPU. Signs have no kernel: it is the 112 and 76 bytes that torch's
operations in encode/values.py move for an entry, at the reference bandwidth.
"""

CPU = Costs(
    reference=36.6e9,
    bundle=1e-3,
    passes={
        "topk": 4.3,
        "mstopk": 4.0,
        "dgc": 4.1,
        "threshold": 8.4,
        "bisect": 7.0,
        "trimmed": 4.4,
        "gaussiank": 4.1,
        "sidco": 6.1,
        "chunked": 6.1,
        "randk": 3.8,
        "micro": 5.4,
        "exdyna": 5.7,
        "deft": 5.2,
    },
    slope={"topk": 500.0, "randk": 1100.0, "": 160.0},
    most=120.0,
    encode=(2.0, 30.0),
    decode=(1.0, 80.0),
    add=15.0,
    merge=50.0,
    sketch=30.0,
    matrix=(5e-5, 7e-5),
    extra={"sign": (6.0, 10.0), "two-bit": (60.0, 15.0)},
    agrees=True,
)
"""A core of an AMD EPYC: benchmarks/results/methods_202611.md.

The costs that depend on the density, merging and sketches are from two ranks at 50 Mbit/s, in
benchmarks/results/plan_202611.md. `extra` is what signs and two bits take longer than bf16 on one
thread, for 2 million entries of which a sixth to a half are sent (19 November 2026).
"""


@dataclass(frozen=True)
class Machine:
    """Device of one worker.

    bandwidth: bytes per second that `e.add_(g)` reaches.
    flops: the rate sustained in training, in the precision people train in. Of all numbers here it
    is the roughest, because it depends on the network.
    matmul: the rate sustained in training transformers, and in products of large matrices.
    """

    name: str
    bandwidth: float
    flops: float
    costs: Costs = CUDA
    matmul: float = 0.0
    has_spare_core: bool = False
    """True: the worker's local work has a core for itself, beside the backward pass."""

    def __post_init__(self) -> None:
        if not self.matmul:
            object.__setattr__(self, "matmul", self.flops)

    @property
    def bundle(self) -> float:
        """Seconds that a bundle takes however small it is: launches, Python, a thread's turn."""
        return self.costs.bundle

    def floor(self, entries: float) -> float:
        """Return the seconds to read gradient and residual and to write the residual."""
        return 12 * entries / self.bandwidth

    def scaled_seconds(self, nanoseconds: float) -> float:
        """Return the seconds here for work of `nanoseconds` on the reference device."""
        return 1e-9 * nanoseconds * self.costs.reference / self.bandwidth

    def select(self, method: str, density: float, entries: float) -> float:
        """Return the seconds of one step of error feedback: accumulate, compress, settle."""
        costs = self.costs
        slope = costs.slope.get(method, costs.slope[""])
        passes = costs.passes.get(method, costs.most) + slope * max(0.0, density - 0.001)
        return self.floor(entries) * min(passes, costs.most)


_SUSTAINED = 0.4
"""The share of the bf16 peak that training reaches: 38 to 43 % for Llama 3 on H100 (Meta, 2024)."""


def _gpu(name: str, memory: float, teraflops: float, peak: float = 0.0) -> Machine:
    """Return a machine with 0.9 of the data sheet's memory bandwidth (GB/s).

    `e.add_(g)` gets that share on an H200. peak: the data sheet's dense TFLOP/s in bf16.
    """
    matmul = max(teraflops, _SUSTAINED * peak)
    return Machine(name, 0.9e9 * memory, 1e12 * teraflops, matmul=1e12 * matmul)


MACHINES: dict[str, Machine] = {
    m.name: m
    for m in (
        _gpu("t4", 320, 10),
        _gpu("v100", 900, 6.8, 125),
        _gpu("a10g", 600, 20),
        _gpu("a100", 1555, 50, 312),
        _gpu("a100-80gb", 2039, 50, 312),
        _gpu("l4", 300, 18, 121),
        _gpu("l40s", 864, 50, 362),
        _gpu("rtx3090", 936, 20, 71),
        _gpu("rtx4090", 1008, 40, 165),
        _gpu("h100", 3350, 91, 989),
        _gpu("h200", 4800, 91, 989),
        _gpu("b200", 8000, 180, 2250),
        Machine("cpu", 36.6e9, 0.04e12, CPU, matmul=0.2e12),
    )
}
"""Machines by name, with the memory bandwidth of the data sheet.

The teraflops of two machines are measured; the others are scaled from these by peak.
- v100: fp32, from Table 2 of Shi et al. (2019). 6.8 for AlexNet, ResNet-50 and Inception-V4; 10.6
  for VGG-16.
- h200: bf16 autocast. 91 for ResNet-50, 282 for VGG-16 and 77 for AlexNet.

A CPU's products are those of one core of an AMD EPYC in bf16: Newton-Schulz of 384 to 3072 columns.
"""


def find_machine(name: str) -> Machine:
    """Return the machine of that name; an error names the nearest one."""
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    if key not in MACHINES:
        raise unknown("gpu", name, MACHINES)
    return MACHINES[key]
