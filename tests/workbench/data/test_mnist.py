import numpy as np
import pytest
import torch

from gradwire.workbench import data
from gradwire.workbench.data import DataError
from gradwire.workbench.data.idx import read_idx
from tests.workbench.data.files import digits, idx, write_mnist

SHAPE = (1, 28, 28)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", [".", "MNIST/raw"])
def test_reads_the_four_files_wherever_they_usually_are(tmp_path, place, packed):
    write_mnist(tmp_path / place, train=30, test=10, packed=packed)
    dataset = data.load_dataset("mnist", tmp_path, SHAPE)
    images, labels = digits(30, 0)
    assert torch.equal(dataset.train[:, 0], torch.from_numpy(images))
    assert dataset.train_labels.tolist() == labels.tolist()
    assert dataset.test.shape == (10, 1, 28, 28)


def test_a_missing_file_is_named_with_the_layout_and_the_source(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError) as error:
        data.load_dataset("mnist", tmp_path, SHAPE)
    for words in ("t10k-labels-idx1-ubyte", "MNIST/raw", ".gz", "LeCun, Cortes and Burges"):
        assert words in str(error.value)


@pytest.mark.parametrize("damage", ["cut", "extended", "packed", "magic", "empty"])
def test_a_damaged_file_is_one_clear_line(tmp_path, damage):
    packed = damage == "packed"
    write_mnist(tmp_path, packed=packed)
    path = tmp_path / f"train-images-idx3-ubyte{'.gz' if packed else ''}"
    raw = path.read_bytes()
    wrong = {"cut": raw[:-1], "extended": raw + b"0", "packed": raw[:-20], "magic": b"1" + raw[1:]}
    path.write_bytes(wrong.get(damage, b""))
    with pytest.raises(DataError, match="train-images") as error:
        data.load_dataset("mnist", tmp_path, SHAPE)
    assert "\n" not in str(error.value)
    assert "Fetch it again" in str(error.value)


def test_a_truncated_file_says_how_much_is_missing(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(idx(np.zeros((3, 4)))[:-5])
    with pytest.raises(DataError, match="holds 19 bytes where its header promises 24"):
        read_idx(path, 2)


def test_images_and_labels_must_belong_together(tmp_path):
    write_mnist(tmp_path, train=30)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(digits(29, 0)[1]))
    with pytest.raises(DataError, match="30 training images but 29 labels"):
        data.load_dataset("mnist", tmp_path, SHAPE)


def test_labels_beyond_nine_are_refused(tmp_path):
    write_mnist(tmp_path, test=3)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.array([1, 10, 2])))
    with pytest.raises(DataError, match="label 10"):
        data.load_dataset("mnist", tmp_path, SHAPE)


def test_a_data_set_of_another_shape_is_refused(tmp_path):
    write_mnist(tmp_path)
    with pytest.raises(DataError, match="1 x 28 x 28, the model takes 3 x 32 x 32"):
        data.load_dataset("mnist", tmp_path, (3, 32, 32))


def test_files_need_a_folder():
    with pytest.raises(DataError, match="--data-dir"):
        data.load_dataset("mnist", None, SHAPE)
