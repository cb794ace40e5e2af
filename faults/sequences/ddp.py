"""One rank under DDP."""

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from faults.sequences.answer import Vector, flat
from faults.sequences.net import Net, images, loss_of, poison
from faults.sequences.trainer import LR, Trainer, fp32_default


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
            # An update of zeros moves nothing: after a flush all may be below a kept threshold.
            if out.any():
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
