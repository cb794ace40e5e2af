"""Where a worker stands: its rank, its device, its groups, and whether it was asked to stop."""

import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import ConfigError, ExchangeError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Worker:
    """One rank. `control` is a Gloo group for small CPU messages that must not wait for a GPU."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
    stop_asked: Callable[[], bool]
    own_workers: bool
    control: Any = field(default=None)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agreed_to_stop(self) -> bool:
        """Whether any rank was asked to stop; the same answer on every rank (collective)."""
        return self.sum(int(self.stop_asked()))[0] > 0

    def sum(self, *numbers: float) -> list[float]:
        """The sums over all ranks (collective)."""
        total = torch.tensor(numbers, dtype=torch.float64)
        with self._speaking():
            dist.all_reduce(total, group=self.control)
        return total.tolist()

    def barrier(self) -> None:
        """Waits until every rank is here."""
        self.sum(0)

    def share(self, value: Any) -> Any:
        """Rank 0's `value`, plain enough for JSON, on every rank (collective)."""
        text = json.dumps(value).encode() if self.first else b""
        length = torch.tensor([len(text)], dtype=torch.int64)
        with self._speaking():
            dist.broadcast(length, src=0, group=self.control)
            buffer = torch.zeros(int(length), dtype=torch.uint8)
            if self.first:
                buffer.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            dist.broadcast(buffer, src=0, group=self.control)
        return json.loads(bytes(buffer.tolist()))

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        """Within this context a peer that is gone is an error of ours, which says so."""
        try:
            yield
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank} of {self.world}: the trainer lost another rank between two "
                f"steps. Start again with --resume. (torch: {error})"
            ) from error


def under_torchrun() -> bool:
    """Whether this process is one of the ranks that torchrun started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def joined(worker: Worker, store: Any = None, timeout: float = 1800.0) -> Iterator[Worker]:
    """`place` with its process groups: Gloo on CPU, NCCL on CUDA.

    They end with the context; whoever holds a DDP object has to let go of it before. An exception
    leaves them as they are: to end them can mean to wait for peers that are not coming.
    """
    cuda = worker.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(worker.device)
    limit = timedelta(seconds=timeout)
    where = (
        {} if store is None else {"store": store, "rank": worker.rank, "world_size": worker.world}
    )
    dist.init_process_group("nccl" if cuda else "gloo", timeout=limit, **where)
    worker.control = dist.new_group(backend="gloo", timeout=limit)
    yield worker
    worker.control = None
    leave()


def leave() -> None:
    """Ends this process's groups."""
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def device_of(kind: str, local_rank: int, local_world: int, own: bool) -> torch.device:
    """The device of one of `local_world` ranks on this machine.

    Own workers may share a GPU: NCCL refuses that only when it believes that they share a host.
    """
    if kind == "cpu":
        return torch.device("cpu")
    # The same seed gives the same numbers only with deterministic convolutions and products.
    torch.backends.cudnn.deterministic = True
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    gpus = torch.cuda.device_count()
    if local_world > gpus:
        if not own:
            raise ConfigError(
                f"torchrun started {local_world} ranks here, there are {gpus} GPUs. "
                f"Use --nproc-per-node={gpus}."
            )
        os.environ["NCCL_HOSTID"] = f"host{local_rank}"
        os.environ["NCCL_IB_DISABLE"] = "1"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback())
    return torch.device("cuda", local_rank % gpus)


def loopback() -> str:
    """The name of the loopback interface."""
    return "lo" if sys.platform.startswith("linux") else "lo0"


def share_cores(workers: int) -> None:
    """Gives this process its part of the machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, (cores or 1) // workers))
