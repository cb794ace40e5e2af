"""Checkpoints that were changed on purpose, with checksums made anew."""

import hashlib
import io
import json
import os
import pickle
import shutil
from pathlib import Path

import torch

from gradwire.state.saved.dcp_reader import METADATA
from gradwire.state.saved.manifest import MANIFEST, seal


class Bomb:
    """An object that makes a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def manifest_of(folder):
    return json.loads((folder / MANIFEST).read_text())


def write_manifest(folder, content):
    """The manifest with a seal of its own."""
    content = {name: value for name, value in content.items() if name != "sha256"}
    (folder / MANIFEST).write_text(json.dumps(content | {"sha256": seal(content)}))


def reseal(folder, **fields):
    """A manifest that vouches for what is in the folder now, where there is one."""
    if not (folder / MANIFEST).is_file():
        return
    content = manifest_of(folder) | fields
    if "files" in content:
        content["files"] = {name: _digest(folder / name) for name in content["files"]}
    else:
        for part in content["parts"]:
            part["sha256"] = _digest(folder / part["file"])
    write_manifest(folder, content)


def _digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def copied(source, target):
    shutil.copytree(source, target)
    return target


def flip(file, at=-100):
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(bytes(content))


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def bytes_of(value):
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def part_of(folder, rank):
    """One rank's file of a plain checkpoint."""
    return folder / manifest_of(folder)["parts"][rank]["file"]


def change_part(folder, rank, change):
    """Another content of one rank's part of a plain checkpoint."""
    file = part_of(folder, rank)
    saved = torch.load(file, weights_only=True)
    file.write_bytes(bytes_of(change(saved) or saved))
    reseal(folder)


def distcp_of(folder, rank):
    (file,) = folder.glob(f"__{rank}_*.distcp")
    return file


def metadata_of(folder):
    return pickle.loads((folder / METADATA).read_bytes())


def write_metadata(folder, found):
    (folder / METADATA).write_bytes(pickle.dumps(found))
    reseal(folder)


def change_metadata(folder, change):
    found = metadata_of(folder)
    change(found)
    write_metadata(folder, found)


def key_of(folder, ending):
    (key,) = (k for k in metadata_of(folder).state_dict_metadata if k.endswith(ending))
    return key


def replace_entry(folder, ending, content):
    """Other bytes for one entry of a sharded checkpoint, at the end of its file."""
    found = metadata_of(folder)
    key = key_of(folder, ending)
    for index, place in found.storage_data.items():
        if index.fqn == key:
            file = folder / place.relative_path
            place.offset, place.length = file.stat().st_size, len(content)
            with file.open("ab") as out:
                out.write(content)
    write_metadata(folder, found)


def entry(folder, ending):
    """The bytes of one entry of a sharded checkpoint."""
    key = key_of(folder, ending)
    for index, place in metadata_of(folder).storage_data.items():
        if index.fqn == key:
            content = (folder / place.relative_path).read_bytes()
            return content[place.offset : place.offset + place.length]
    raise KeyError(key)


def change_rest(folder, ending, change):
    """Another content of what one rank of a sharded checkpoint says of itself."""
    packed = torch.load(io.BytesIO(entry(folder, ending)), weights_only=True)
    rest = torch.load(io.BytesIO(packed), weights_only=True)
    replace_entry(folder, ending, bytes_of(bytes_of(change(rest) or rest)))


def stretched(dtype=torch.float32):
    """A tensor of one number that says that it is many."""
    return torch.zeros(1, dtype=dtype).expand(2**40)


def deep_list(depth=60):
    """A list of two of a list of two: few bytes, 2**60 values."""
    out = [0]
    for _ in range(depth):
        out = [out, out]
    return out


def tree(folder):
    """Every file of a folder with its content."""
    files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}
