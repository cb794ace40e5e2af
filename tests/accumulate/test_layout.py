"""Which parameters travel together, and where they lie."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.accumulate import Bundle, arrange
from gradwire.accumulate.layout import bundle_bytes, size_of
from gradwire.errors import ConfigError
from gradwire.types import ALIGN, Slot


def slot(name, n, dtype=torch.float32, unit=0):
    return Slot(name, (n,), (1,), dtype, numel=n, unit=unit)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    halves=st.sets(st.integers(0, 19)),
    units=st.integers(1, 3),
    dense=st.booleans(),
    limit=st.sampled_from([1000, 20000, 10**9]),
)
def test_every_parameter_once_aligned_and_apart(sizes, halves, units, dense, limit):
    slots = [
        slot(
            f"{'bias' if i % 3 == 0 else 'weight'}{i}",
            n,
            torch.bfloat16 if i in halves else torch.float32,
            i % units,
        )
        for i, n in enumerate(sizes)
    ]
    bundles = arrange(slots, limit, ("bias*",) if dense else ())
    placed = [s for bundle in bundles for s in bundle]
    assert sorted(s.name for s in placed) == sorted(s.name for s in slots)
    for bundle in bundles:
        assert len({(s.dtype, s.unit) for s in bundle}) == 1
        if dense:
            assert len({s.name.startswith("bias") for s in bundle}) == 1
        assert len(bundle) == 1 or 4 * size_of(bundle[:-1]) < limit, "it was full before"
        end = 0
        for s in bundle:
            assert s.offset % ALIGN == 0
            assert end <= s.offset < end + ALIGN
            end = s.offset + s.numel
        assert end <= size_of(bundle) < end + ALIGN
    kinds = {(s.dtype, s.unit, dense and s.name.startswith("bias")) for s in slots}
    early = [bundle for bundle in bundles if 4 * size_of(bundle) < limit]
    assert len(early) <= len(kinds), "a bundle was cut for no reason"


def test_a_small_parameter_travels_with_the_large_one_that_follows():
    slots = [slot("fc3", 500), slot("fc2.bias", 10), slot("fc2", 9000), slot("conv", 100)]
    names = [[s.name for s in bundle] for bundle in arrange(slots, 4 * 1000, ())]
    assert names == [["fc3", "fc2.bias", "fc2"], ["conv"]]


def test_the_size_of_a_bundle_is_the_devices_unless_given():
    cuda, million = torch.device("cuda"), 10**6
    assert bundle_bytes(None, torch.device("cpu"), 100 * million) == 25e6
    assert bundle_bytes(None, cuda, million) == 25e6
    assert bundle_bytes(None, cuda, 25 * million) == 40e6
    assert bundle_bytes(None, cuda, 138 * million) == 200e6
    assert bundle_bytes(3, cuda, million) == 3e6


def test_indices_must_fit_int32():
    with pytest.raises(ConfigError, match="exceeds 2,147,483,647, what int32 indices reach"):
        size_of(arrange([slot("big", 2**31)], 10**12, ())[0])


def test_view_is_in_the_parameters_own_memory_order():
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    like = Slot("w", tuple(weight.shape), weight.stride(), weight.dtype, numel=weight.numel())
    bundle = Bundle([like], torch.device("cpu"), rank=0, index=0, dense=False)
    flat = weight.as_strided((weight.numel(),), (1,))
    bundle.accumulate([(0, flat)], 64, torch.tensor(False))
    assert torch.equal(bundle.view(bundle.u, like), weight)
