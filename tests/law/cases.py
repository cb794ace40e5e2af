"""Gradients of several workers, and how far a step is from the law."""

import torch


def gradients(kind, world, size, dtype, generator):
    """One flat gradient a worker: alike, independent, or of very different sizes."""
    shared = torch.randn(size, generator=generator)
    out = []
    for rank in range(world):
        own = torch.randn(size, generator=generator)
        g = {
            "independent": own,
            "correlated": 0.7 * shared + 0.3 * own,
            "identical": shared,
            "heavy": own / (0.05 + torch.rand(size, generator=generator)) ** 2,
            "layers": own * torch.logspace(-6, 3, size),
            "zeros": own * (torch.rand(size, generator=generator) < 0.1),
            "one worker": own * (rank == 0),
            "constant": torch.full((size,), 0.5),
        }[kind]
        out.append(g.to(dtype))
    return out


KINDS = [
    "independent",
    "correlated",
    "identical",
    "heavy",
    "layers",
    "zeros",
    "one worker",
    "constant",
]


NOTHING = torch.zeros((), dtype=torch.float64)


def violation(u, update, residuals, before=NOTHING, after=NOTHING):
    """The largest error of the law, in roundings of the summands.

    before, after: what owners kept of means, before this step and after it.
    """
    mean_u = torch.stack(u).double().mean(0) + before
    kept = torch.stack(residuals).double().mean(0) + after
    # A residual is larger than u where a sign made a large value of a small one.
    sizes = (torch.stack(tensors).double().abs().amax(0) for tensors in (u, residuals))
    size = torch.maximum(*sizes) + update.double().abs() + 1e-30
    # An owner keeps much of a small entry that shares a scale with a large one.
    size = size + torch.maximum(before.abs(), after.abs())
    return float(((mean_u - update.double() - kept).abs() / size).max()) / 2**-23
