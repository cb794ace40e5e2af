import pytest

from gradwire.workbench import data
from gradwire.workbench.data import DataError


@pytest.mark.parametrize("place", ["input.txt", "tinyshakespeare/input.txt"])
def test_reads_letters_nine_tenths_to_train_on(tmp_path, place):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text("ba\nb" * 10)
    text = data.load_dataset("shakespeare", tmp_path, (3,))
    assert text.train.tolist() == [2, 1, 0, 2] * 9
    assert text.test.tolist() == [2, 1, 0, 2]
    assert text.network == {"words": 3}


def test_a_missing_or_damaged_file_is_one_line(tmp_path):
    with pytest.raises(DataError, match=r"no input.txt in .* Tiny shakespeare is that one file"):
        data.load_dataset("shakespeare", tmp_path, (3,))
    (tmp_path / "input.txt").write_bytes(b"a \xff b")
    with pytest.raises(DataError, match="is not UTF-8 text"):
        data.load_dataset("shakespeare", tmp_path, (3,))
