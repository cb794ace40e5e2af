import lzma

import pytest
import torch

from gradwire.workbench import data
from gradwire.workbench.data import DataError


def write(folder, **parts):
    folder.mkdir(exist_ok=True)
    for name, text in parts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")


@pytest.mark.parametrize("inside", ["", "books"])
def test_any_three_texts_are_read_as_bytes(tmp_path, inside):
    folder = tmp_path / inside if inside else tmp_path
    write(folder, train="abcdé", valid="xyz")
    (folder / "test.txt.xz").write_bytes(lzma.compress(b"hello"))
    books = data.load_dataset("books", tmp_path, (2,))
    assert bytes(books.train.tolist()).decode() == "abcdé"
    assert bytes(books.valid.tolist()) == b"xyz"
    assert bytes(books.test.tolist()) == b"hello"
    assert books.network == {"words": 256}
    tokens, following = books.training_batch(torch.tensor([1]), seed=0)
    assert tokens.dtype == following.dtype == torch.int64
    assert bytes(tokens[0].tolist()) == b"cd"
    assert following[0].tolist() == [ord("d"), "é".encode()[0]]


def test_a_missing_part_is_named_with_its_places(tmp_path):
    write(tmp_path, train="abc", test="abc")
    with pytest.raises(DataError, match=r"no valid\.txt or valid\.txt\.xz in .* or .*books"):
        data.load_dataset("books", tmp_path, (2,))


def test_a_damaged_part_is_named(tmp_path):
    write(tmp_path, valid="abc", test="abc")
    (tmp_path / "train.txt.xz").write_bytes(lzma.compress(b"hello" * 100)[:-9])
    with pytest.raises(DataError, match=r"train\.txt\.xz cannot be read"):
        data.load_dataset("books", tmp_path, (2,))


def test_a_short_validation_text_is_refused(tmp_path):
    write(tmp_path, train="abcdef", valid="ab", test="abcdef")
    with pytest.raises(DataError, match="the validation text has 2 words, one window takes 5"):
        data.load_dataset("books", tmp_path, (4,))


def test_the_embedded_novels_are_english_by_two_authors():
    novels = data.load_dataset("novels", None, (128,))
    train, valid, test = (
        bytes(part.tolist()).decode() for part in (novels.train, novels.valid, novels.test)
    )
    assert "Mr. Darcy" in train
    assert "Darcy" not in valid + test
    assert "Silas" in valid
    assert "Silas" in test
    assert valid[:1000] not in test
    assert len(novels.train) > 600_000
