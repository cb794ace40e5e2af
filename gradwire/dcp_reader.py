"""Reads folders of torch.distributed.checkpoint without running what is in them.

torch's own reader unpickles `.metadata`, and its planner unpickles entries that are no tensors: a
pickle is a program. Here both know only the names that such a folder needs. Where gradwire wrote
the folder, the sha256 of every file is checked before the file is read.
"""

import hashlib
import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from gradwire.errors import StateError, one_line

METADATA = ".metadata"
FILE = re.compile(r"[^/\\]+\.distcp")

KNOWN: dict[tuple[str, str], Any] = {
    (metadata.__name__, name): getattr(metadata, name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): lambda _: torch.strided,
    # Where the folder was when it was written, which nobody asks for.
    ("pathlib", "PosixPath"): lambda *parts: "/".join(map(str, parts)),
    ("pathlib", "WindowsPath"): lambda *parts: "/".join(map(str, parts)),
}


class _Unpickler(pickle._Unpickler):
    """An unpickler that knows only the names in `KNOWN` and the dtypes of torch.

    It is the one written in Python: the other makes a table of any size that a pickle asks for.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        try:
            return KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no checkpoint needs"
            ) from None


def read_metadata(content: bytes, file: Path) -> Any:
    """What `.metadata` says of a checkpoint, checked; raises StateError for anything else."""
    try:
        found = _Unpickler(io.BytesIO(content)).load()
        _check(found)
    except Exception as error:  # a damaged pickle raises of every kind
        raise StateError(f"{file} is damaged: {one_line(error)}") from error
    if found.storage_meta is None:
        found.storage_meta = metadata.StorageMeta()
    return found


def _check(found: Any) -> None:
    """Raises ValueError unless every entry is of its kind and lies in a file of the folder."""
    if not isinstance(found, metadata.Metadata):
        raise ValueError(f"it holds a {type(found).__name__}, no Metadata")
    entries, places = found.state_dict_metadata, found.storage_data
    kinds = (metadata.TensorStorageMetadata, metadata.BytesStorageMetadata)
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise ValueError("it does not say what there is, and where")
    for name, entry in entries.items():
        if not isinstance(name, str) or not isinstance(entry, kinds):
            raise ValueError(f"the entry {name!r:.60} is neither a tensor nor bytes")
    for index, place in places.items():
        ok = isinstance(index, metadata.MetadataIndex) and isinstance(
            place, filesystem._StorageInfo
        )
        if not ok or not FILE.fullmatch(str(place.relative_path)):
            raise ValueError(f"{index!r:.60} is in no file of the folder")
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"{place.relative_path} was written with an extension")


class Reader(dcp.FileSystemReader):
    """torch's reader of a folder, with a checked `.metadata` and checked files.

    digests: the sha256 of every file by name; empty where gradwire did not write the folder.
    """

    def __init__(self, path: Path, digests: Mapping[str, str]) -> None:
        super().__init__(path)
        self._folder, self._digests = path, digests
        self._checked: set[str] = set()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """See `read_metadata`."""
        file = self._folder / METADATA
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            raise StateError(
                f"{self._folder} holds no checkpoint: {METADATA} is not there"
            ) from None
        self._compare(METADATA, hashlib.sha256(content).hexdigest())
        return read_metadata(content, file)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """torch's, once the files that it opens are those that were written."""
        for item in plan.items:
            self._check_file(self.storage_data[item.storage_index].relative_path)
        return super().read_data(plan, planner)

    def _check_file(self, name: str) -> None:
        if name in self._checked:
            return
        try:
            with (self._folder / name).open("rb") as content:
                if self._digests:
                    self._compare(name, hashlib.file_digest(content, "sha256").hexdigest())
        except FileNotFoundError:
            raise StateError(
                f"{self._folder / name} is missing: copy every file into the folder"
            ) from None
        self._checked.add(name)

    def _compare(self, name: str, found: str) -> None:
        if self._digests and self._digests.get(name) != found:
            raise StateError(
                f"{self._folder / name} is damaged: its sha256 is not the one in gradwire.json"
            )


class Planner(dcp.DefaultLoadPlanner):
    """torch's planner for a flat dictionary; entries that are no tensors are not unpickled."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Plain values only."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(
            value, map_location="cpu", weights_only=True
        )


def read(path: Path, digests: Mapping[str, str], into: dict[str, Any]) -> dict[str, Any]:
    """`into`, its tensors filled and its other values replaced by what the folder has.

    Not a collective call: every rank reads what it needs. Raises StateError for what is damaged.
    """
    try:
        dcp.load(into, storage_reader=Reader(path, digests), planner=Planner(), no_dist=True)
    except (Exception, dcp.CheckpointException) as error:
        cause = innermost(error)
        if isinstance(cause, StateError):
            raise cause from None
        raise StateError(f"{path} cannot be read: {one_line(cause)}") from error
    return into


def innermost(error: BaseException) -> BaseException:
    """What one rank raised inside torch's exception, which lists ranks and stacks."""
    while isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return error
