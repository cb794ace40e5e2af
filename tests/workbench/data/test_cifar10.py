import pickle

import numpy as np
import pytest
import torch

from gradwire.workbench import data
from gradwire.workbench.data import DataError
from gradwire.workbench.data.pickled import read_pickle
from tests.workbench.data.files import cifar_batch, python2_batch, write_cifar10

SHAPE = (3, 32, 32)


def test_reads_the_six_files(tmp_path):
    write_cifar10(tmp_path, count=20)
    dataset = data.load_dataset("cifar10", tmp_path, SHAPE)
    assert dataset.train.shape == (100, 3, 32, 32)
    assert dataset.test.shape == (20, 3, 32, 32)
    first = pickle.loads(cifar_batch(20, 0))
    assert torch.equal(dataset.train[:20].flatten(1), torch.from_numpy(first["data"]))
    assert dataset.train_labels[:20].tolist() == first["labels"]
    assert dataset.augment


def test_the_folder_may_be_the_inner_one(tmp_path):
    inner = write_cifar10(tmp_path)
    assert len(data.load_dataset("cifar10", inner, SHAPE).train) == 100


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_reads_the_protocols_of_pickle(protocol):
    content = read_pickle(cifar_batch(3, 7, protocol))
    expected = pickle.loads(cifar_batch(3, 7))["data"]
    assert torch.equal(content["data"].tensor(), torch.from_numpy(expected))


def test_reads_what_python_2_wrote():
    raw = bytes(range(256)) * 24
    content = read_pickle(python2_batch(raw, [3, 9], rows=2))
    assert content["data"].tensor().shape == (2, 3072)
    assert bytes(content["data"].tensor().flatten().tolist()) == raw
    assert content["labels"] == [3, 9]


def test_reads_arrays_stored_by_column():
    array = np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    content = read_pickle(pickle.dumps({"data": array}, protocol=2))
    assert torch.equal(content["data"].tensor(), torch.from_numpy(np.ascontiguousarray(array)))


class Trap:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_a_pickle_cannot_run_anything(tmp_path):
    folder = write_cifar10(tmp_path)
    mark = tmp_path / "ran"
    trap = {"data": Trap(exec, f"open({str(mark)!r}, 'w')"), "labels": []}
    (folder / "data_batch_3").write_bytes(pickle.dumps(trap))
    with pytest.raises(DataError, match=r"data_batch_3 .*asks for builtins.exec"):
        data.load_dataset("cifar10", tmp_path, SHAPE)
    assert not mark.exists()


@pytest.mark.parametrize("raw", [b"", b"\x80\x02", b"no pickle", pickle.dumps([1]), b"\x80\x04}."])
def test_a_damaged_file_is_one_clear_line(tmp_path, raw):
    folder = write_cifar10(tmp_path)
    (folder / "test_batch").write_bytes(raw)
    with pytest.raises(DataError, match="test_batch is not a CIFAR-10 batch") as error:
        data.load_dataset("cifar10", tmp_path, SHAPE)
    assert "\n" not in str(error.value)


def test_a_pickle_of_something_else_says_of_what():
    with pytest.raises(pickle.UnpicklingError, match="holds a list, not a dictionary"):
        read_pickle(pickle.dumps([1]))


def test_a_cut_file_is_one_clear_line(tmp_path):
    folder = write_cifar10(tmp_path)
    whole = (folder / "data_batch_1").read_bytes()
    (folder / "data_batch_1").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="data_batch_1 is not a CIFAR-10 batch"):
        data.load_dataset("cifar10", tmp_path, SHAPE)


def test_a_missing_file_is_named_with_the_layout_and_the_source(tmp_path):
    (tmp_path / "cifar-10-python.tar.gz").touch()
    with pytest.raises(DataError) as error:
        data.load_dataset("cifar10", tmp_path, SHAPE)
    for words in ("data_batch_1", "cifar-10-batches-py", "unpack it first", "Krizhevsky"):
        assert words in str(error.value)
