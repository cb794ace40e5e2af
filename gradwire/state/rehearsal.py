"""Rehearse a wire's steps without data and without a GPU, and compile the kernels they launch.

    python -m gradwire.state.rehearsal < job.json

Tensors have shapes and no contents. A launch is noted and does nothing. `ahead.py` runs this in a
process of its own, because it changes torch and Triton for the whole process.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gradwire import path
from gradwire.accumulate.bundle import Bundle
from gradwire.config import Config
from gradwire.kernels.scan import Piece
from gradwire.kernels.side_stream import Target
from gradwire.ranks.echo import EchoGroup
from gradwire.state.choice import choose
from gradwire.torch_internals import compile_only, fake_tensors, without_a_gpu
from gradwire.types import Slot

DEVICE = torch.device("cuda", 0)
STEPS = 3
"""Steps of each choice: the first settles nothing, and the second has no counts of a scan."""
BUCKET = 25 << 20
"""Bytes of DDP's buckets, in which gradients arrive."""
MOST = 8
"""Processes that compile side by side, at most."""

Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""(kernel, arguments, options)."""


class _Pointer:
    """A tensor as Triton's compiler sees it: a dtype and an address."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self._address = tensor.dtype, tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._address

    @staticmethod
    def ptr_range() -> int:
        return 0


def rehearse(job: Mapping[str, Any]) -> list[Launch]:
    """Return every launch of the job that Triton would compile, once each.

    A step that asks for values, such as the length of a message, cannot be rehearsed to its end.
    What it launches later is compiled at its first launch.
    """
    capability = tuple(job["capability"])
    _pretend(capability, job["processors"])
    noted: dict[Hashable, Launch] = {}
    _note_launches(noted)
    config = Config(**job["config"])
    fake = fake_tensors()
    asks = fake.DataDependentOutputException, fake.DynamicOutputShapeException
    with fake.FakeTensorMode(), torch.no_grad():
        for described in job["bundles"]:
            with suppress(*asks):
                _rehearse_bundle(config, described, job["ranks"])
    return list(noted.values())


def _rehearse_bundle(config: Config, described: Mapping[str, Any], ranks: int) -> None:
    slots = [Slot(**_read_slot(slot)) for slot in described["slots"]]
    group = EchoGroup(ranks)
    group.device = DEVICE
    skipped = torch.zeros((), dtype=torch.bool, device=DEVICE)
    pieces = list(_arrive(slots))
    for in_pieces in (True, False):
        bundle = Bundle(
            slots, DEVICE, rank=0, index=0, dense=described["dense"], ranks=ranks,
            correction=config.correction, decay=config.decay,
        )  # fmt: skip
        for step in (0, *config.schedule.change_steps()):
            choice = choose(bundle, config, step, ranks, flush=False)
            for _ in range(STEPS):
                into = Target(bundle.size, DEVICE, pieces if in_pieces else ())
                path.average(path.Step(bundle, pieces, choice, config, group, skipped, into))


def _read_slot(slot: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a slot from JSON."""
    dtype = getattr(torch, slot["dtype"].removeprefix("torch."))
    return {**slot, "dtype": dtype, "shape": tuple(slot["shape"]), "stride": tuple(slot["stride"])}


def _arrive(slots: list[Slot]) -> Iterator[Piece]:
    """Yield the slots' gradients as slices of buckets, one after the other."""
    bucket: list[Slot] = []
    for slot in slots:
        bucket.append(slot)
        if sum(s.numel * s.dtype.itemsize for s in bucket) >= BUCKET:
            yield from _slices(bucket)
            bucket = []
    yield from _slices(bucket)


def _slices(bucket: list[Slot]) -> Iterator[Piece]:
    if bucket:
        whole = torch.empty(sum(s.numel for s in bucket), dtype=bucket[0].dtype, device=DEVICE)
        yield from zip(
            [s.offset for s in bucket], whole.split([s.numel for s in bucket]), strict=True
        )


def _note_launches(noted: dict[Hashable, Launch]) -> None:
    """Make every launcher note what it would compile, in place of a launch."""
    from gradwire.kernels.triton.launch import Launcher, overtakes

    def note(self: Launcher, grid: int, on: Tensor, *args: Any) -> None:
        options = dict(self._options)
        if self._overlap_launch:
            args = (*args, overtakes(0))
            options |= {"launch_pdl": True} if overtakes(0) else {}
        plain = tuple(_Pointer(a) if isinstance(a, Tensor) else a for a in args)
        noted.setdefault((id(self), self.key(0, *args)), (self._kernel, plain, options))

    _replace(Launcher, "__call__", note)


class _NoStream:
    """A stream or an event that nothing happens on."""

    device = DEVICE

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_event(self, _: object) -> None: ...
    def record(self, _: object = None) -> None: ...
    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NoStream)


def _pretend(capability: tuple[int, int], processors: int) -> None:
    """Make this process believe in a GPU: of its functions those that a step calls."""
    from gradwire.kernels.triton import launch, workspace

    addresses: dict[int, int] = {}

    def address(tensor: Tensor) -> int:
        # Storages lie far apart, so that slices of one bucket are seen to follow each other.
        storage = tensor.untyped_storage()._cdata
        first = addresses.setdefault(storage, (len(addresses) + 1) << 40)
        return first + int(tensor.storage_offset()) * tensor.element_size()

    properties = SimpleNamespace(multi_processor_count=processors)
    kind = fake_tensors().FakeTensor
    _replace(kind, "data_ptr", address)
    _replace(kind, "pin_memory", lambda tensor, *_: tensor)
    _replace(kind, "record_stream", lambda tensor, stream: None)
    _replace(torch.cuda, "is_current_stream_capturing", lambda: False)
    _replace(torch.cuda, "current_stream", _NoStream)
    _replace(torch.cuda, "Stream", _NoStream)
    _replace(torch.cuda, "Event", _NoStream)
    _replace(torch.cuda, "set_stream", lambda stream: None)
    _replace(torch.cuda, "get_device_capability", lambda device=None: capability)
    _replace(torch.cuda, "get_device_properties", lambda device=None: properties)
    _replace(workspace, "raw_stream", lambda device: 0)
    _replace(launch, "current_device", lambda: 0)


def _replace(owner: Any, name: str, by: object) -> None:
    """Give a name of a module or a class another meaning; it must exist."""
    getattr(owner, name)
    setattr(owner, name, by)


def compile_all(launches: list[Launch], capability: tuple[int, int], processes: int) -> None:
    """Compile the launches into Triton's cache, several at a time."""
    without_a_gpu(capability)
    compilers: list[Callable[[], None]] = [
        lambda launch=launch: compile_only(*launch)  # type: ignore[misc]
        for launch in launches
    ]
    _COMPILERS.extend(compilers)
    # Forked, so that the arguments need not travel.
    with ProcessPoolExecutor(processes, get_context("fork")) as pool:
        for _ in pool.map(_compile, range(len(compilers))):
            pass


_COMPILERS: list[Callable[[], None]] = []
"""What the processes compile, by number."""


def _compile(number: int) -> None:
    _COMPILERS[number]()


def _end_with_parent() -> None:
    """End this process when the one that began it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Read the job, compile it, and print the number of kernels."""
    job = json.load(sys.stdin)
    launches = rehearse(job)
    _end_with_parent()
    processes = max(1, min(MOST, (os.cpu_count() or 1) // 2, len(launches)))
    compile_all(launches, tuple(job["capability"]), processes)
    print(len(launches))


if __name__ == "__main__":
    main()
