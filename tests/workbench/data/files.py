"""Small files in the layouts of the data sets."""

import gzip
import io
import pickle
import struct

import numpy as np


def idx(array: np.ndarray) -> bytes:
    """An idx file of unsigned bytes."""
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images that a network can learn: a bright bar whose place is the label, and noise."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 10, count)
    images = draw.integers(0, 60, (count, 28, 28))
    for image, label in zip(images, labels, strict=True):
        image[4 + 2 * label : 6 + 2 * label, 4:24] = 255
    return images.astype(np.uint8), labels.astype(np.uint8)


def write_mnist(folder, train: int = 96, test: int = 32, packed: bool = False):
    """The four MNIST files."""
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, count, seed in (("train", train, 0), ("t10k", test, 1)):
        images, labels = digits(count, seed)
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            raw = idx(array)
            path = folder / f"{prefix}-{name}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(raw) if packed else raw)
    return folder


def cifar_batch(count: int, seed: int, protocol: int = 2) -> bytes:
    """One CIFAR-10 batch as numpy pickles it."""
    draw = np.random.default_rng(seed)
    content = {
        "data": draw.integers(0, 256, (count, 3072)).astype(np.uint8),
        "labels": draw.integers(0, 10, count).tolist(),
        "batch_label": "a batch",
    }
    return pickle.dumps(content, protocol=protocol)


def python2_batch(data: bytes, labels: list[int], rows: int) -> bytes:
    """One CIFAR-10 batch as Python 2 wrote it: byte strings, numpy's old module names."""
    out = io.BytesIO()

    def text(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value

    out.write(b"\x80\x02}(")
    out.write(text(b"data"))
    out.write(b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b"))
    out.write(b"\x87R(K\x01M" + struct.pack("<H", rows) + b"M\x00\x0c\x86cnumpy\ndtype\n")
    out.write(text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xff")
    out.write(b"J\xff\xff\xff\xffK\x00tb\x89" + text(data) + b"tb")
    out.write(text(b"labels") + b"](" + b"".join(b"K" + bytes([i]) for i in labels) + b"e")
    out.write(b"u.")
    return out.getvalue()


def write_cifar10(folder, count: int = 20):
    """The six CIFAR-10 files."""
    folder = folder / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        (folder / name).write_bytes(cifar_batch(count, seed))
    return folder
