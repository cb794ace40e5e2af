"""One rank under DDP or FSDP2: it runs the operations of a sequence, and answers each."""

import contextlib
import copy
import errno
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from faults.inject import Strike, install
from faults.sequences.answer import PLANNED, Answer, Look, Vector, digest_of, flat, local, put
from faults.sequences.net import Net, images, loss_of, poison
from faults.sequences.plan import Setup

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


class DDPTrainer(Trainer):
    """One rank under DDP."""

    def _build(self) -> None:
        self.net = self._new_net()
        self.model = self._wrap(self.net)
        self._prepare()

    def _prepare(self) -> None:
        momentum = 0.9 if self.setup.kind == "DDP" else 0.0
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=LR, momentum=momentum)
        self.scaler = self._new_scaler() if self.setup.scaler else None
        self.own: list[Tensor] | None = None
        """This rank's gradient since the last step, from a copy of the model without a wire."""
        self.must_use = False
        """True: the gradient of a micro-batch was dropped, so the next step leaves nothing out."""
        self.wire = self._attach(self.model, self.fields, self.scaler)

    def _new_scaler(self) -> Any:
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def _wrap(self, net: Net, unused: bool | None = None) -> nn.Module:
        return DistributedDataParallel(
            net,
            process_group=self.place.group,
            bucket_cap_mb=0.0003,
            find_unused_parameters=self.setup.unused if unused is None else unused,
            gradient_as_bucket_view=self.setup.views,
        )

    def _attach(self, model: nn.Module, fields: dict[str, Any], scaler: Any) -> Any:
        return gradwire.attach(model, scaler=scaler, **fields)

    # --- passes ---------------------------------------------------------------------------------

    def _twin(self) -> Net:
        """Return a copy of the model without a wire."""
        return copy.deepcopy(self.net)

    def _note_own(self, data: int, both: bool) -> None:
        """Add the gradient of a batch, from the copy, to this rank's own."""
        twin = self._twin()
        twin.on_forward = None
        if self.net.on_backward is not poison:
            twin.on_backward = None
        for parameter, grad in zip(twin.parameters(), self.own or [], strict=bool(self.own)):
            parameter.grad = grad.clone()
        loss_of(twin(images(data, self.place.rank, self.dtype), both)).backward()
        self.own = [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()]

    def _backward(self, data: int, both: bool = True) -> None:
        loss = loss_of(self.model(images(data, self.place.rank, self.dtype), both))
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _drop(self) -> None:
        """Forget what waits for the next step."""
        self.optimizer.zero_grad()
        self.own = None
        self.must_use = True

    def do_no_sync(self, data: int, how: str) -> None:
        """Pass a micro-batch that is not exchanged yet."""
        with self.model.no_sync():
            self._backward(data)
        self._note_own(data, True)

    def do_step(
        self,
        data: int,
        without: tuple[int, ...] = (),
        poisoned: bool = False,
        skips: bool = False,
        new_scale: float | None = None,
    ) -> None:
        """Take a step; `without` are the ranks that leave a convolution out."""
        # DDP takes a parameter that a dropped micro-batch used for used, and misses its gradient.
        both = self.place.rank not in without or self.must_use
        self.net.on_backward = poison if poisoned else self.net.on_backward
        before = self.own
        try:
            self._note_own(data, both)
            self._backward(data, both)
        except BaseException:
            # Where the forward pass fails nothing is lost: micro-batches before it go on waiting.
            self.own = before
            if self.net.on_forward is None:
                self._drop()
            raise
        finally:
            self.net.on_backward = None
        self._end_step(skips, new_scale)

    def _end_step(self, skips: bool, new_scale: float | None) -> None:
        """Tell gradient and update, and let the optimiser take the update if it is finite."""
        now, scale = self.now, 1.0 if self.scaler is None else float(self.scaler.get_scale())
        assert self.own is not None
        now.came = np.nan_to_num(flat(self.own), nan=0.0, posinf=0.0, neginf=0.0)
        out = flat([torch.zeros_like(p) if p.grad is None else p.grad for p in self.weights])
        finite = bool(np.isfinite(out).all())
        now.out, now.taken = out / np.float32(scale), finite and not skips
        if skips:
            self.wire.skip_step()
        elif self.scaler is not None:
            before = flat(self.weights)
            self.scaler.step(self.optimizer)
            self.scaler.update(new_scale)
            now.more["moved"] = before.tobytes() != flat(self.weights).tobytes()
        elif finite:
            self.optimizer.step()
        self._drop()
        self.must_use = False

    # --- other operations -----------------------------------------------------------------------

    def do_skip_step(self) -> None:
        """Skip a step where none was taken."""
        self.wire.skip_step()

    def do_follow_lr(self, rate: float) -> None:
        self.wire.follow_lr(rate)

    def do_detach(self) -> None:
        self.wire.detach()

    def do_load(
        self, folder: str, parameters: Vector | None = None, optimizer: bytes = b""
    ) -> None:
        super().do_load(folder, parameters, optimizer)
        self._drop()

    def do_model_dtype(self, dtype: str) -> None:
        super().do_model_dtype(dtype)
        self._drop()

    def do_attach(self, differ: str, mine: bool) -> None:
        """Attach again, or attach a second model with a setting that differs on one rank."""
        if differ == "again":
            self.wire = self._attach(self.model, self.fields, self.scaler)
            return
        fields, scaler, unused = dict(self.fields), self.scaler, self.setup.unused
        if mine and differ == "density":
            fields["density"] = fields["density"] / 2
        if mine and differ == "scaler":
            scaler = None if self.setup.scaler else self._new_scaler()
        if mine and differ == "unused":
            unused = not unused
        with fp32_default():
            second = self._wrap(self._new_net(), unused)
        self._attach(second, fields, scaler).close()


class FSDPTrainer(DDPTrainer):
    """One rank under FSDP2: each rank is a replica of one shard."""

    def _wrap(self, net: Net, unused: bool | None = None) -> nn.Module:
        mesh = DeviceMesh.from_group(self.place.alone, "cpu")
        for part in (net.other, net.second, net):
            fully_shard(part, mesh=mesh)
        return net

    def _attach(self, model: nn.Module, fields: dict[str, Any], scaler: Any) -> Any:
        return gradwire.attach(model, replicate_group=self.place.group, scaler=scaler, **fields)

    def _twin(self) -> Net:
        with fp32_default():
            twin = Net().to(self.dtype)
        with torch.no_grad():
            for mine, other in zip(twin.parameters(), self.weights, strict=True):
                mine.copy_(local(other))
        twin.on_backward = self.net.on_backward
        return twin

    def _pack_optimizer(self) -> bytes:
        # SGD without momentum has no state.
        return b""

    def do_no_sync(self, data: int, how: str) -> None:
        """Pass a micro-batch that waits: inside FSDP2, or with "all-reduce" in the residual."""
        switch = "set_requires_gradient_sync" if how == "sync" else "set_requires_all_reduce"
        getattr(self.model, switch)(False)
        try:
            self._backward(data)
        finally:
            getattr(self.model, switch)(True)
        self._note_own(data, True)
        if how == "all-reduce" and not self.wire.stopped:
            assert self.own is not None
            self.now.came, self.own = flat(self.own), None

    def do_step(self, data: int, without: tuple[int, ...] = (), **more: Any) -> None:
        # A unit that is left out would keep the micro-batches that wait inside FSDP2.
        super().do_step(data, () if self.own else without, **more)

    def do_load(
        self, folder: str, parameters: Vector | None = None, optimizer: bytes = b""
    ) -> None:
        own = self.own
        super().do_load(folder, parameters, optimizer)
        self.own = own  # FSDP2 does not forget the micro-batches that wait inside it


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of every file in a folder, by name."""
    if not folder.is_dir():
        return {}
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


__all__ = ["DDPTrainer", "FSDPTrainer", "Place", "Trainer", "dist", "files_of"]
