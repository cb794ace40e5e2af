"""One rank: it runs the operations of a sequence, and answers each."""

import contextlib
import errno
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import gradwire
from faults.inject import Strike, install
from faults.sequences.answer import PLANNED, Answer, Look, Vector, digest_of, flat, put
from faults.sequences.net import Net
from faults.sequences.plan import Setup
from gradwire.state.saved.manifest import MANIFEST

LR = 0.05


@dataclass(frozen=True)
class Place:
    """This rank, the number of ranks, and their groups: of all, and of this rank alone."""

    rank: int
    world: int
    group: Any
    alone: Any = None


@contextlib.contextmanager
def fp32_default() -> Iterator[None]:
    """Make models in fp32, whatever the default dtype of the sequence is by now."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Trainer:
    """One rank: a model, an optimiser and a wire, and a method `do_...` per operation."""

    wire: Any = None
    together: Mapping[str, Any] = MappingProxyType({})
    """Arguments of a step in which all ranks exchange."""

    def __init__(self, place: Place, setup: Setup, timeout: float) -> None:
        self.place, self.setup = place, setup
        self.fields = dict(setup.fields, timeout=timeout)
        self.dtype = getattr(torch, setup.dtype)
        self.now = Answer()
        with fp32_default():
            self._build()

    def answer(self, name: str, args: dict[str, Any]) -> Answer:
        """Run one operation, and return its outcome with a look at this rank afterwards."""
        self.now = Answer()
        try:
            getattr(self, f"do_{name}")(**args)
        except BaseException as error:
            self.now.note_error(error)
        self.now.look = self.look()
        return self.now

    # --- what kinds have in common --------------------------------------------------------------

    def _build(self) -> None:
        raise NotImplementedError

    def _new_net(self) -> Net:
        torch.manual_seed(0)
        return Net().to(self.dtype)

    @property
    def weights(self) -> list[Tensor]:
        return list(self.net.parameters())

    def look(self) -> Look:
        """Return this rank as it is now."""
        wire, residual = self.wire, None
        if wire is not None and not wire.stopped:
            residual = flat([wire.residual(name) for name, _ in self.net.named_parameters()])
        return Look(
            flat(self.weights), digest_of(self.optimizer), residual, wire.steps,
            self._is_broken(), wire.stopped, self._shared(),
        )  # fmt: skip

    def _is_broken(self) -> bool:
        return self.wire.engine.broken is not None

    def _shared(self) -> Vector | None:
        return None

    def do_nothing(self) -> None:
        """Let another rank act alone."""

    def do_close(self) -> None:
        """Close the wire, and let the model go."""
        self.wire.close()

    def do_flush(self) -> None:
        self.wire.flush()

    def do_default_dtype(self, dtype: str) -> None:
        torch.set_default_dtype(getattr(torch, dtype))

    def do_memory_format(self, format: str) -> None:
        self.net.to(memory_format=getattr(torch, format))

    def do_model_dtype(self, dtype: str) -> None:
        self.dtype = getattr(torch, dtype)
        self.net.to(self.dtype)

    def do_save(self, folder: str, fails: bool = False) -> None:
        """Save, and tell the optimiser's state; with `fails` this rank's disk is full."""
        full = OSError(errno.ENOSPC, "No space left on device")
        spoiled = mock.patch("torch.save", side_effect=full) if fails else contextlib.nullcontext()
        with spoiled:
            gradwire.save(self.wire, folder)
        self.now.more["optimizer"] = self._pack_optimizer()

    def do_load(
        self, folder: str, parameters: Vector | None = None, optimizer: bytes = b""
    ) -> None:
        """Load, then take over the model and optimiser that the driver kept beside it."""
        gradwire.load(self.wire, folder)
        if parameters is not None:
            put(parameters, self.weights)
        if optimizer:
            state = torch.load(io.BytesIO(optimizer), weights_only=True)
            self.optimizer.load_state_dict(state)

    def _pack_optimizer(self) -> bytes:
        content = io.BytesIO()
        torch.save(self.optimizer.state_dict(), content)
        return content.getvalue()

    def do_one_sided(self, call: str, mine: bool, data: int, folder: str, rate: float) -> None:
        """Make a call on one rank only, then take a step on all."""
        if mine:
            calls = {
                "save": lambda: gradwire.save(self.wire, folder),
                "load": lambda: gradwire.load(self.wire, folder),
                "follow_lr": lambda: self.wire.follow_lr(rate),
            }
            calls.get(call, lambda: getattr(self.wire, call)())()
        self.do_step(data, **self.together)

    def do_exception(self, where: str, kind: str, data: int) -> None:
        """Raise in the forward or the backward pass."""

        def trap(_: Tensor) -> None:
            raise {"ValueError": ValueError, "KeyboardInterrupt": KeyboardInterrupt}[kind](PLANNED)

        setattr(self.net, f"on_{where}", trap)
        try:
            self.do_step(data)
        finally:
            setattr(self.net, f"on_{where}", None)

    def do_kill(self, moment: str, nth: int, mine: bool, data: int, folder: str) -> None:
        """Take a step, or save, in which one rank dies."""
        if mine:
            install(self.place.rank, Strike(self.place.rank, moment, nth))
        if moment in ("write", "replace"):
            self.do_save(folder)
        else:
            self.do_step(data, **self.together)

    def do_step(self, data: int, **more: Any) -> None:
        raise NotImplementedError


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of the checkpoint in a folder, by name.

    A rank that is killed while it saves leaves files that the manifest does not name.
    """
    if not folder.is_dir():
        return {}
    files = {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}
    manifest = files.get(MANIFEST)
    if manifest is None:
        return files
    return {n: c for n, c in files.items() if n == MANIFEST or n.encode() in manifest}
