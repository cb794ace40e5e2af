"""Compute one weight gradient per worker of a convolution over the images of all workers."""

import torch
from torch import Tensor


@torch.library.custom_op("gradwire::filter_gradients", mutates_args=())
def filter_gradients(
    x: Tensor, slope: Tensor, workers: int, width: int, stride: int, padding: int
) -> Tensor:
    """Return the weight gradients [P, out, in, width, width] in fp32.

    x: the layer's inputs [P n, in, ...]. slope: the gradient of its outputs [P n, out, ...].
    This is a custom operator, so torch.compile calls it unchanged. CUDA has a kernel, because
    cuDNN's grouped convolution would need the images of all workers in another order.
    """
    if x.device.type == "cuda":
        from gradwire.workbench.simulate.filters_triton import filter_gradients_triton

        return filter_gradients_triton(x, slope, workers, width, stride, padding)
    return filter_gradients_torch(x, slope, workers, width, stride, padding)


@filter_gradients.register_fake
def _(x: Tensor, slope: Tensor, workers: int, width: int, stride: int, padding: int) -> Tensor:
    shape = (workers, slope.shape[1], x.shape[1], width, width)
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def filter_gradients_torch(
    x: Tensor, slope: Tensor, workers: int, width: int, stride: int, padding: int
) -> Tensor:
    """Compute `filter_gradients` as one grouped convolution, with a group per worker."""
    inputs, outputs = (_grouped(part.float(), workers) for part in (x, slope))
    weights = inputs.new_zeros(outputs.shape[1], x.shape[1], width, width)
    _, gradients, _ = torch.ops.aten.convolution_backward(
        outputs, inputs, weights, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0],
        workers, [False, True, False],
    )  # fmt: skip
    return gradients.unflatten(0, (workers, -1))


def _grouped(images: Tensor, workers: int) -> Tensor:
    """Return images [P n, c, h, w] as [n, P c, h, w]."""
    return images.unflatten(0, (workers, -1)).transpose(0, 1).flatten(1, 2)
