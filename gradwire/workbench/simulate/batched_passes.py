"""Compute the gradients of many workers as one large batch.

A single worker's batch of a small convolutional network leaves most of a GPU idle. Here every
layer sees the images of all workers at once, and still returns one weight gradient per worker.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.workbench.simulate.filters import filter_gradients
from gradwire.workbench.simulate.graph_passes import capture_pass
from gradwire.workbench.train.task import Batch


class BatchedPasses:
    """Forward and backward passes of P workers with the same weights, as one batch.

    A call fills `gradients` [P, d] with one flat gradient per worker. Batch norm uses statistics
    per worker, and `model` keeps the running statistics of worker 0. `loss` must be a mean over a
    batch. Every entry of `losses` [P] is the mean loss over all workers. Activations have `dtype`;
    weights and gradients are fp32. On CUDA the layers are compiled and captured as one graph.
    `graph_passes.GraphPasses` does the same for any network.
    """

    def __init__(
        self,
        model: nn.Module,
        workers: int,
        loss: Callable[[nn.Module, Batch], Tensor],
        batch: Batch,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._network = _Network(model, workers, dtype)
        self._leaves = list(self._network.parameters())
        self._batch = [part.clone() for part in batch]
        self._workers, self._loss = workers, loss
        device, entries = self._batch[0].device, sum(p[0].numel() for p in self._leaves)
        self.losses = torch.zeros(workers, dtype=torch.float32, device=device)
        self.gradients = torch.zeros(workers, entries, dtype=torch.float32, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._loss = torch.compile(loss, dynamic=False, fullgraph=True)
            self._graph = capture_pass(list(model.buffers()), self._pass, warm_up=self._pass)

    def __call__(self, batch: Batch) -> None:
        """Overwrite `losses` and `gradients` with those of `batch`."""
        for static, new in zip(self._batch, batch, strict=True):
            static.copy_(new)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._pass()

    def _pass(self) -> None:
        loss = self._loss(self._network, [part.flatten(0, 1) for part in self._batch])
        # The loss is the mean over all workers, so its gradient is 1/P of each worker's gradient.
        gradients = torch.autograd.grad(loss * self._workers, self._leaves)
        torch.cat([g.flatten(1) for g in gradients], dim=1, out=self.gradients)
        self.losses.copy_(loss.detach())


class _Network(nn.Module):
    """A copy of `model` with one row of every parameter per worker, [P, ...].

    All rows are views of the model's parameter, so they take no memory.
    """

    def __init__(self, model: nn.Module, workers: int, dtype: torch.dtype) -> None:
        super().__init__()
        shared: dict[int, Any] = {id(t): t for t in [*model.parameters(), *model.buffers()]}
        self._inner, self._dtype = deepcopy(model, shared), dtype
        for module in list(self._inner.modules()):
            for name, layer in module.named_children():
                if next(layer.parameters(recurse=False), None) is not None:
                    setattr(module, name, _per_worker(layer, workers))

    def forward(self, images: Tensor) -> Tensor:
        x = images.to(self._dtype).contiguous(memory_format=torch.channels_last)
        return self._inner(x).float()


def _per_worker(layer: nn.Module, workers: int) -> nn.Module:
    """Return a layer that computes as `layer` does and has one gradient per worker."""
    if isinstance(layer, nn.Conv2d) and layer.bias is None and _is_plain(layer):
        return _Convolution(layer, workers)
    if isinstance(layer, nn.BatchNorm2d) and layer.track_running_stats and layer.momentum:
        return _Norm(layer, workers)
    if isinstance(layer, nn.Linear) and layer.bias is not None:
        return _Linear(layer, workers)
    raise TypeError(f"passes side by side know no {layer}: use graph_passes.GraphPasses")


def _is_plain(layer: nn.Conv2d) -> bool:
    """Return True if the convolution has no groups or dilation, and equal height and width."""
    whole = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros"
    square = all(len(set(pair)) == 1 for pair in (layer.kernel_size, layer.stride, layer.padding))
    return whole and square


def _rows(parameter: Tensor, workers: int) -> nn.Parameter:
    return nn.Parameter(parameter.detach().expand(workers, *parameter.shape))


class _Convolution(nn.Module):
    def __init__(self, layer: nn.Conv2d, workers: int) -> None:
        super().__init__()
        self.weight = _rows(layer.weight, workers)
        self.stride, self.padding = layer.stride[0], int(layer.padding[0])

    def forward(self, x: Tensor) -> Tensor:
        return _Convolve.apply(x, self.weight, self.stride, self.padding)


class _Convolve(torch.autograd.Function):
    """A convolution with the first row of the weights, and a gradient for every row.

    All rows are equal, so one convolution over all images computes the outputs of all workers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, stride: int, padding: int) -> Tensor:
        weight = weights[0].to(x.dtype).contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, weight)
        ctx.workers, ctx.stride, ctx.padding = weights.shape[0], stride, padding
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        input_gradient = None
        if ctx.needs_input_grad[0]:
            input_gradient, _, _ = torch.ops.aten.convolution_backward(
                slope, x, weight, None, [ctx.stride] * 2, [ctx.padding] * 2, [1, 1], False, [0, 0],
                1, [True, False, False],
            )  # fmt: skip
        width = weight.shape[-1]
        weight_gradients = filter_gradients(x, slope, ctx.workers, width, ctx.stride, ctx.padding)
        return input_gradient, weight_gradients, None, None


class _Norm(nn.Module):
    """Batch norm with a mean and a variance per worker."""

    def __init__(self, layer: nn.BatchNorm2d, workers: int) -> None:
        super().__init__()
        self.weight, self.bias = _rows(layer.weight, workers), _rows(layer.bias, workers)
        self.eps, self.momentum = layer.eps, layer.momentum or 0.0
        running = layer.running_mean, layer.running_var, layer.num_batches_tracked
        self.mean, self.variance, self.batches = (
            buffer for buffer in running if buffer is not None
        )

    def forward(self, x: Tensor) -> Tensor:
        images = x.unflatten(0, (self.weight.shape[0], -1)).float()
        variance, mean = torch.var_mean(images, dim=(1, 3, 4), correction=0)
        count = images[0].numel() // images.shape[2]
        with torch.no_grad():
            self.batches.add_(1)
            self.mean.lerp_(mean[0], self.momentum)
            # PyTorch keeps the unbiased variance, although it normalises by the biased one.
            self.variance.lerp_(variance[0] * (count / (count - 1)), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        shift = self.bias - mean * scale
        normalised = images * scale[:, None, :, None, None] + shift[:, None, :, None, None]
        return normalised.to(x.dtype).flatten(0, 1)


class _Linear(nn.Module):
    def __init__(self, layer: nn.Linear, workers: int) -> None:
        super().__init__()
        self.weight, self.bias = _rows(layer.weight, workers), _rows(layer.bias, workers)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float().unflatten(0, (self.weight.shape[0], -1))
        return torch.baddbmm(self.bias[:, None], rows, self.weight.transpose(1, 2)).flatten(0, 1)
