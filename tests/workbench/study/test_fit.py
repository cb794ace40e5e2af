import pytest
import torch

from gradwire.workbench.study.fit import fit_shape, tail_index

SIZE = 50_000


def draw(kind):
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(4, SIZE, generator=generator)
    if kind == "normal":
        return noise[0]
    if kind == "t":
        return noise[0] / noise[1:].square().mean(0).sqrt()
    sign = torch.where(noise[0] > 0, 1.0, -1.0)
    return sign * torch.empty(SIZE).exponential_(generator=generator)


@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize(
    ("kind", "best"), [("normal", "normal"), ("laplace", "Laplace"), ("t", "t")]
)
def test_the_distribution_that_was_drawn_from_fits_best(kind, best, scale):
    found = fit_shape(scale * draw(kind))
    assert found.best == best
    assert found.rms == pytest.approx(scale * draw(kind).square().mean().sqrt().item(), rel=1e-5)
    if kind == "t":
        assert found.degrees == 3


def test_likelihoods_are_those_of_the_definitions():
    x = draw("laplace")
    found, rms = fit_shape(x), x.square().mean().sqrt()
    scaled = (x / rms).double()
    normal = torch.distributions.Normal(scaled.mean(), scaled.std(correction=0))
    laplace = torch.distributions.Laplace(scaled.median(), (scaled - scaled.median()).abs().mean())
    assert found.normal == pytest.approx(normal.log_prob(scaled).mean().item(), rel=1e-6)
    assert found.laplace == pytest.approx(laplace.log_prob(scaled).mean().item(), rel=1e-6)


@pytest.mark.parametrize(("kind", "kurtosis", "within"), [("normal", 3, 0.1), ("laplace", 6, 0.5)])
def test_kurtosis(kind, kurtosis, within):
    assert fit_shape(draw(kind)).kurtosis == pytest.approx(kurtosis, abs=within)


def test_the_tail_index_of_a_power_law():
    u = torch.rand(SIZE, generator=torch.Generator().manual_seed(2))
    assert tail_index(u ** (-1 / 2.5)) == pytest.approx(2.5, rel=0.1)


def test_zeros_are_counted_and_not_fitted():
    found = fit_shape(torch.cat([draw("normal"), torch.zeros(SIZE)]))
    assert found.zeros == pytest.approx(0.5, abs=1e-3)
    assert found.best == "normal"
