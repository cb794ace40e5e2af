"""The wire format: what goes in comes out, and damaged bytes are refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from faults.fuzz_messages import fuzz
from gradwire.encode import HEADER, Encoding, decode, encode, nbytes
from gradwire.encode.format import VALUES, index_bytes
from gradwire.errors import MessageError
from gradwire.types import Sparse

TRUE = torch.tensor(True)


def sparse(size=1000, k=50, seed=0):
    return gradwire.compress(torch.randn(size, generator=torch.Generator().manual_seed(seed)), k=k)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    size=st.integers(1, 5000),
    share=st.floats(0, 1),
    values=st.sampled_from([*VALUES]),
    indices=st.sampled_from(["int32", "packed", "local16", "bitmap", "auto"]),
    padding=st.integers(0, 4),
    finite=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_round_trip(size, share, values, indices, padding, finite, seed):
    entries = padded(sparse(size, int(share * size), seed), padding)
    encoding = Encoding(values, indices)
    message = encode(entries, torch.tensor(finite), encoding)
    assert message.buffer.dtype == torch.uint8
    assert message.buffer.numel() == nbytes(entries.capacity, encoding, size)
    back, flag = decode(message.buffer)
    assert flag == finite
    assert torch.equal(back.indices, entries.indices)
    assert int(back.count) == int(entries.count)
    largest = float(entries.values.abs().max()) if entries.capacity else 0
    errors = {"fp32": 0, "bf16": 2**-8, "fp16": 2**-10, "int8": 1 / 250, "int4": 1 / 13}
    error = errors.get(values, 1)
    torch.testing.assert_close(back.values, entries.values, rtol=0, atol=error * largest)
    seen, usable = message.unpack(message.buffer)
    assert bool(usable) == finite
    assert torch.equal(seen.dense(), back.dense())
    assert torch.equal(message.delivered.values, back.values)


def padded(entries, n):
    """The same entries with room for n more, as far as the vector allows."""
    n = min(n, entries.size - entries.capacity)
    indices = torch.cat([entries.indices, torch.full((n,), entries.size, dtype=torch.int32)])
    return replace(entries, indices=indices, values=torch.cat([entries.values, torch.zeros(n)]))


@pytest.mark.parametrize(
    ("values", "most"),
    [
        ("fp32", 46),
        ("bf16", 30),
        ("fp16", 30),
        ("int8", 22),
        ("int4", 18),
        ("two-bit", 16),
        ("sign", 15),
    ],
)
def test_bits_an_entry_all_included(values, most):
    """At density 0.1 % the entropy of an index is 11.4 bits."""
    for size in (10**6, 25_557_032, 138_357_544):
        k = size // 1000
        bits = 8 * nbytes(k, Encoding(values, "packed"), size) / k
        assert bits <= most, (size, bits)
        assert nbytes(k, Encoding(values, "auto"), size) <= nbytes(k, Encoding(values), size)


def test_auto_is_the_smallest():
    for share, name in ((0.001, "packed"), (0.2, "packed"), (0.3, "bitmap")):
        k = int(share * 10000)
        assert Encoding(indices="auto").settled(10000, k).indices == name


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 200_000])
def test_local16_at_the_borders_of_its_blocks(size):
    """Ends of blocks, blocks without entries, padding behind a last block that is full."""
    where = [0, 65_534, 65_535, 65_536, 131_071, 131_072, 199_999]
    real = sorted({min(i, size - 1) for i in where})
    indices = torch.tensor([*real, size], dtype=torch.int32)
    entries = Sparse(indices, torch.zeros(len(indices)), torch.tensor(len(real)), size)
    message = encode(entries, TRUE, Encoding("fp32", "local16"))
    assert decode(message.buffer)[0].indices.tolist() == [*real, size]
    blocks = -(-size // 65_536)
    ends = message.buffer[HEADER : HEADER + 4 * blocks].view(torch.int32).tolist()
    assert ends == [sum(i < 65_536 * (b + 1) for i in real) for b in range(blocks)]


def body(values, indices, encoding, size=8):
    """What follows the header, worked out by hand below."""
    entries = Sparse(
        torch.tensor(indices, dtype=torch.int32), torch.tensor(values), torch.tensor(2), size
    )
    return encode(entries, TRUE, encoding).buffer[HEADER:]


def test_layout_of_indices_by_hand():
    """1 and 6 of 8: 2 low bits each, 01 and 10; high parts 0 and 1 at bits 0 + 0 and 1 + 1."""
    words = body([0.0, 0.0], [1, 6], Encoding("fp32", "packed")).view(torch.int32)
    assert words.tolist() == [0b1001, 0b101, 0, 0]
    words = body([0.0, 0.0], [1, 6], Encoding("fp32", "bitmap")).view(torch.int32)
    assert words.tolist() == [0b1000010, 0, 0, 0]
    words = body([0.0, 0.0], [1, 6], Encoding("fp32", "local16")).view(torch.int32)
    assert words.tolist() == [2, 1 | 6 << 16, 0, 0]
    # Padding has no place, and is in no block.
    words = body([0.0, 0.0, 0.0], [1, 6, 8], Encoding("bf16", "local16")).view(torch.int32)
    assert words[:3].tolist() == [2, 1 | 6 << 16, 0]
    # 32 low bits, then 16 + 16 + 1 high ones.
    assert index_bytes("packed", 64, 16) == 4 + 8


def test_layout_of_values_by_hand():
    """Scales 127 / 127 and 14 / 7; levels -7 and 3 are stored as 1 and 11."""
    codes = body([127.0, -3.4], [0, 1], Encoding("int8", "bitmap"))[4:]
    assert codes[:4].view(torch.float32).tolist() == [1.0]
    assert codes[4:6].view(torch.int8).tolist() == [127, -3]
    codes = body([-14.0, 6.0], [0, 1], Encoding("int4", "bitmap"))[4:]
    assert codes[:4].view(torch.float32).tolist() == [2.0]
    assert codes[4:].tolist() == [1 | 11 << 4, *[0] * 7]
    codes = body([1.5, -2.0], [0, 1], Encoding("bf16", "bitmap"))[4:]
    assert codes[:4].tolist() == [0xC0, 0x3F, 0x00, 0xC0]
    # The mean of what is not zero; the second of three values is negative.
    codes = body([2.0, -4.0, 0.0], [0, 1, 8], Encoding("sign", "bitmap"))[4:]
    assert codes[:4].view(torch.float32).tolist() == [3.0]
    assert codes[4:].tolist() == [2, *[0] * 7]
    # Small 1, -3 and 2, large 8 and -10: the means are 2 and 9. The fifth opens a byte.
    codes = body([1.0, 8.0, -3.0, -10.0, 2.0], [0, 1, 2, 3, 4], Encoding("two-bit", "bitmap"))[4:]
    assert codes[:4].view(torch.bfloat16).tolist() == [2.0, 9.0]
    assert codes[4:].tolist() == [0 | 2 << 2 | 1 << 4 | 3 << 6, *[0] * 7]
    # The second block of 256 has a scale of its own.
    u = torch.cat([torch.full((256,), 1.27), torch.full((44,), 2.54)])
    scales = encode(gradwire.compress(u, k=300), TRUE, Encoding("int8", "bitmap")).buffer[72:80]
    torch.testing.assert_close(scales.view(torch.float32), torch.tensor([0.01, 0.02]))


@pytest.mark.parametrize("name", ["packed", "bitmap"])
def test_damaged_bits_are_refused(name):
    """Whatever bit of the indices is turned over: an error, or the same number of other indices."""
    message = encode(sparse(500, 40), TRUE, Encoding("fp32", name))
    end = HEADER + index_bytes(name, 500, 40)
    refused = 0
    for byte in range(HEADER, end):
        for bit in range(8):
            buffer = message.buffer.clone()
            buffer[byte] ^= 1 << bit
            try:
                entries, _ = decode(buffer)
                assert len(set(entries.indices.tolist())) == 40
                assert int(entries.indices.max()) < 500
            except MessageError:
                refused += 1
            seen, _ = message.unpack(buffer)
            assert 0 <= int(seen.indices.min()) <= int(seen.indices.max()) <= 500
    assert refused > 100


def test_bytes_as_documented():
    assert nbytes(0) == HEADER == 32
    assert nbytes(100) == 32 + 800
    assert nbytes(100, Encoding("bf16")) == 32 + 400 + 200 + 8  # up to a multiple of 16
    assert nbytes(100, Encoding("bf16", "common")) == 32 + 200 + 8
    words = encode(sparse(), TRUE).buffer[:HEADER].view(torch.int32).tolist()
    assert words == [int.from_bytes(b"GRW\x01", "little"), 1000, 50, 50, 1, 0, 432, 0]


def test_common_indices_do_not_travel():
    u = torch.randn(500)
    entries = gradwire.compress(u, method="randk", k=20, shared=True)
    message = encode(entries, TRUE)
    assert message.buffer.numel() == nbytes(20, Encoding(indices="common"))
    assert torch.equal(decode(message.buffer, entries.indices)[0].dense(), entries.dense())
    for wrong in (None, entries.indices[:19], entries.indices.repeat(2)):
        with pytest.raises(MessageError, match="carries no indices: pass the 20 common ones"):
            decode(message.buffer, wrong)


@pytest.mark.parametrize("values", VALUES)
def test_the_largest_numbers_stay_finite(values):
    u = torch.full((10,), torch.finfo(torch.float32).max)
    message = encode(gradwire.compress(u, k=5), TRUE, Encoding(values))
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
        (damage(5, 0x10), "unknown encoding 0x10"),
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


@settings(max_examples=12, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_damaged_messages_give_an_error_or_a_valid_answer(seed):
    """Every encoding; `make fuzz` does a million."""
    outcomes = fuzz(300, seed)
    assert outcomes["valid"] > 10
    assert outcomes["refused"] > 100


def test_a_message_of_another_shape_may_not_be_used():
    mine, other = encode(sparse(k=50), TRUE), encode(sparse(k=50), TRUE, Encoding("bf16"))
    padded = torch.zeros_like(mine.buffer)
    padded[: other.buffer.numel()] = other.buffer
    assert not bool(mine.unpack(padded)[1])
    assert bool(mine.unpack(mine.buffer)[1])


@pytest.mark.parametrize("word", [0, 1, 2, 4, 5, 6, 7])
@pytest.mark.parametrize("indices", ["int32", "packed"])
def test_a_header_that_differs_may_not_be_used(word, indices):
    mine = encode(sparse(), TRUE, Encoding("int8", indices))
    other = mine.buffer.clone()
    assert bool(mine.unpack(other)[1])
    other.view(torch.int32)[word] += 1
    assert not bool(mine.unpack(other)[1])
    parts = torch.stack([mine.index_part, other[: mine.index_part.numel()]])
    assert not bool(mine.unpack_indices(parts)[1])
    assert bool(mine.unpack_indices(parts[:1])[1])


@pytest.mark.parametrize("indices", ["int32", "packed", "local16", "bitmap"])
@pytest.mark.parametrize("values", ["fp32", "int4"])
def test_index_parts_are_read_without_the_values(values, indices):
    lists = [sparse(k=50, seed=seed) for seed in range(3)]
    messages = [encode(one, TRUE, Encoding(values, indices)) for one in lists]
    parts = torch.stack([message.index_part for message in messages])
    found, usable = messages[0].unpack_indices(parts)
    assert bool(usable)
    assert torch.equal(found, torch.cat([one.indices for one in lists]))


@pytest.mark.parametrize("indices", ["int32", "packed"])
def test_another_rank_may_have_chosen_fewer(indices):
    mine = encode(sparse(k=50), TRUE, Encoding("bf16", indices))
    fewer = encode(padded(sparse(k=47, seed=1), 3), TRUE, Encoding("bf16", indices))
    seen, usable = mine.unpack(fewer.buffer)
    assert bool(usable)
    assert int(seen.count) == 47
    assert seen.indices[47:].tolist() == [1000] * 3


def test_padding_of_common_indices_has_no_value():
    entries = replace(padded(sparse(k=20), 2), common=True)
    message = encode(entries, TRUE)
    other = message.buffer.clone()
    other[HEADER : HEADER + 4 * 22].view(torch.float32)[-2:] = 7
    assert message.unpack(other)[0].values[-2:].tolist() == [0, 0]


def test_unknown_encodings_are_named():
    with pytest.raises(ValueError, match=r"unknown value encoding 'bf61'. Did you mean 'bf16'"):
        Encoding("bf61")
    with pytest.raises(ValueError, match=r"unknown index encoding 'int64'. Did you mean 'int32'"):
        Encoding("fp32", "int64")
