import pytest
import torch

from gradwire.workbench import data
from gradwire.workbench.data import DataError
from gradwire.workbench.data.phrases import PERPLEXITY, next_word_chances
from gradwire.workbench.data.text import LAYOUTS

LINES = {"train": " a b <unk> c \n\n b b a c c \n", "valid": "a\n", "test": " c b d \n a\n"}


def write_text(folder, name="ptb", lines=LINES):
    folder.mkdir(parents=True, exist_ok=True)
    for part, text in lines.items():
        (folder / LAYOUTS[name][2].format(part)).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("name", "place"), [("ptb", "."), ("ptb", "ptb"), ("wikitext2", "wikitext-2")]
)
def test_reads_words_in_the_order_they_come(tmp_path, name, place):
    write_text(tmp_path / place, name)
    text = data.load_dataset(name, tmp_path, (3,))
    # a b <unk> c <eos>, then an empty line, then b b a c c <eos>
    assert text.train.tolist() == [0, 1, 2, 3, 4, 4, 1, 1, 0, 3, 3, 4]
    assert text.test.tolist() == [3, 1, 2, 4, 0, 4]  # d is unknown
    assert text.network == {"words": 5}
    assert (text.examples, text.test_examples) == (3, 1)


def test_a_batch_is_windows_and_the_words_after_them(tmp_path):
    text = data.load_dataset("ptb", write_text(tmp_path), (3,))
    words, following = text.training_batch(torch.tensor([2, 0]), seed=0)
    assert words.tolist() == [[1, 1, 0], [0, 1, 2]]
    assert following.tolist() == [[1, 0, 3], [1, 2, 3]]
    assert [part.tolist() for part in text.test_batch(0, 1)] == [[[3, 1, 2]], [[1, 2, 4]]]


def test_a_missing_file_is_named_with_the_layout(tmp_path):
    (write_text(tmp_path) / "ptb.test.txt").unlink()
    with pytest.raises(DataError, match=r"no ptb.test.txt in .*ptb. Penn Treebank is the files"):
        data.load_dataset("ptb", tmp_path, (3,))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ({"train": "a b c d e", "test": "f g h i j"}, "has the word 'f'"),
        ({"train": "a b", "test": "a b a b"}, "the training text has 3 words, one window takes 4"),
    ],
)
def test_files_that_cannot_be_used_are_one_line(tmp_path, lines, words):
    with pytest.raises(DataError, match=words):
        data.load_dataset("ptb", write_text(tmp_path, lines=lines), (3,))


def test_what_is_no_text_is_refused(tmp_path):
    (write_text(tmp_path) / "ptb.train.txt").write_bytes(b"a \xff b")
    with pytest.raises(DataError, match="is not UTF-8 text"):
        data.load_dataset("ptb", tmp_path, (3,))


def test_the_phrases_have_the_entropy_they_claim():
    text = data.load_dataset("phrases", None, (35,))
    shares = next_word_chances()
    assert (-(shares * shares.log()).sum()).exp().item() == pytest.approx(PERPLEXITY, abs=0.005)
    pairs = torch.stack([text.train[:-1], text.train[1:]])
    counts = torch.zeros(120, 120).index_put_(tuple(pairs), torch.ones(()), accumulate=True)
    likely = counts / counts.sum(1, keepdim=True)
    surprise = -(counts * likely.clamp(min=1e-9).log()).sum() / counts.sum()
    assert surprise.exp().item() == pytest.approx(PERPLEXITY, rel=0.03)
    assert torch.equal(text.train, data.load_dataset("phrases", None, (35,)).train)
