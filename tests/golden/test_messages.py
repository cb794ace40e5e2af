"""Messages are the recorded bytes, and the recorded bytes are read as the recorded values."""

import json

import pytest
import torch

from tests.golden import messages
from tests.golden.cases import DATA, INDICES, STOCHASTIC, VALUES, decode

GOLDEN = json.loads((DATA / "messages.json").read_text())
SEEN, BYTES = GOLDEN["values"], GOLDEN["messages"]
WITHOUT = {f"without entries, finite {finite}": finite for finite in (True, False)}


def stored(text):
    """The recorded bytes as a message; None where the record has only their sha256."""
    if " " in text:
        return None
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def of(name):
    return [encoding for case, encoding in messages.cases() if case == name]


def test_every_encoding_is_recorded():
    """Who adds an encoding records it, too."""
    labels = {
        f"{way} {indices}"
        for way in [*VALUES, *(f"{values}~" for values in STOCHASTIC)]
        for indices in [*INDICES, "auto"]
    }
    assert len(labels) == 60
    assert BYTES.keys() == {*messages.SETS, *WITHOUT}
    for name, found in BYTES.items():
        missing = {label for label in labels if label.endswith(" bitmap")} if name == "far" else ()
        assert found.keys() == labels - set(missing), name


def test_most_records_are_whole_messages():
    records = [text for found in BYTES.values() for text in found.values()]
    assert sum(" " not in text for text in records) > 500
    assert any(" " in text for text in records)


@pytest.mark.parametrize("name", messages.SETS)
def test_what_is_written(name):
    found = {messages.label(e): messages.shown(messages.written(name, e).buffer) for e in of(name)}
    assert found == BYTES[name]


@pytest.mark.parametrize("name", messages.SETS)
def test_what_is_read(name):
    """Of a short message the stored bytes are read, of a long one those that have its sha256."""
    entries = messages.SETS[name]()
    for encoding in of(name):
        what = f"{name}, {messages.label(encoding)}"
        message = messages.written(name, encoding)
        buffer = stored(BYTES[name][messages.label(encoding)])
        buffer = message.buffer if buffer is None else buffer
        sparse, finite = messages.read(name, encoding, buffer)
        assert finite == (name not in messages.NOT_FINITE), what
        assert (int(sparse.count), sparse.size) == (int(entries.count), entries.size), what
        assert torch.equal(sparse.indices, entries.indices), what
        values = messages.values_shown(sparse.values)
        assert values == SEEN[name][messages.way(encoding)], what
        if sparse.capacity:
            # Ranks read each other's messages in another way, and their own in a third.
            hot, usable = message.unpack(buffer)
            assert bool(usable) == finite, what
            assert torch.equal(hot.indices, entries.indices), what
            assert messages.values_shown(hot.values) == values, what
            assert messages.values_shown(message.delivered.values) == values, what


@pytest.mark.parametrize("name", WITHOUT)
def test_messages_without_entries(name):
    for encoding in messages.encodings():
        text = BYTES[name][messages.label(encoding)]
        assert messages.shown(messages.without_entries(WITHOUT[name], encoding).buffer) == text
        none = torch.empty(0, dtype=torch.int32)
        common = none if encoding.indices == "common" else None
        sparse, finite = decode(stored(text), common)
        assert (sparse.capacity, sparse.size, finite) == (0, 1000, WITHOUT[name])
