"""Stochastic rounding: right on average, repeatable, resumable, and its error is kept."""

import pytest
import torch

import gradwire
from gradwire.encode import Encoding, decode, encode
from gradwire.encode.format import STOCHASTIC
from gradwire.encode.noise import Noise, next_noise, random_words
from gradwire.errors import ConfigError
from gradwire.hashing import lowbias32, lowbias32_int
from gradwire.types import Memory, Sparse

TRUE = torch.tensor(True)
FIRST = [1302927599, 3401341616, 2501526713, 2095959233]


def noise(step=0, rank=0, bundle=0):
    return Noise(bundle, rank, torch.tensor(step))


def seen(values, name, own):
    indices = torch.arange(values.numel(), dtype=torch.int32)
    entries = Sparse(indices, values, torch.tensor(values.numel()), values.numel())
    message = encode(entries, TRUE, Encoding(name, "int32", "stochastic"), noise=own)
    assert torch.equal(decode(message.buffer)[0].values, message.delivered.values)
    return message.delivered.values


@pytest.mark.parametrize("name", STOCHASTIC)
def test_the_mean_is_the_value(name):
    """400 roundings of 512 values: their mean errs by less than 5 standard errors of a step."""
    values = torch.randn(512, generator=torch.Generator().manual_seed(0))
    draws = torch.stack([seen(values, name, noise(step)) for step in range(400)])
    step = {"bf16": 2**-7 * values.abs(), "int8": 4.5 / 127, "int4": 4.5 / 7}[name]
    assert float(((draws.mean(0) - values).abs() / step).max()) < 5 * 0.5 / 400**0.5
    assert bool(((draws - values).abs() <= step).all())
    moved = (draws != draws[0]).any(0)
    assert int(moved.sum()) > 450


@pytest.mark.parametrize("name", STOCHASTIC)
def test_what_needs_no_rounding_is_not_rounded(name):
    levels = {"bf16": 7, "int8": 127, "int4": 7}[name]
    values = torch.arange(-levels, levels + 1).float().repeat(8)[: 8 * 256]
    for step in range(20):
        assert torch.equal(
            seen(values[: 2 * levels + 1], name, noise(step)), values[: 2 * levels + 1]
        )


@pytest.mark.parametrize("name", STOCHASTIC)
def test_the_largest_numbers_are_not_rounded_beyond_the_last_level(name):
    values = torch.tensor([1.0, -1.0]).repeat(100) * torch.finfo(torch.float32).max
    for step in range(20):
        torch.testing.assert_close(seen(values, name, noise(step)), values, rtol=0.01, atol=0)


def test_words_are_the_same_everywhere_and_differ_by_step_rank_and_bundle():
    first = random_words(noise(), 1000)
    assert first[:4].tolist() == FIRST
    assert int(first.min()) >= 0
    assert int(first.max()) < 2**32
    for other in (noise(step=1), noise(rank=1), noise(bundle=1)):
        assert int((random_words(other, 1000) == first).sum()) <= 1
    halves = (first >> 16).double() / 2**16
    assert abs(float(halves.mean()) - 0.5) < 5 / (12 * 1000) ** 0.5
    bits = torch.stack([(first >> b) & 1 for b in range(32)]).double().mean(1)
    assert float((bits - 0.5).abs().max()) < 5 * 0.5 / 1000**0.5


def test_every_step_has_its_own_noise():
    memory = Memory(rank=2, bundle=3)
    for step in (1, 2, 3):
        own = next_noise(memory, torch.device("cpu"))
        assert (own.bundle, own.rank, int(own.step)) == (3, 2, step)
    assert int(memory["roundings"]) == 3


def test_keys_are_hashed_as_words_are():
    """On the host and on the device; of longer numbers the low 32 bits."""
    numbers = [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**40 + 12345]
    assert [lowbias32_int(x) for x in numbers] == lowbias32(torch.tensor(numbers)).tolist()
    assert lowbias32_int(2**32 + 5) == lowbias32_int(5)


def run(cluster, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        yield cluster.average([torch.randn(3000, generator=generator) for _ in range(3)])


@pytest.mark.parametrize("exchange", ["allgather", "gtopk"])
def test_a_resumed_run_rounds_the_same_way(exchange):
    fields = {"exchange": exchange, "values": "int4", "rounding": "stochastic", "density": 0.05}
    whole = list(run(gradwire.VirtualCluster(3, **fields), range(6)))
    first, second = (gradwire.VirtualCluster(3, **fields) for _ in range(2))
    list(run(first, range(3)))
    second.load_state_dict(first.state_dict())
    for update, expected in zip(run(second, range(3, 6)), whole[3:], strict=True):
        assert torch.equal(update, expected)


@pytest.mark.parametrize(("values", "exchange"), [("int8", "allgather"), ("bf16", "gtopk")])
@pytest.mark.parametrize("world", [1, 2, 3, 6])
def test_the_law_and_the_same_bits_everywhere(values, exchange, world):
    cluster = gradwire.VirtualCluster(
        world, exchange=exchange, values=values, rounding="stochastic", density=0.1
    )
    generator = torch.Generator().manual_seed(world)
    old = [torch.zeros(700) for _ in range(world)]
    for _ in range(3):
        g = [torch.randn(700, generator=generator) for _ in range(world)]
        update = cluster.average(g)
        new = [cluster.residual(rank) for rank in range(world)]
        u = torch.stack([a + b for a, b in zip(g, old, strict=True)]).double()
        left = u.mean(0) - update.double() - torch.stack(new).double().mean(0)
        assert float((left.abs() / (u.abs().amax(0) + 1e-30)).max()) <= 4 * 2**-23
        old = new

    def work(rank):
        state = cluster._states[rank]
        state.begin()
        return state.process(state.bundles[0], [g[rank]]).numpy().tobytes()

    assert len(set(cluster._ranks.run(work))) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rounding": "random"}, "unknown rounding 'random'"),
        ({"rounding": "stochastic"}, "for values bf16, int8, int4; got 'fp32'"),
        ({"rounding": "stochastic", "values": "fp16"}, "got 'fp16'"),
        (
            {"rounding": "stochastic", "values": "bf16", "exchange": "union"},
            "'allgather' and 'gtopk'; 'union' rounds to the nearest",
        ),
    ],
)
def test_what_cannot_be_rounded_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        gradwire.Config(**fields)


def test_noise_and_rounding_belong_together():
    entries = gradwire.compress(torch.randn(100), k=5)
    with pytest.raises(ValueError, match="one needs the other"):
        encode(entries, TRUE, Encoding("int8", "int32", "stochastic"))
    with pytest.raises(ValueError, match="one needs the other"):
        encode(entries, TRUE, Encoding("int8"), noise=noise())
