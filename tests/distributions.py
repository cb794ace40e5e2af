"""Vectors of the kinds that gradients and their residuals come in, and worse."""

import torch


def _t(nu, size, generator):
    """Student's t: normal / sqrt(chi-square / nu)."""
    squares = sum(torch.randn(size, generator=generator).square() for _ in range(nu))
    return torch.randn(size, generator=generator) / (squares / nu).sqrt()


def _laplace(size, generator):
    uniform = torch.rand(size, generator=generator, dtype=torch.float64) - 0.5
    return (-uniform.sign() * torch.log1p(-2 * uniform.abs())).float()


def _gennormal(size, generator):
    """Density ~ exp(-|x|^0.5): |x| is the square of a Gamma(2) variable."""
    uniform = torch.rand(2, size, generator=generator, dtype=torch.float64)
    gamma = -torch.log1p(-uniform).sum(0)
    return (gamma.square() * torch.randn(size, generator=generator).sign()).float()


def _layers(size, generator):
    """40 layers of equal length, each Gaussian with a scale of its own (log-normal)."""
    scales = torch.exp(1.5 * torch.randn(40, generator=generator))
    each = scales.repeat_interleave(-(-size // 40))[:size]
    return torch.randn(size, generator=generator) * each


MAKERS = {
    "gaussian": lambda n, g: torch.randn(n, generator=g),
    "laplace": _laplace,
    "t5": lambda n, g: _t(5, n, g),
    "t3": lambda n, g: _t(3, n, g),
    "gennormal": _gennormal,
    "layers": _layers,
    "zeros": lambda n, g: torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.1),
    "shifted": lambda n, g: torch.randn(n, generator=g) + 0.3,
    "uniform": lambda n, g: torch.rand(n, generator=g) * 2 - 1,
}


def draw(kind, size, seed=0):
    """`size` entries of the named kind; the same for the same seed."""
    return MAKERS[kind](size, torch.Generator().manual_seed(seed))
