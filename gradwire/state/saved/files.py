"""Files written in one go: the whole new file is there, or still the old one."""

import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def replace_file(file: Path, fill: Callable[[BinaryIO], object]) -> bytes:
    """Make or replace `file` with the bytes that `fill` writes; return their sha256.

    After an error, of a full disk for example, the old file is still there and no other file is
    left behind. If the disk was the cause, the error is an OSError.
    """
    # A random name, because ranks that share a folder write one manifest at one time. Processes in
    # containers may have the same number.
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(4)}.tmp")
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
        # torch.save hides the OSError of a full disk behind an error of its own.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    return digest
