import sys

import pytest
import torch

from gradwire.errors import ConfigError
from gradwire.workbench.data import DataError, byte_pairs
from gradwire.workbench.data.books import load_books, load_novels

WORDS = "the quick brown fox jumps over the lazy dog\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, and small pieces."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(byte_pairs, "PIECE", 200)
    return tmp_path / "cache" / "gradwire"


@pytest.fixture
def folder(tmp_path):
    for part, count in (("train", 60), ("valid", 20), ("test", 30)):
        (tmp_path / f"{part}.txt").write_text(WORDS * count)
    return tmp_path


def test_tokens_are_fewer_than_bytes_and_say_how_many(folder):
    text = load_books(folder, 8, vocabulary=280)
    assert text.network == {"words": 280}
    assert int(text.train.max()) < 280
    assert text.train.dtype == torch.int32
    share = text.tokens_per_byte("test")
    assert share == len(text.test) / (30 * len(WORDS))
    assert 0.1 < share < 0.5
    assert load_books(folder, 8).tokens_per_byte("test") == 1


def test_the_encoding_loses_nothing(folder):
    """Each token stands for the same bytes in every text: WORDS has one encoding per line."""
    text = load_books(folder, 8, vocabulary=280)
    line = text.train[: len(text.train) // 60]
    assert torch.equal(line.repeat(60), text.train)
    assert torch.equal(line.repeat(30), text.test)


def test_a_second_run_reads_the_tokens(folder, cache, monkeypatch):
    first = load_books(folder, 8, vocabulary=280)
    (file,) = cache.iterdir()
    monkeypatch.setattr(byte_pairs, "_encode", None)
    again = load_books(folder, 8, vocabulary=280)
    assert torch.equal(first.train, again.train)
    assert again.lengths == first.lengths
    file.write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"cannot be read: .* Remove it"):
        load_books(folder, 8, vocabulary=280)


def test_another_text_or_size_has_another_encoding(folder, cache):
    load_books(folder, 8, vocabulary=280)
    load_books(folder, 8, vocabulary=270)
    (folder / "valid.txt").write_text(WORDS * 25)
    load_books(folder, 8, vocabulary=280)
    assert len([*cache.iterdir()]) == 3


@pytest.mark.parametrize(
    ("vocabulary", "words"),
    [(256, "--vocabulary must be 0 or 257 to 65,536, got 256"), (9000, "needs a longer text")],
)
def test_sizes_that_cannot_be(folder, vocabulary, words):
    with pytest.raises((ConfigError, DataError), match=words):
        load_books(folder, 8, vocabulary=vocabulary)


def test_without_the_package_it_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'gradwire\[text\]'"):
        load_books(folder, 8, vocabulary=280)


def test_the_novels_have_an_encoding_too():
    text = load_novels(128, vocabulary=512)
    assert text.words == 512
    assert text.lengths["train"] == len(load_novels(128).train)
