"""Files that once ended in another exception, or would take all memory."""

import gzip
import io
import pickle
import struct
import time

import numpy as np
import pytest

from gradwire.errors import ConfigError, StateError
from gradwire.plan.rate import parse_rate
from gradwire.workbench.bench.data import read_gradient
from gradwire.workbench.data.an4 import load_an4, read_wav
from gradwire.workbench.data.cifar10 import _read_batch
from gradwire.workbench.data.dataset import DataError
from gradwire.workbench.data.idx import read_idx
from gradwire.workbench.data.pickled import read_pickle
from gradwire.workbench.report import read_runs
from gradwire.workbench.train.metrics import read_records
from tests.workbench.data.files import cifar_batch
from tests.workbench.report.runs import write_run


def put(path, content):
    path.write_bytes(content)
    return path


def wav(samples, *, promised=None, extra=b""):
    size = len(samples) if promised is None else promised
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 16_000, 32_000, 2, 16)
    body = b"WAVE" + form + extra + struct.pack("<4sI", b"data", size) + samples
    return b"RIFF" + struct.pack("<I", len(body)) + body


def test_a_wav_file(tmp_path):
    assert read_wav(put(tmp_path / "a.wav", wav(bytes(10)))).shape == (5,)
    for content, words in (
        (wav(b""), "holds 0 bytes of 0"),
        (wav(bytes(10), promised=2**32 - 2), "holds 10 bytes of"),
        (wav(bytes(10), extra=struct.pack("<4sI", b"LIST", 2**31)), "is not a wav file: "),
    ):
        with pytest.raises(DataError, match=words):
            read_wav(put(tmp_path / "a.wav", content))


@pytest.mark.parametrize("line", [b"\0\tYES", b"\tYES", b"/\tYES", b"\xff\tYES"])
def test_a_list_of_utterances(tmp_path, line):
    put(tmp_path / "train.tsv", line + b"\n")
    with pytest.raises(DataError, match=r"train\.tsv"):
        load_an4(tmp_path)


def test_an_idx_file_that_is_empty_or_unpacks_to_too_much(tmp_path):
    header = bytes([0, 0, 8, 1])
    for count, values, words in (
        (0, b"", "promises 0 values: from 1"),
        (2**32 - 1, b"", "promises 4294967295 values: from 1"),
        (10, bytes(1 << 26), "holds more bytes where its header promises 18"),
    ):
        raw = gzip.compress(header + struct.pack(">I", count) + values)
        with pytest.raises(DataError, match=words):
            read_idx(put(tmp_path / "a.gz", raw), 1)


def test_a_pickle_that_would_take_all_memory(tmp_path):
    begin = time.process_time()
    memo = b"\x80\x02}r" + struct.pack("<I", 2**31) + b"."
    assert read_pickle(memo) == {}
    text = b"X" + struct.pack("<I", 1000) + b"a" * 1000 + b"q\x000"
    copy = b"c_codecs\nencode\n(h\x00X\x06\x00\x00\x00latin1tR0"
    with pytest.raises(pickle.UnpicklingError, match="makes more bytes than it has"):
        read_pickle(b"\x80\x02" + text + 50 * copy + b"}.")
    labels = [1]
    for _ in range(60):
        labels = [labels, labels]
    content = pickle.loads(cifar_batch(2, 0)) | {"labels": labels}
    with pytest.raises(DataError, match="its labels are not numbers"):
        _read_batch(put(tmp_path / "batch", pickle.dumps(content, protocol=2)))
    assert time.process_time() - begin < 20


def test_a_gradient(tmp_path):
    out = io.BytesIO()
    np.savez(out, a=np.zeros(3, np.float32))
    with pytest.raises(ConfigError, match="it is an archive"):
        read_gradient(put(tmp_path / "g.npz", out.getvalue()))
    out = io.BytesIO()
    np.save(out, np.zeros(3, np.float32))
    raw = out.getvalue().replace(b"(3,), }            ", b"(999999999999,), } ")
    assert raw != out.getvalue()
    with pytest.raises(ConfigError, match=r"not a readable \.npy file: ValueError"):
        read_gradient(put(tmp_path / "g.npy", raw))


def test_a_rate_that_no_number_holds():
    with pytest.raises(ConfigError, match="link must be from"):
        parse_rate("9" * 400 + "gbit")


def test_metrics_that_are_damaged_before_their_end(tmp_path):
    path = put(tmp_path / "m.jsonl", b'{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(StateError, match=r"m\.jsonl, line 2: JSONDecodeError"):
        read_records(path)
    for line in (b"[]", b'{"step": "1"}', b'{"loss": 1}', b'{"step": 1, "loss": "x"}'):
        with pytest.raises(StateError, match=r"line 1: .* is no record of a step"):
            read_records(put(path, line + b"\n"))


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("config.json", '"epochs": 3', '"epochs": "3"', "the option 'epochs' cannot be '3'"),
        ("config.json", '"batch":', '"bach":', "another version: it has the option 'bach'"),
        ("result.json", '{"replicas_identical": true}', "[]", "holds no result of a run"),
        ("metrics.jsonl", '"bytes_sent": 40000,', "", "line 1: bytes_sent is None, not a number"),
    ],
)
def test_a_run_folder(tmp_path, name, old, new, words):
    write_run(tmp_path)
    path = tmp_path / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises((ConfigError, StateError), match=words) as caught:
        read_runs(tmp_path)
    assert name in str(caught.value)
