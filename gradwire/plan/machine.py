"""How fast one worker is: its memory, its arithmetic, and what a bundle costs whatever its size."""

from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.errors import unknown


@dataclass(frozen=True, eq=False)
class Costs:
    """What the code costs on one kind of device, measured on one of them.

    passes: the step of each method (accumulate, compress, settle) at density 0.1 %, over the
        memory floor, 12 bytes an entry.
    slope: what each 1 of density adds to that, "" for methods not named; most: never more passes.
    The rest are nanoseconds an entry at `reference` bytes a second of memory: of encoding and
    decoding plain (int32) and packed indices, of adding one into the mean, of merging sorted lists,
    of a cell of a sketch. fill: passes that put the mean of an all-gather into DDP's buckets.
    merging: seconds of a round of gtopk, whatever its size.
    matrix: seconds of PowerSGD a matrix, up to rank 2 (Gram-Schmidt) and above (QR).
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
    agrees: bool = False
    """Whether ranks compare, before each exchange, what they are about to send: on Gloo."""


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
)
"""One H200: benchmarks/results/methods_202611.md; micro, exdyna and deft, as one worker, at 150 M
entries of studies_202611.md. Merging and sketches are from 138 M entries there (a table that fits
in the cache takes half of that), a merge's own time from one row of gtopk, in plan_202611.md."""

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
    agrees=True,
)
"""A core of an AMD EPYC: the same page; what depends on the density, merging and sketches from two
ranks of benchmarks/results/plan_202611.md at 50 Mbit/s."""


@dataclass(frozen=True)
class Machine:
    """One worker's device.

    bandwidth: bytes a second that `e.add_(g)` reaches. flops: what it sustains while training, in
    the precision people train in; of all numbers here the roughest, for it depends on the network.
    """

    name: str
    bandwidth: float
    flops: float
    costs: Costs = CUDA
    beside: bool = False
    """Whether what a worker does itself has a core of its own, beside the backward pass."""

    @property
    def bundle(self) -> float:
        """Seconds that a bundle takes however small it is: launches, Python, a thread's turn."""
        return self.costs.bundle

    def floor(self, entries: float) -> float:
        """Seconds to read gradient and residual and write the residual."""
        return 12 * entries / self.bandwidth

    def scaled(self, nanoseconds: float) -> float:
        """Seconds here of what takes so many nanoseconds on the reference device."""
        return 1e-9 * nanoseconds * self.costs.reference / self.bandwidth

    def select(self, method: str, density: float, entries: float) -> float:
        """Seconds of one step of error feedback: accumulate, compress, settle."""
        costs = self.costs
        slope = costs.slope.get(method, costs.slope[""])
        passes = costs.passes.get(method, costs.most) + slope * max(0.0, density - 0.001)
        return self.floor(entries) * min(passes, costs.most)


def _gpu(name: str, memory: float, teraflops: float) -> Machine:
    """0.9 of the data sheet's memory bandwidth, in GB/s, is what `e.add_(g)` gets on an H200."""
    return Machine(name, 0.9e9 * memory, 1e12 * teraflops)


MACHINES: dict[str, Machine] = {
    m.name: m
    for m in (
        _gpu("t4", 320, 10),
        _gpu("v100", 900, 6.8),
        _gpu("a10g", 600, 20),
        _gpu("a100", 1555, 50),
        _gpu("a100-80gb", 2039, 50),
        _gpu("l4", 300, 18),
        _gpu("l40s", 864, 50),
        _gpu("rtx3090", 936, 20),
        _gpu("rtx4090", 1008, 40),
        _gpu("h100", 3350, 91),
        _gpu("h200", 4800, 91),
        _gpu("b200", 8000, 180),
        Machine("cpu", 36.6e9, 0.04e12, CPU),
    )
}
"""Memory bandwidth is the data sheet's. Measured are the teraflops of v100 (fp32, in Table 2 of Shi
et al., 2019: 6.8 for AlexNet, ResNet-50 and Inception-V4, 10.6 for VGG-16) and of h200 (bf16
autocast, ResNet-50; 282 for VGG-16, 77 for AlexNet); the others are scaled from these by peak."""


def machine(name: str) -> Machine:
    """The machine of that name; an error names the nearest one."""
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    if key not in MACHINES:
        raise unknown("gpu", name, MACHINES)
    return MACHINES[key]
