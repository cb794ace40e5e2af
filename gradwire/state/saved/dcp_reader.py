"""Reads and writes folders of torch.distributed.checkpoint, without running what is in them.

torch's own reader unpickles `.metadata`, and its planner unpickles entries that are no tensors: a
pickle is a program. Here both know only the names that such a folder needs. Where gradwire wrote
the folder, the sha256 of every file is checked before the file is read.
"""

import dataclasses
import hashlib
import io
import math
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan
from torch.futures import Future

from gradwire.errors import StateError, one_line
from gradwire.state.saved.manifest import refuse_pipe
from gradwire.torch_internals import LAYOUT, memory_format_codes, storage_info, storage_prefix

METADATA = ".metadata"
FILE = re.compile(r"[\w.-]{1,200}\.distcp", re.ASCII)

_MEMORY_FORMAT = memory_format_codes()
_STORAGE_INFO = storage_info()
_RECORDS = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    _STORAGE_INFO,
)


def _memory_format(value: Any) -> Any:
    return _MEMORY_FORMAT(value) if type(value) is int else None


def _member(owner: Any, name: Any) -> Any:
    """What `getattr` is for in a pickle of the first Pythons 3.11: a member of an enumeration."""
    if owner is not _memory_format or type(name) is not str:
        raise pickle.UnpicklingError("it asks for builtins.getattr, which no checkpoint needs")
    return _MEMORY_FORMAT.__members__[name]


def _nothing(*_: Any) -> str:
    """Where the folder was when it was written, which nobody asks for."""
    return ""


KNOWN: dict[tuple[str, str], Any] = {
    **{(record.__module__, record.__name__): record for record in _RECORDS},
    (metadata.__name__, _MEMORY_FORMAT.__name__): _memory_format,
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    LAYOUT: lambda _: torch.strided,
    ("pathlib", "PosixPath"): _nothing,
    ("pathlib", "WindowsPath"): _nothing,
    # From Python 3.13 on they live elsewhere.
    ("pathlib._local", "PosixPath"): _nothing,
    ("pathlib._local", "WindowsPath"): _nothing,
}
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

OPCODES = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK,
    pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2,
    pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE,
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT,
    pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET,
)  # fmt: skip
"""What pickle makes of these records, and nothing that takes more room than it has bytes."""


class _Unpickler(pickle._Unpickler):
    """An unpickler that knows only the names in `KNOWN` and the dtypes of torch.

    It is the one written in Python: the other makes a table of any size that a pickle asks for.
    """

    dispatch = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in OPCODES}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        # torch imports some of its modules when they are asked for.
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        try:
            return KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no checkpoint needs"
            ) from None

    def _build(self: Any) -> None:
        """Fills a record. The usual one also changes classes, and so torch for all of us."""
        content = self.stack.pop()
        record = self.stack[-1]
        if isinstance(record, metadata.TensorProperties) and type(content) is tuple:
            if len(content) < 5 or not isinstance(content[3], _MEMORY_FORMAT):
                raise pickle.UnpicklingError("the properties of a tensor are none")
            record.__setstate__(content)
        elif isinstance(record, _RECORDS) and type(content) is dict and _are_names(content):
            record.__dict__.update(content)
        else:
            raise pickle.UnpicklingError("it changes what is no record of a checkpoint")

    def _set_item(self: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put(self.stack[-1], key, value)

    def _set_items(self: Any) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._put(self.stack[-1], key, value)

    def _put(self, into: Any, key: Any, value: Any) -> None:
        """As usual, but for keys that are tuples of tuples: to hash them may take for ever."""
        plain = type(key) in (str, int) or (
            isinstance(key, metadata.MetadataIndex)
            and type(key.fqn) is str
            and (key.offset is None or isinstance(key.offset, torch.Size))
        )
        if type(into) is not dict or not plain:
            raise pickle.UnpicklingError("it has a dictionary by something else than names")
        into[key] = value

    dispatch |= {
        pickle.BUILD[0]: _build,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
    }


def _are_names(content: Mapping[Any, Any]) -> bool:
    return all(type(key) is str and not key.startswith("__") for key in content)


def read_metadata(content: bytes, file: Path) -> Any:
    """What `.metadata` says of a checkpoint, checked; raises StateError for anything else."""
    try:
        found = _Unpickler(io.BytesIO(content)).load()
        _check(found)
    except Exception as error:  # a damaged pickle raises of every kind
        raise StateError(f"{file} is damaged: {one_line(error)}") from error
    found.storage_meta, found.planner_data = metadata.StorageMeta(), None
    return found


def _check(found: Any) -> None:
    """Raises ValueError unless every entry is of its kind and lies in a file of the folder."""
    if not isinstance(found, metadata.Metadata):
        raise ValueError(f"it holds a {type(found).__name__}, no Metadata")
    entries, places = found.state_dict_metadata, found.storage_data
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise ValueError("it does not say what there is, and where")
    for name, entry in entries.items():
        kinds = (metadata.TensorStorageMetadata, metadata.BytesStorageMetadata)
        if type(name) is not str or not isinstance(entry, kinds):
            raise ValueError(f"the entry {_word(name)} is neither a tensor nor bytes")
        if isinstance(entry, metadata.TensorStorageMetadata) and not _is_covered(entry):
            raise ValueError(f"the pieces of {_word(name)} are not the whole of it")
    for index, place in places.items():
        is_index = isinstance(index, metadata.MetadataIndex)
        name = index.fqn if is_index else index
        if not is_index or not isinstance(place, _STORAGE_INFO) or not _is_place(place):
            raise ValueError(f"{_word(name)} is in no file of the folder")
        if getattr(place, "transform_descriptors", None):
            raise ValueError(f"{_word(name)} was written with an extension")


def _word(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, str | int) else type(value).__name__


def _is_covered(entry: metadata.TensorStorageMetadata) -> bool:
    """Whether the pieces lie within the tensor, and have as many entries together."""
    if not _are_counts(entry.size) or not isinstance(entry.chunks, list):
        return False
    total = 0
    for chunk in entry.chunks:
        if not isinstance(chunk, metadata.ChunkStorageMetadata):
            return False
        if not _are_counts(chunk.offsets) or not _are_counts(chunk.sizes):
            return False
        if not len(chunk.offsets) == len(chunk.sizes) == len(entry.size):
            return False
        ends = zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
        if any(offset + size > whole for offset, size, whole in ends):
            return False
        total += math.prod(chunk.sizes)
    return total == math.prod(entry.size)


def _are_counts(sizes: Any) -> bool:
    return isinstance(sizes, tuple) and all(type(n) is int and n >= 0 for n in sizes)


def _is_place(place: Any) -> bool:
    return (
        type(place.relative_path) is str
        and FILE.fullmatch(place.relative_path) is not None
        and _are_counts((place.offset, place.length))
    )


class Reader(dcp.FileSystemReader):
    """torch's reader of a folder, with a checked `.metadata` and checked files.

    digests: the sha256 of every file by name; empty where gradwire did not write the folder.
    """

    def __init__(self, path: Path, digests: Mapping[str, str]) -> None:
        super().__init__(path)
        self._folder, self._digests = path, digests
        self._sizes: dict[str, int] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """See `read_metadata`."""
        file = self._folder / METADATA
        refuse_pipe(file)
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
            place = self.storage_data[item.storage_index]
            if place.offset + place.length > self._checked_size(place.relative_path):
                raise StateError(f"{self._folder / place.relative_path} is damaged: it is cut off")
        return super().read_data(plan, planner)

    def _checked_size(self, name: str) -> int:
        """How long a file is, after its sha256 was found right."""
        if name not in self._sizes:
            file = self._folder / name
            refuse_pipe(file)
            try:
                with file.open("rb") as content:
                    if self._digests:
                        self._compare(name, hashlib.file_digest(content, "sha256").hexdigest())
                    self._sizes[name] = content.seek(0, io.SEEK_END)
            except FileNotFoundError:
                raise StateError(f"{file} is missing: copy every file into the folder") from None
        return self._sizes[name]

    def _compare(self, name: str, found: str) -> None:
        if self._digests and self._digests.get(name) != found:
            raise StateError(
                f"{self._folder / name} is damaged: its sha256 is not the one in gradwire.json"
            )


class Writer(dcp.FileSystemWriter):
    """torch's writer of a folder, with names of files that no other save has."""

    def __init__(self, path: Path, token: str) -> None:
        super().__init__(path)
        self._token = token

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0 names the files of all."""
        return [
            dataclasses.replace(plan, storage_data=storage_prefix(f"__{rank}_{self._token}_"))
            for rank, plan in enumerate(plans)
        ]


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
        with warnings.catch_warnings():
            # Every rank reads for itself, on purpose.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
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
