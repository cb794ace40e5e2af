"""`.metadata` is read without running it, and without believing what it says."""

import contextlib
import io
import pickle
import tracemalloc
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from gradwire.errors import StateError
from gradwire.state.saved.dcp_reader import METADATA, read_into, read_metadata
from tests.state.saved import forge

FILE = Path("folder/.metadata")


@pytest.fixture
def folder(tmp_path):
    """One that gradwire did not write."""
    state = {"w": torch.arange(12.0).view(3, 4), "steps": torch.tensor(3), "text": b"hello"}
    path = tmp_path / "saved"
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def refused(content):
    with pytest.raises(StateError) as error:
        read_metadata(content, FILE)
    text = str(error.value)
    assert text.startswith(f"{FILE} is damaged: ")
    assert "\n" not in text
    assert len(text) < 400
    return text


def test_torchs_own_folder_is_read(folder):
    into = {"w": torch.zeros(3, 4), "steps": torch.tensor(0), "text": b""}
    found = read_into(folder, {}, into)
    assert torch.equal(found["w"], torch.arange(12.0).view(3, 4))
    assert (int(found["steps"]), found["text"]) == (3, b"hello")


def test_what_pickle_would_run_is_not_run(folder, tmp_path):
    marker = tmp_path / "ran"
    found = forge.metadata_of(folder)
    found.planner_data = {"x": forge.Bomb(marker)}
    for content in (pickle.dumps(forge.Bomb(marker)), pickle.dumps(found)):
        assert "it asks for posix.system, which no checkpoint needs" in refused(content)
        assert not marker.exists()
        pickle.loads(content)  # the bomb is one
        assert marker.exists()
        marker.unlink()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "load"),
        ("torch.serialization", "load"),
        ("builtins", "eval"),
        ("torch.distributed.checkpoint.metadata", "os.system"),
        ("torch.distributed.checkpoint.filesystem", "pickle.loads"),
    ],
    ids=["load", "serialization", "eval", "dotted", "pickle again"],
)
def test_a_name_that_is_not_a_record_is_refused(module, name):
    content = b"\x80\x04" + _text(module) + _text(name) + b"\x93."
    assert f"it asks for {module}.{name}" in refused(content)


def _text(words):
    return b"\x8c" + bytes([len(words)]) + words.encode()


def test_getattr_gives_a_member_of_an_enumeration_and_nothing_else():
    """The first Pythons 3.11 pickle members that way."""
    start = b"\x80\x04" + _text("builtins") + _text("getattr") + b"\x93"
    owner = _text(metadata.__name__) + _text("_MEM_FORMAT_ENCODING") + b"\x93"
    good = start + owner + _text("TORCH_CONTIGUOUS_FORMAT") + b"\x86R."
    assert "it holds a _MEM_FORMAT_ENCODING, no Metadata" in refused(good)
    assert "KeyError" in refused(start + owner + _text("__class__") + b"\x86R.")
    other = _text(metadata.__name__) + _text("Metadata") + b"\x93"
    assert "builtins.getattr" in refused(start + other + _text("__init__") + b"\x86R.")


def test_classes_of_torch_are_not_changed():
    """BUILD on a class would set its attributes, for the rest of the process."""
    owner = _text(metadata.__name__) + _text("MetadataIndex") + b"\x93"
    both = b"N}" + _text("poisoned") + b"K\x01s\x86"
    words = refused(b"\x80\x04" + owner + both + b"b.")
    assert not hasattr(MetadataIndex, "poisoned")
    assert "it changes what is no record" in words


def test_room_is_not_taken_on_the_word_of_a_few_bytes():
    tracemalloc.start()
    try:
        refused(b"\x80\x05\x96" + (2**28).to_bytes(8, "little") + b"x.")
        refused(b"\x80\x04]r\xff\xff\xff\x0f.")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_keys_that_take_for_ever_to_hash_are_refused():
    """A tuple of two of a tuple of two: 2**20 hashes here, 2**60 in earnest."""
    nested = b"K\x01\x85" + b"2\x86" * 20
    memo = b"K\x01\x85" + b"".join(b"\x94h" + bytes([i]) + b"\x86" for i in range(20))
    assert "KeyError" in refused(b"\x80\x04}" + nested + b"K\x01s."), "DUP is not known"
    assert "by something else than names" in refused(b"\x80\x04}" + memo + b"K\x01s.")


def _set(**fields):
    def change(found):
        for name, value in fields.items():
            setattr(found, name, value)

    return change


def _size(*size):
    def change(found):
        found.state_dict_metadata["w"].size = torch.Size(size)

    return change


def _chunk(offsets, sizes):
    def change(found):
        found.state_dict_metadata["w"].chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        ]

    return change


def _place(**fields):
    def change(found):
        for index, place in found.storage_data.items():
            if index.fqn == "w":
                vars(place).update(fields)

    return change


def _no_pieces(found):
    properties = found.state_dict_metadata["w"].properties
    found.state_dict_metadata["w"] = TensorStorageMetadata(properties, torch.Size((3, 4)), [])


WRONG = {
    "no entries": _set(state_dict_metadata=None),
    "no places": _set(storage_data=[]),
    "entry of text": lambda f: f.state_dict_metadata.update(w="x"),
    "entry by number": lambda f: f.state_dict_metadata.update({7: BytesStorageMetadata()}),
    "place by name": lambda f: f.storage_data.update(w=1),
    "place of text": lambda f: f.storage_data.update({MetadataIndex("w"): "x"}),
    "huge size": _size(2**40, 4),
    "negative size": _size(-3, -4),
    "no pieces": _no_pieces,
    "huge piece": _chunk((0, 0), (2**40, 2**40)),
    "negative piece": _chunk((0, 0), (-3, -4)),
    "negative offset": _chunk((-3, 0), (3, 4)),
    "piece outside": _chunk((3, 0), (3, 4)),
    "piece too small": _chunk((0, 0), (3, 3)),
    "piece of other dimensions": _chunk((0,), (12,)),
    "path above": _place(relative_path="../__0_0.distcp"),
    "absolute path": _place(relative_path="/etc/x.distcp"),
    "other kind of file": _place(relative_path="/etc/passwd"),
    "path of two lines": _place(relative_path="a\nb.distcp"),
    "path of bytes": _place(relative_path=b"__0_0.distcp"),
    "place before the file": _place(offset=-1),
    "negative length": _place(length=-1),
    "length of text": _place(length="9"),
    "extension": _place(transform_descriptors=["zstd"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_one_line(folder, name):
    found = forge.metadata_of(folder)
    WRONG[name](found)
    refused(pickle.dumps(found))


@pytest.mark.parametrize("content", [b"", b"x", b"\x80\x04N.", b"\x80\x04]."], ids=repr)
def test_what_is_no_pickle_of_metadata_is_one_line(content):
    refused(content)


def test_a_cut_or_flipped_folder_never_breaks_out(folder):
    whole = (folder / METADATA).read_bytes()
    for at in range(0, len(whole), 7):
        for content in (whole[:at], whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]):
            with contextlib.suppress(StateError):
                read_metadata(content, FILE)


def test_a_place_behind_the_end_of_its_file_is_refused(folder):
    forge.change_metadata(folder, _place(length=2**62))
    with pytest.raises(StateError, match=r"__0_0\.distcp is damaged: it is cut off"):
        read_into(folder, {}, {"w": torch.zeros(3, 4)})


def test_bytes_and_tensors_are_not_run_either(folder, tmp_path):
    marker = tmp_path / "ran"
    for name, into in (("text", b""), ("w", torch.zeros(3, 4))):
        for content in (forge.bytes_of(forge.Bomb(marker)), pickle.dumps(forge.Bomb(marker))):
            other = forge.copied(folder, tmp_path / f"{name}{len(content)}")
            forge.replace_entry(other, name, content)
            with pytest.raises(StateError, match="cannot be read") as error:
                read_into(other, {}, {name: into})
            assert "\n" not in str(error.value)
            assert not marker.exists()
    torch.load(io.BytesIO(forge.bytes_of(forge.Bomb(marker))), weights_only=False)
    assert marker.exists(), "the bomb is one"


def test_fields_that_a_newer_torch_may_add_are_taken(folder):
    found = forge.metadata_of(folder)
    found.something_new = 7
    for place in found.storage_data.values():
        place.__dict__["something_new"] = None
    read_metadata(pickle.dumps(found), FILE)
    assert filesystem._StorageInfo("a", 1, 2).relative_path == "a"
