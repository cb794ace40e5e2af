"""Files that are there whole, or not at all."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def replace(file: Path, fill: Callable[[BinaryIO], object]) -> bytes:
    """Makes or replaces `file` with what `fill` writes, in one go; returns the sha256 of it.

    Whatever goes wrong, a full disk included, the old file stays, nothing else is left behind, and
    the error is an OSError if the disk was the cause: torch.save hides that in another one.
    """
    # Of the process: ranks that share a folder write the same manifest at the same time.
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w+b") as out:
            fill(out)
            out.flush()
            os.fsync(out.fileno())
            out.seek(0)
            digest = hashlib.file_digest(out, "sha256").digest()
        os.replace(temporary, file)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    return digest
