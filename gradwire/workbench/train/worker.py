"""A worker: one rank of a training run, with its device, its groups and its stop signal."""

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


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run. Windows has no SIGHUP."""
    names = "SIGINT", "SIGTERM", "SIGHUP"
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def heard_signals() -> list[signal.Signals]:
    """Return the signals to stop that this process does not ignore; nohup ignores SIGHUP."""
    return [number for number in stop_signals() if signal.getsignal(number) != signal.SIG_IGN]


@dataclass
class Worker:
    """One rank.

    stop_asked: returns True after a signal to stop. own_workers: True: `launch` started this
    process; False: torchrun did.
    control: a Gloo group for small CPU messages, which must not wait for a GPU.
    """

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
        """Return True if any rank was asked to stop; alike on every rank (collective)."""
        return self.sum(int(self.stop_asked()))[0] > 0

    def sum(self, *numbers: float) -> list[float]:
        """Return the sums over all ranks (collective)."""
        total = torch.tensor(numbers, dtype=torch.float64)
        with self._lost_peer_error():
            dist.all_reduce(total, group=self.control)
        return total.tolist()

    def barrier(self) -> None:
        """Wait for every rank (collective)."""
        self.sum(0)

    def share(self, value: Any) -> Any:
        """Return rank 0's `value` on every rank (collective). It must be plain enough for JSON."""
        text = json.dumps(value).encode() if self.first else b""
        length = torch.tensor([len(text)], dtype=torch.int64)
        with self._lost_peer_error():
            dist.broadcast(length, src=0, group=self.control)
            buffer = torch.zeros(int(length), dtype=torch.uint8)
            if self.first:
                buffer.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            dist.broadcast(buffer, src=0, group=self.control)
        return json.loads(bytes(buffer.tolist()))

    @contextlib.contextmanager
    def _lost_peer_error(self) -> Iterator[None]:
        """Turn the RuntimeError of a lost peer in this context into an ExchangeError."""
        try:
            yield
        except RuntimeError as error:
            raise ExchangeError(
                f"rank {self.rank} of {self.world}: the trainer lost another rank between two "
                f"steps. Start again with --resume. (torch: {error})"
            ) from error


def under_torchrun() -> bool:
    """Return True if this process is one of the ranks that torchrun started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextlib.contextmanager
def joined(worker: Worker, store: Any = None, timeout: float = 1800.0) -> Iterator[Worker]:
    """Give `worker` its process groups in this context: Gloo on CPU, NCCL on CUDA.

    The groups end with the context; a DDP object must be deleted before. After an exception the
    groups stay, because their end could wait for lost peers.
    """
    cuda = worker.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(worker.device)
    limit = timedelta(seconds=timeout)
    meeting: dict[str, Any] = {}
    if store is not None:
        meeting = {"store": store, "rank": worker.rank, "world_size": worker.world}
    dist.init_process_group("nccl" if cuda else "gloo", timeout=limit, **meeting)
    worker.control = dist.new_group(backend="gloo", timeout=limit)
    yield worker
    worker.control = None
    leave()


def leave() -> None:
    """End the process groups of this process."""
    # Deletes DDP objects in reference cycles first.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def worker_device(kind: str, local_rank: int, local_world: int, own_workers: bool) -> torch.device:
    """Return the device of one of `local_world` ranks on this machine.

    own_workers: True: the ranks are processes of `launch`, and may share a GPU. NCCL refuses two
    ranks of one host on one GPU. Each rank therefore gets another NCCL_HOSTID.
    """
    if kind == "cpu":
        return torch.device("cpu")
    # The same seed gives the same numbers only with deterministic convolutions and products.
    torch.backends.cudnn.deterministic = True
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    gpus = torch.cuda.device_count()
    if local_world > gpus:
        if not own_workers:
            raise ConfigError(
                f"torchrun started {local_world} ranks here, there are {gpus} GPUs. "
                f"Use --nproc-per-node={gpus}."
            )
        os.environ["NCCL_HOSTID"] = f"host{local_rank}"
        os.environ["NCCL_IB_DISABLE"] = "1"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback())
    return torch.device("cuda", local_rank % gpus)


def loopback() -> str:
    """Return the name of the loopback interface."""
    return "lo" if sys.platform.startswith("linux") else "lo0"


def share_cores(workers: int) -> None:
    """Limit this process to its part of the machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, (cores or 1) // workers))
