"""Draft: the files of a save that is not complete, and the way back to what the folder held."""

import contextlib
import operator
import os
from collections.abc import Sequence
from pathlib import Path

from gradwire.errors import StateError
from gradwire.state.saved.files import replace_file
from gradwire.state.saved.manifest import read_manifest


class Draft:
    """One rank's files of a save. `undo` gives the folder back exactly what it held before.

    Made before the ranks agree to save, because until then no rank has touched the folder. Undone
    only when every rank knows of a failure. After the loss of a rank nobody knows if the others
    have the new manifest, so all files stay, and the next save deletes those that no manifest
    names.

    replaced: names of the files that the save replaces.
    """

    def __init__(self, folder: Path, rank: int, replaced: Sequence[str]) -> None:
        self.folder = folder
        self.new: list[Path] = []
        """The files that this rank has added."""
        self._copies = {folder / name: copy_of(folder / name, rank) for name in replaced}
        self._missing = [path for path in (folder, *folder.parents) if not path.exists()]
        self._begun = False

    def begin(self) -> None:
        """Make the folder, and copy what the save replaces. `undo` then needs no room on the disk.

        After an error nothing of this is left.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for file, copy in self._copies.items():
            copy.unlink(missing_ok=True)
            if file.is_file():
                replace_file(copy, operator.methodcaller("write", file.read_bytes()))
        self._begun = True

    def undo(self) -> None:
        """Delete the new files, and put the old ones back. Errors of the disk are passed over."""
        for file, copy in self._copies.items():
            with contextlib.suppress(OSError):
                if self._begun and not copy.exists():
                    file.unlink(missing_ok=True)
                elif self._begun and not _are_equal(copy, file):
                    os.replace(copy, file)
                copy.unlink(missing_ok=True)
        kept = files_of(self.folder)  # the new ones, if the old manifest could not be put back
        for file in self.new:
            if file.name not in kept:
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)
        for path in self._missing:
            with contextlib.suppress(OSError):
                path.rmdir()

    def complete(self) -> None:
        """Delete the copies, because the save is complete on every rank."""
        for copy in self._copies.values():
            copy.unlink(missing_ok=True)


def copy_of(file: Path, rank: int) -> Path:
    """Return the name of the copy of a file that a save of `rank` replaces."""
    return file.with_name(f"{file.name}.{rank}.old")


def _are_equal(one: Path, two: Path) -> bool:
    return two.is_file() and one.read_bytes() == two.read_bytes()


def files_of(folder: Path) -> set[str]:
    """Return the names of the files of the checkpoint that the folder holds, {} for none."""
    try:
        manifest = read_manifest(folder)
    except (StateError, OSError):
        return set()
    return {part["file"] for part in manifest.get("parts", ())} | set(manifest.get("files", ()))
