"""The cost of `attach` on small models: two Gloo ranks on loopback, beside plain DDP.

    python -m benchmarks.attach_cost

Blocks of steps with and without gradwire alternate on the same ranks. Each line prints the median
step of both and their ratio, then the same of the fastest twentieth and fifth of the steps: on a
machine with other work the median tells of that work. The network is free, so that every
difference is a cost.
"""

import argparse
import itertools
import os
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire

RANKS, BATCH, BLOCK = 2, 8, 4
WIDTHS = {"13 thousand": (100, 100, 30), "1.1 million": (784, 1024, 256, 128, 10)}


def network(widths: tuple[int, ...]) -> nn.Sequential:
    """Return a network of linear layers."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Contender:
    """A model that trains, with or without gradwire."""

    def __init__(self, widths: tuple[int, ...], **settings: object) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(network(widths))
        self.wire = gradwire.attach(self.ddp, **settings) if settings else None
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)
        self.x = torch.randn(BATCH, widths[0])
        self.seconds: list[float] = []

    def step(self) -> None:
        """Do one step, and note its time."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.ddp(self.x).square().mean().backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - begin)


def compare(widths: tuple[int, ...], settings: dict[str, object], rounds: int) -> list[list[float]]:
    """Return the seconds of each step of plain DDP, and with gradwire, in ascending order."""
    contenders = [Contender(widths), Contender(widths, **settings)]
    for contender in contenders:
        for _ in range(20):
            contender.step()
        contender.seconds.clear()
    for _ in range(rounds):
        for contender in contenders:
            for _ in range(BLOCK):
                contender.step()
    if contenders[1].wire is not None:
        contenders[1].wire.close()
    return [sorted(contender.seconds) for contender in contenders]


def rank_main(rank: int, port: int, rounds: int, settings: dict[str, object]) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    for name, widths in WIDTHS.items():
        plain, compressed = compare(widths, settings, rounds)
        middle = statistics.median(plain), statistics.median(compressed)
        fast = ", ".join(
            f"{compressed[len(compressed) // part] / plain[len(plain) // part]:.2f}x"
            for part in (20, 5)
        )
        if rank == 0:
            print(
                f"{name:12} {1e3 * middle[0]:7.2f} ms plain {1e3 * middle[1]:7.2f} ms attached "
                f"{middle[1] / middle[0]:6.2f}x (5 %, 20 %: {fast})",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="blocks of four steps of each")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--port", type=int, default=29517)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.multiprocessing.spawn(
        rank_main, (options.port, options.rounds, {"density": options.density}), RANKS
    )


if __name__ == "__main__":
    main()
