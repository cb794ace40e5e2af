"""Gradients of a network in training, as data of `bench compress`."""

import pytest
import torch

from gradwire.errors import ConfigError
from gradwire.workbench.bench import bench_compress, training
from gradwire.workbench.bench.training import parse_training, training_gradients

CPU = torch.device("cpu")


def test_a_name_says_network_and_step():
    assert [parse_training(f"training:{n}")[0].name for n in ("gpt", "resnet50")] == [
        "gpt-11m",
        "resnet50",
    ]
    assert parse_training("training:gpt")[1] == 150
    assert parse_training("training:vgg16@7")[1] == 7


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("training:gpt@soon", "number from 0 on, got 'soon'"),
        ("training:lstm-ptb", "only networks for images or bytes"),
        ("training:bert", "bert"),
        ("noise", "training:gpt"),
    ],
)
def test_a_wrong_name_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        next(bench_compress([1000], [0.01], ["topk"], CPU, data=[name]))


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setitem(training.DIFFERENT, "cpu", 3)
    monkeypatch.setitem(training.BATCH, "cpu", 1)


def test_gradients_differ_repeat_and_begin_at_their_step(short):
    first, again = (training_gradients("training:gpt-tiny@0", CPU) for _ in range(2))
    later = training_gradients("training:gpt-tiny@1", CPU)
    assert [torch.equal(a, b) for a, b in zip(first, again, strict=True)] == [True] * 3
    assert torch.equal(first[1], later[0])
    assert not torch.equal(first[0], first[1])
    # The last layer comes first, as in DDP's buckets: the head, 256 rows of 96.
    assert first[0][: 256 * 96].norm() > 0
    assert {g.dtype for g in first} == {torch.float32}


def test_images_are_as_large_as_the_network_takes(short):
    for name, shape in (("vgg16-cifar", (3, 32, 32)), ("resnet50", (3, 224, 224))):
        spec, _ = parse_training(f"training:{name}")
        images, labels = next(training._batches(spec, CPU, None, 0))
        assert images.shape == (1, *shape)
        assert labels.shape == (1,)


def test_rows_have_the_size_of_the_network(short):
    rows = list(
        bench_compress(
            [1000], [0.01], ["topk"], CPU, 4, 1, data=["training:gpt-tiny@0", "gaussian"]
        )
    )
    sizes = {row.data: row.size for row in rows}
    assert sizes == {"training:gpt-tiny@0": 393_888, "gaussian": 1000}
    assert {row.recall for row in rows if row.method == "topk"} == {1.0}
