"""A file is replaced whole, or stays as it was."""

import errno
import hashlib

import pytest
import torch

from gradwire.state.saved.files import replace_file


class Full:
    """A file on a disk that becomes full after `room` bytes."""

    def __init__(self, room):
        self.room = room

    def write(self, content):
        self.room -= len(content)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(content)


def test_the_file_is_there_and_its_digest_is_right(tmp_path):
    digest = replace_file(tmp_path / "a", lambda out: out.write(b"words"))
    assert (tmp_path / "a").read_bytes() == b"words"
    assert digest == hashlib.sha256(b"words").digest()


@pytest.mark.parametrize("room", [0, 100, 600])
def test_a_full_disk_leaves_the_old_file_and_says_so(tmp_path, room):
    (tmp_path / "a").write_bytes(b"old")

    def fill(out):
        out.write(b"half")
        torch.save(torch.zeros(1000), Full(room))

    with pytest.raises(OSError, match="No space left on device"):
        replace_file(tmp_path / "a", fill)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_another_error_stays_what_it_is(tmp_path):
    def fill(out):
        raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError):
        replace_file(tmp_path / "a", fill)
    assert not list(tmp_path.iterdir())
