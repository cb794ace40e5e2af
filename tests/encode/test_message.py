"""The wire format: what goes in comes out, and damaged bytes are refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from gradwire.encode import HEADER, Encoding, decode, encode, nbytes
from gradwire.errors import MessageError

TRUE = torch.tensor(True)


def sparse(size=1000, k=50, seed=0):
    return gradwire.compress(torch.randn(size, generator=torch.Generator().manual_seed(seed)), k=k)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 5000),
    share=st.floats(0, 1),
    values=st.sampled_from(["fp32", "bf16"]),
    finite=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_round_trip(size, share, values, finite, seed):
    entries = sparse(size, int(share * size), seed)
    encoding = Encoding(values)
    message = encode(entries, torch.tensor(finite), encoding)
    assert message.buffer.dtype == torch.uint8
    assert message.buffer.numel() == nbytes(entries.capacity, encoding)
    back, flag = decode(message.buffer)
    assert flag == finite
    assert torch.equal(back.indices, entries.indices)
    assert torch.equal(back.values, entries.values.to(encoding.dtype).float())
    seen, usable = message.unpack(message.buffer)
    assert bool(usable) == finite
    assert torch.equal(seen.dense(), back.dense())


def test_bytes_as_documented():
    assert nbytes(0) == HEADER == 32
    assert nbytes(100) == 32 + 800
    assert nbytes(100, Encoding("bf16")) == 32 + 400 + 200 + 8  # up to a multiple of 16
    assert nbytes(100, Encoding("bf16", "common")) == 32 + 200 + 8
    words = encode(sparse(), TRUE).buffer[:HEADER].view(torch.int32).tolist()
    assert words == [int.from_bytes(b"GRW\x01", "little"), 1000, 50, 50, 1, 0, 432, 0]


def test_common_indices_do_not_travel():
    u = torch.randn(500)
    entries = gradwire.compress(u, method="randk", k=20)
    message = encode(entries, TRUE)
    assert message.buffer.numel() == nbytes(20, Encoding(indices="common"))
    assert torch.equal(decode(message.buffer, entries.indices)[0].dense(), entries.dense())
    with pytest.raises(MessageError, match="carries no indices: pass the 20 common ones"):
        decode(message.buffer)


def test_values_beyond_bf16_stay_finite():
    u = torch.full((10,), torch.finfo(torch.float32).max)
    message = encode(gradwire.compress(u, k=5), TRUE, Encoding("bf16"))
    assert torch.isfinite(message.unpack(message.buffer)[0].values).all()


def damage(word, value):
    buffer = encode(sparse(), TRUE).buffer.clone()
    buffer.view(torch.int32)[word] = value
    return buffer


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.zeros(5, dtype=torch.uint8), "at least 32 bytes, got 5: truncated"),
        (torch.zeros(64), "flat uint8 tensor, got torch.float32"),
        (torch.zeros(64, dtype=torch.uint8), "not a gradwire message"),
        (damage(0, int.from_bytes(b"GRW\x02", "little")), "wire version 2, this is version 1"),
        (damage(1, -3), "size -3 and capacity 50 do not fit"),
        (damage(2, 5000), "size 1000 and capacity 5000 do not fit"),
        (damage(3, 51), r"count 51 is outside 0..50"),
        (damage(4, 2), "finite flag 2"),
        (damage(5, 77), "unknown encoding 0x4d"),
        (damage(6, 31), "432 bytes for a message of 432 that says 31"),
        (damage(7, 1), "reserved word 1"),
        (damage(8, 1000), r"an index is outside 0..999"),
        (damage(9, -1), r"an index is outside 0..999"),
        (damage(9, 999), "not ascending and unique"),
        (damage(60, 0x7F800000), "a value is not finite"),
        (encode(sparse(), TRUE).buffer[:-16], "416 bytes for a message of 432"),
        (damage(3, 49), "padding after entry 49 does not point at 1000"),
    ],
)
def test_damage_is_refused(buffer, message):
    with pytest.raises(MessageError, match=message):
        decode(buffer)


def test_fuzzed_messages_never_crash_or_reach_outside():
    """Random bytes behind a plausible header: an error, or entries inside the vector."""
    generator = torch.Generator().manual_seed(0)
    original = encode(sparse(), TRUE)
    accepted = 0
    for _ in range(3000):
        buffer = original.buffer.clone()
        for _ in range(int(torch.randint(1, 4, (), generator=generator))):
            where = int(torch.randint(0, buffer.numel(), (), generator=generator))
            buffer[where] = int(torch.randint(0, 256, (), generator=generator))
        try:
            entries, _ = decode(buffer)
            accepted += 1
            assert entries.dense().numel() == entries.size
        except MessageError:
            pass
        seen, _ = original.unpack(buffer)
        assert 0 <= int(seen.indices.min()) <= int(seen.indices.max()) <= 1000
    assert 0 < accepted < 3000


def test_a_message_of_another_shape_may_not_be_used():
    mine, other = encode(sparse(k=50), TRUE), encode(sparse(k=50), TRUE, Encoding("bf16"))
    padded = torch.zeros_like(mine.buffer)
    padded[: other.buffer.numel()] = other.buffer
    assert not bool(mine.unpack(padded)[1])
    assert bool(mine.unpack(mine.buffer)[1])


def test_unknown_encodings_are_named():
    with pytest.raises(ValueError, match=r"unknown value encoding 'bf61'. Did you mean 'bf16'"):
        Encoding("bf61")
    with pytest.raises(ValueError, match=r"unknown index encoding 'int64'. Did you mean 'int32'"):
        Encoding("fp32", "int64")
