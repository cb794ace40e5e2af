"""Keep a study's rows on disk: study.json, rows.jsonl and the pictures.

Each cell is appended when it is measured, so an interrupted study goes on with the next cell.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError, GradwireError, StateError, one_line
from gradwire.version import __version__
from gradwire.workbench.study.study import Cell, Settings, Study, StudyRow
from gradwire.workbench.train.folder import describe_machine, read_json, write_json

HEAD, ROWS, LOCK, UNFINISHED = "study.json", "rows.jsonl", ".lock", "unfinished"
CHOICES = ("seeds", "epochs", "chosen", "extend")
"""Settings that may differ from call to call, because they only choose cells."""


class StudyFolder:
    """The folder of one study under `out`.

    `head` is the content of study.json: the settings, the command and the machine.
    """

    def __init__(self, out: Path, name: str) -> None:
        self.path = out / name
        self.name = name

    def open(self, settings: Settings, command: str, free: Sequence[str] = ()) -> None:
        """Create the folder, or raise a ConfigError if it was begun with other settings.

        free: settings that may differ.
        """
        free = (*CHOICES, *free, UNFINISHED)
        asked = {k: v for k, v in asdict(settings).items() if k not in free}
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with self._locked():
            if (self.path / HEAD).is_file():
                self._check(asked)
                return
            head = {"name": self.name, "settings": asked, "command": command}
            write_json(self.path / HEAD, head | {"machine": describe_machine(settings.device)})

    def _check(self, asked: dict[str, Any]) -> None:
        """Raise a ConfigError if another version or other settings made the folder."""
        head = self.head
        version = head.get("machine", {}).get("gradwire")
        if version != __version__:
            raise ConfigError(
                f"{self.path} was made by gradwire {version}, this is {__version__}: "
                "choose another --out."
            )
        for name, value in asked.items():
            if head["settings"].get(name) != value:
                raise ConfigError(
                    f"{self.path} was begun with {name} = {head['settings'].get(name)!r}, now "
                    f"{value!r} is asked for: choose another --out."
                )

    @property
    def head(self) -> dict[str, Any]:
        head = read_json(self.path / HEAD)
        kinds = {"settings": dict, "machine": dict, "command": str}
        if not isinstance(head, dict) or not all(
            isinstance(head.get(name), kind) for name, kind in kinds.items()
        ):
            raise StateError(f"{self.path / HEAD} is no study's.")
        return head

    def rows(self) -> list[StudyRow]:
        """Return all rows so far."""
        return [row for _, rows in self._cells() for row in rows]

    def done(self) -> list[Cell]:
        """Return the cells that are measured."""
        return [cell for cell, _ in self._cells()]

    def add(self, cell: Cell, rows: Sequence[StudyRow]) -> None:
        """Append a cell as one line, so that a crash leaves a whole cell or an unended line."""
        line = json.dumps({"cell": cell, "rows": list(rows)}) + "\n"
        with self._locked(), writing(self.path / ROWS), (self.path / ROWS).open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def write(self, name: str, content: bytes) -> None:
        """Write a picture."""
        with self._locked(), writing(self.path / name):
            (self.path / name).write_bytes(content)

    @contextmanager
    def explain_row_errors(self, study: Study) -> Iterator[None]:
        """Turn an error that rows of another form cause in a page into a one-line StateError."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, GradwireError):
                raise
            version = self.head["machine"].get("gradwire")
            other = ""
            if version != __version__:
                other = f" They are of gradwire {version}, this is {__version__}."
            raise StateError(
                f"{self.path / ROWS} has rows that are not those of study {study.name}: "
                f"{one_line(error)}.{other} Measure again with another --out."
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the folder, because several processes may measure parts of one study."""
        with writing(self.path / LOCK), (self.path / LOCK).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _cells(self) -> list[tuple[Cell, list[StudyRow]]]:
        path = self.path / ROWS
        if not path.is_file():
            return []
        with self._locked():
            return self._read(path)

    def _read(self, path: Path) -> list[tuple[Cell, list[StudyRow]]]:
        entries, content = [], path.read_bytes()
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                # The disk was full, or the process was killed. The cell is measured again.
                with writing(path):
                    path.write_bytes(content[: -len(line)])
                break
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise StateError(f"{path}, line {number}: {one_line(error)}") from error
            if not _is_entry(entry):
                raise StateError(f"{path}, line {number}: {line[:60]!r} is no cell and its rows")
            entries.append((entry["cell"], entry["rows"]))
        return entries


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("cell"), dict):
        return False
    rows = entry.get("rows")
    return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)


def studies_in(out: Path) -> list[StudyFolder]:
    """Return the folders of the studies under `out`, sorted by name."""
    heads = sorted(out.glob(f"*/{HEAD}")) if out.is_dir() else []
    return [StudyFolder(out, head.parent.name) for head in heads]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the disk into a one-line StateError that names the file."""
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{path} cannot be written: {error.strerror}. The same command goes on from here."
        ) from error
