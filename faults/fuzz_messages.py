"""Fuzzer of all decoders. A damaged message must give a clear error or a valid answer.

CI runs a few thousand; `make fuzz`, or `python -m faults.fuzz_messages --count 1000000`, a million.
"""

import argparse
import functools
import itertools
import random
import time
from collections import Counter

import torch

import gradwire
from gradwire.encode import HEADER, Encoding, decode, encode
from gradwire.encode.format import INDICES, VALUES
from gradwire.encode.message import Message
from gradwire.errors import MessageError
from gradwire.exchange.allgather import mean_of_gathered
from gradwire.types import Sparse

SHAPES = [(1, 1, 0), (40, 40, 0), (999, 33, 5), (70_000, 12, 1), (131_072, 300, 0)]
WORDS = [0, 1, 2, -1, 31, 32, 33, 255, 256, 2**16, 2**24, 2**31 - 1, -(2**31)]


@functools.cache
def originals() -> list[Message]:
    """Return a message of every encoding and shape."""
    out = []
    for (size, k, padding), values, indices in itertools.product(SHAPES, VALUES, INDICES):
        if indices == "bitmap" and size > 1000:
            continue
        generator = torch.Generator().manual_seed(len(out))
        chosen = gradwire.compress(torch.randn(size, generator=generator), k=k - padding)
        tail = torch.full((padding,), size, dtype=torch.int32)
        entries = Sparse(
            torch.cat([chosen.indices, tail]),
            torch.cat([chosen.values, torch.zeros(padding)]),
            chosen.count,
            size,
            common=indices == "common",
        )
        out.append(encode(entries, torch.tensor(True), Encoding(values, indices)))
    return out


def damage(buffer: bytearray, other: bytes, rng: random.Random) -> bytes:
    """Return the bytes with a fault in them, now and then without a fault."""
    kind = rng.randrange(8)
    if kind == 0:
        return bytes(buffer[: rng.randrange(len(buffer) + 1)])
    if kind == 1:
        return bytes(buffer) + rng.randbytes(rng.choice([1, 4, 16, 64]))
    if kind == 2:
        word = 4 * rng.randrange(HEADER // 4)
        value = rng.choice([*WORDS, rng.randrange(-(2**31), 2**31)])
        buffer[word : word + 4] = value.to_bytes(4, "little", signed=True)
    elif kind == 3:
        begin = rng.randrange(len(buffer))
        end = min(len(buffer), begin + rng.choice([1, 2, 4, 8, 64, 4096]))
        buffer[begin:end] = rng.randbytes(end - begin)
    elif kind == 4:
        cut = rng.randrange(len(buffer))
        return bytes(buffer[:cut]) + other[cut:]
    elif kind == 5:
        buffer[HEADER:] = rng.randbytes(len(buffer) - HEADER)
    elif kind == 6:
        at, swap = rng.randrange(len(buffer)), rng.randrange(len(buffer))
        buffer[at], buffer[swap] = buffer[swap], buffer[at]
    else:
        for _ in range(rng.randrange(4)):
            buffer[rng.randrange(len(buffer))] ^= 1 << rng.randrange(8)
    return bytes(buffer)


def check(message: Message, raw: bytes, gathered: bool) -> str:
    """Decode the bytes, and return "valid" or "refused"; a wrong answer is an AssertionError.

    gathered: True decodes them also as a message that a collective brought, of the right length.
    """
    buffer = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte()
    chosen = message.chosen
    try:
        entries, finite = decode(buffer, chosen.indices if chosen.common else None)
        outcome = "valid"
    except MessageError:
        outcome = "refused"
    else:
        assert isinstance(finite, bool)
        assert entries.values.dtype == torch.float32
        assert bool(entries.values.isfinite().all())
        count, indices = int(entries.count), entries.indices.tolist()
        assert 0 <= count <= entries.capacity <= entries.size
        if not chosen.common:
            real = indices[:count]
            assert all(0 <= i < entries.size for i in real)
            assert all(a < b for a, b in itertools.pairwise(real))
            assert all(i == entries.size for i in indices[count:])
    if gathered and buffer.numel() == message.buffer.numel():
        seen, _ = message.unpack(buffer)
        assert 0 <= int(seen.indices.min()) <= int(seen.indices.max()) <= chosen.size
        update, ok = mean_of_gathered(message, torch.stack([message.buffer, buffer]))
        assert update.numel() == chosen.size + 1
        assert bool(ok) or bool(update.isnan().all())
    return outcome


def fuzz(count: int, seed: int = 0) -> Counter[str]:
    """Return the numbers of valid and refused messages among `count` damaged ones."""
    rng = random.Random(seed)
    threads = torch.get_num_threads()
    # Vectors this small are slower on many threads, by far where other processes use them too.
    torch.set_num_threads(1)
    try:
        return _fuzz(count, seed, rng)
    finally:
        torch.set_num_threads(threads)


def _fuzz(count: int, seed: int, rng: random.Random) -> Counter[str]:
    messages = originals()
    raw = [bytes(m.buffer.tolist()) for m in messages]
    outcomes: Counter[str] = Counter()
    for n in range(count):
        i = n % len(messages)
        bad = damage(bytearray(raw[i]), rng.choice(raw), rng)
        try:
            # As gathered every fifth time only: that takes four fifths of the time.
            outcomes[check(messages[i], bad, gathered=rng.randrange(5) == 0)] += 1
        except Exception as error:
            words = f"message {n} of seed {seed}, {messages[i].encoding}: {bad.hex()}"
            raise AssertionError(words) from error
        if n % 100_000 == 99_999:
            print(f"{n + 1:,} messages, {dict(outcomes)}", flush=True)
    return outcomes


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begin = time.perf_counter()
    outcomes = fuzz(options.count, options.seed)
    print(f"{options.count:,} messages, {dict(outcomes)}, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
