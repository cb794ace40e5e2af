"""Reader and writer of torch.distributed.checkpoint folders that run no program from a folder.

torch's own reader unpickles `.metadata`, and its planner unpickles entries that are no tensors. A
pickle is a program. Here both know only the names that such a folder needs. If gradwire wrote the
folder, the sha256 of every file is checked before the file is read.
"""

import dataclasses
import hashlib
import io
import math
import os
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
from gradwire.state.saved.check import kind_of
from gradwire.state.saved.draft import copy_of
from gradwire.state.saved.manifest import read_manifest, refuse_pipe
from gradwire.torch_internals import LAYOUT, memory_format_codes, storage_info, storage_prefix

METADATA = ".metadata"
FILE = re.compile(r"[\w.-]{1,200}\.distcp", re.ASCII)
"""Names of data files that a folder may have, none of which leads out of the folder."""

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
    """Return the memory format of a code, None for anything else, for the unpickler."""
    return _MEMORY_FORMAT(value) if type(value) is int else None


def _member(owner: Any, name: Any) -> Any:
    """Return a member of the memory formats; stands for `getattr` in the unpickler.

    The first releases of Python 3.11 pickled a member of an enumeration as a call of `getattr`.
    """
    if owner is not _memory_format or type(name) is not str:
        raise pickle.UnpicklingError("it asks for builtins.getattr, which no checkpoint needs")
    return _MEMORY_FORMAT.__members__[name]


def _no_path(*_: Any) -> str:
    """Return "" for the folder's path at the time of writing, which no reader needs."""
    return ""


_KNOWN: dict[tuple[str, str], Any] = {
    **{(record.__module__, record.__name__): record for record in _RECORDS},
    (metadata.__name__, _MEMORY_FORMAT.__name__): _memory_format,
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    LAYOUT: lambda _: torch.strided,
    ("pathlib", "PosixPath"): _no_path,
    ("pathlib", "WindowsPath"): _no_path,
    # Python 3.13 has moved these classes.
    ("pathlib._local", "PosixPath"): _no_path,
    ("pathlib._local", "WindowsPath"): _no_path,
}
"""Stand-ins for the names that a `.metadata` of any supported torch and Python may use."""
_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}

_OPCODES = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK,
    pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE, pickle.NEWOBJ,
    pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2,
    pickle.LONG1, pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE,
    pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT,
    pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET,
)  # fmt: skip
"""Opcodes that pickle writes for these records. None takes more memory than it has bytes."""


class _Unpickler(pickle._Unpickler):
    """Unpickler that knows only the names in `_KNOWN` and the dtypes of torch.

    Its base is the unpickler written in Python, because the one written in C allocates a table of
    any size that a pickle names.
    """

    dispatch = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> Any:
        # A table instead of getattr(torch, name), which would import modules for some names.
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(
                f"it asks for {module}.{name}, which no checkpoint needs"
            ) from None

    def _build(self: Any) -> None:
        """Fill a record. The base class would also fill classes, and so change torch itself."""
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
        """Set an item of a dictionary; refuse keys other than names, numbers and plain indices.

        To hash a key that is a tuple of tuples may take for ever.
        """
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
    """Return True if all keys are names of ordinary fields."""
    return all(type(key) is str and not key.startswith("__") for key in content)


def read_metadata(content: bytes, file: Path) -> Any:
    """Return the Metadata in the bytes of `.metadata`, checked; raise StateError for a fault."""
    try:
        value = _Unpickler(io.BytesIO(content)).load()
        _check_metadata(value)
    except Exception as error:  # a damaged pickle raises an error of any kind
        raise StateError(f"{file} is damaged: {one_line(error)}") from error
    value.storage_meta, value.planner_data = metadata.StorageMeta(), None
    return value


def _check_metadata(value: Any) -> None:
    """Raise ValueError unless every entry has a known kind and lies in a file of the folder."""
    if not isinstance(value, metadata.Metadata):
        raise ValueError(f"it holds a {type(value).__name__}, no Metadata")
    entries, places = value.state_dict_metadata, value.storage_data
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
    """Return a name for an error, or the type of a value that is no name."""
    return f"{value!r:.60}" if isinstance(value, str | int) else type(value).__name__


def _is_covered(entry: metadata.TensorStorageMetadata) -> bool:
    """Return True if all pieces lie within the tensor and together have its number of entries."""
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


def metadata_file(folder: Path, digests: Mapping[str, str]) -> Path:
    """Return the file with the folder's records: `.metadata`, or the copy that a save has made.

    A save that is killed between `.metadata` and the manifest leaves a new `.metadata` beside the
    old manifest. Then the copy is the one that the manifest names.
    """
    file = folder / METADATA
    refuse_pipe(file)
    copy = copy_of(file, 0)
    if copy.is_file() and hashlib.sha256(copy.read_bytes()).hexdigest() == digests.get(METADATA):
        return copy
    return file


def mend_metadata(folder: Path) -> None:
    """Put back the `.metadata` that a save, which was killed, has replaced."""
    try:
        digests = read_manifest(folder).get("files", {})
    except (StateError, OSError):
        return
    file = metadata_file(folder, digests)
    if file.name != METADATA:
        os.replace(file, folder / METADATA)


class Reader(dcp.FileSystemReader):
    """torch's reader of a folder, with a checked `.metadata` and checked files.

    digests: the sha256 of every file by name; empty if gradwire did not write the folder.
    """

    def __init__(self, path: Path, digests: Mapping[str, str]) -> None:
        super().__init__(path)
        self._folder, self._digests = path, digests
        self._sizes: dict[str, int] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Return the folder's Metadata, checked."""
        file = metadata_file(self._folder, self._digests)
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            raise StateError(
                f"{self._folder} holds no checkpoint: {METADATA} is not there"
            ) from None
        self._compare(METADATA, hashlib.sha256(content).hexdigest())
        return read_metadata(content, file)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Run torch's read_data after a check of every file that it opens."""
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            if place.offset + place.length > self._checked_size(place.relative_path):
                raise StateError(f"{self._folder / place.relative_path} is damaged: it is cut off")
        return super().read_data(plan, planner)

    def _checked_size(self, name: str) -> int:
        """Return the length of a file, after its sha256 was checked."""
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

    def _compare(self, name: str, digest: str) -> None:
        if self._digests and self._digests.get(name) != digest:
            raise StateError(
                f"{self._folder / name} is damaged: its sha256 is not the one in gradwire.json"
            )


class Writer(dcp.FileSystemWriter):
    """torch's writer of a folder, with file names that no other save has.

    token: the word in these names that belongs to one save.
    """

    def __init__(self, path: Path, token: str) -> None:
        super().__init__(path)
        self._token = token

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank the prefix of its file names. Runs on rank 0."""
        return [
            dataclasses.replace(plan, storage_data=storage_prefix(f"__{rank}_{self._token}_"))
            for rank, plan in enumerate(plans)
        ]


class _Planner(dcp.DefaultLoadPlanner):
    """torch's planner for a flat dictionary, which runs no pickle for entries without tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load one entry that is no tensor, of plain values only."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(
            value, map_location="cpu", weights_only=True
        )

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """Return the place for one piece of a tensor, which takes no piece of another dtype."""
        place = super().transform_tensor(read_item, tensor).as_subclass(_Place)
        place.entry = read_item.dest_index.fqn
        return place


class _Place(torch.Tensor):
    """A tensor into which only values of its own dtype are copied; torch would convert others."""

    entry: str

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        place = args[0]
        if function is torch.Tensor.copy_ and args[1].dtype != place.dtype:
            raise StateError(f"{place.entry!r} cannot be {kind_of(args[1])}")
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, cls):
            result.entry = place.entry
        return result


def read_into(path: Path, digests: Mapping[str, str], into: dict[str, Any]) -> dict[str, Any]:
    """Fill the tensors of `into` from the folder, replace its other values, and return it.

    Not a collective call: every rank reads its own entries. Raises StateError for any damage.
    """
    try:
        with warnings.catch_warnings():
            # torch warns of a read without collectives, which is intended here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(into, storage_reader=Reader(path, digests), planner=_Planner(), no_dist=True)
    except (Exception, dcp.CheckpointException) as error:
        cause = innermost(error)
        if isinstance(cause, StateError):
            raise cause from None
        raise StateError(f"{path} cannot be read: {one_line(cause)}") from error
    return into


def innermost(error: BaseException) -> BaseException:
    """Return the error that a rank raised, out of torch's exception with all ranks and stacks."""
    while isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return error
