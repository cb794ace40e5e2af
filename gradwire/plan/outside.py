"""Ways without gradwire: PyTorch's DDP, its bf16 and PowerSGD hooks, and FSDP2.

Bytes and rounds are counted, not measured. Of these, plain DDP and the two hooks were compared with
measured steps (benchmarks/results/plan_202611.md); FSDP was not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.plan.machine import Machine
from gradwire.plan.network import Leg, Network
from gradwire.plan.powersgd import powersgd_legs, powersgd_rank, powersgd_work
from gradwire.plan.work import Work
from gradwire.plan.workload import PlannedBundle

_Legs = Callable[[PlannedBundle, Network], list[Leg]]


@dataclass(frozen=True)
class Outside:
    """Way of PyTorch.

    label: its name for people. travels: the dtype of what is sent.
    legs: what a bundle sends beside the backward pass. forward: what it sends beside the forward
    pass.
    passes: the worker's own work, in passes over the memory floor of 12 bytes per entry.
    memory: bytes per parameter that it keeps.
    """

    label: str
    travels: str
    legs: _Legs
    passes: float
    forward: _Legs | None = None
    memory: float = 0.0
    rank: int = 0
    """The rank of PowerSGD; 0 for what sends every entry."""
    needs_nodes: bool = False
    """True: it is for nodes of several workers."""

    def work(self, bundle: PlannedBundle, device: Machine) -> Work:
        """Return the worker's own work for a bundle."""
        if self.rank:
            return powersgd_work(bundle.shapes, self.rank, device)
        return Work(self.passes * device.floor(bundle.entries) + device.bundle, 0.0, 0.0)


def find_outside(method: str) -> Outside | None:
    """Return PyTorch's way of that name, such as powersgd-2; None for gradwire's methods."""
    rank = powersgd_rank(method)
    return _powersgd(rank) if rank else OUTSIDE.get(method)


def _sum_of(itemsize: int) -> _Legs:
    """Return the legs of an all-reduce of all entries."""

    def legs(bundle: PlannedBundle, network: Network) -> list[Leg]:
        sent = 2 * (network.workers - 1) * itemsize * bundle.entries / network.workers
        return [network.all_reduce(sent)] if sent else []

    return legs


def _ring(times: int) -> _Legs:
    """Return the legs of all-gathers and reduce-scatters in bf16 over all workers."""

    def legs(bundle: PlannedBundle, network: Network) -> list[Leg]:
        others = network.workers - 1
        size = 2 * bundle.entries * others / network.workers
        return [network.ring(size, others)] * times if others else []

    return legs


def _inside(times: int) -> _Legs:
    """Return the legs of all-gathers and reduce-scatters in bf16 inside the nodes."""

    def legs(bundle: PlannedBundle, network: Network) -> list[Leg]:
        others = network.local - 1
        size = 2 * bundle.entries * others / network.local
        return [network.inside(size, others)] * times

    return legs


def _hybrid(bundle: PlannedBundle, network: Network) -> list[Leg]:
    """Return the legs of the backward pass: two inside, and an all-reduce of a shard between."""
    others = network.nodes - 1
    sent = 2 * others * 2 * bundle.entries / network.local / network.nodes
    return [*_inside(2)(bundle, network), network.across(sent, 2 * others)]


def _powersgd(rank: int) -> Outside:
    def legs(bundle: PlannedBundle, network: Network) -> list[Leg]:
        return powersgd_legs(bundle.shapes, rank, network)

    # The hook keeps what a step left out, in fp32; its factors are small beside that.
    return Outside(f"PowerSGD, rank {rank} (PyTorch)", "fp32", legs, 0.0, memory=4.0, rank=rank)


_BF16_PASSES = 16 / 12
"""Cast to bf16, 6 bytes per entry; divide, 4; cast back, 6."""
_FSDP_PASSES = 24 / 12
"""Cast the parameters to bf16 twice, 12 bytes per entry; cast the gradient there and back, 12."""

OUTSIDE: dict[str, Outside] = {
    "ddp": Outside("DDP, fp32 (PyTorch)", "fp32", _sum_of(4), 8 / 12),
    "bf16-hook": Outside("DDP, bf16 hook (PyTorch)", "bf16", _sum_of(2), _BF16_PASSES),
    "fsdp-bf16": Outside(
        "FSDP, bf16 (PyTorch)", "bf16", _ring(2), _FSDP_PASSES, forward=_ring(1)
    ),
    "hsdp-bf16": Outside(
        "FSDP in each node, bf16 (PyTorch)", "bf16", _hybrid, _FSDP_PASSES,
        forward=_inside(1), needs_nodes=True,
    ),
    **{f"powersgd-{rank}": _powersgd(rank) for rank in (1, 4)},
}  # fmt: skip
"""PyTorch's ways by name. FSDP gathers the parameters in both passes, and scatters the gradient."""

POWERSGD: Sequence[str] = [name for name, way in OUTSIDE.items() if way.rank]
"""The ways that need the shapes of the model."""
