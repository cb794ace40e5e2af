"""A run's checkpoint that is damaged or another's: one line on every rank."""

import hashlib
import io

import pytest
import torch

from gradwire.errors import StateError
from gradwire.workbench.train import checkpoint
from tests.workbench.train import jobs

WHOLE = {"version": 3, "wire": "wire-00000003", "position": {"step": 3}}


def write(folder, content, seal=True):
    out = io.BytesIO()
    torch.save(content, out)
    path = folder / "checkpoint" / "trainer.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(out.getvalue())
    if seal:
        with path.open("r+b") as file:
            checkpoint._seal(file)
    return path


def test_a_bit_that_flips_anywhere_is_found(tmp_path):
    path = write(tmp_path, {**WHOLE, "model": torch.randn(50)})
    raw = path.read_bytes()
    assert checkpoint._read(path)[1] == hashlib.sha256(raw[:-32]).digest()
    assert torch.load(path, weights_only=True)["version"] == 3
    for at in range(len(raw)):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :])
        with pytest.raises(StateError, match=r"trainer.pt is damaged, or of a version before 3"):
            checkpoint._read(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({**WHOLE, "version": 2}, "is not a checkpoint of version 3"),
        ([], "is not a checkpoint of version 3"),
        ({**WHOLE, "wire": "../../elsewhere"}, "names no folder of compressor states"),
        ({**WHOLE, "trap": pytest.approx}, "cannot be read: UnpicklingError: "),
    ],
)
def test_another_content_is_refused(tmp_path, content, words):
    with pytest.raises(StateError, match=words) as caught:
        checkpoint._read(write(tmp_path, content))
    assert "\n" not in str(caught.value)


def test_a_file_without_a_checksum_is_refused(tmp_path):
    with pytest.raises(StateError, match="of a version before 3: its sha256 does not fit"):
        checkpoint._read(write(tmp_path, WHOLE, seal=False))


def loaded(rank, folders):
    try:
        found = checkpoint.load(folders[rank], jobs.place_of(rank))
        return found and found["position"]["step"]
    except StateError as error:
        return str(error)


def test_every_rank_hears_of_it(ranks, tmp_path):
    good, other, bad, none = (tmp_path / n for n in ("good", "other", "bad", "none"))
    write(good, WHOLE)
    write(other, {**WHOLE, "position": {"step": 4}})
    write(bad, WHOLE, seal=False)
    assert ranks.run(2, loaded, (good, good)) == [3, 3]
    assert ranks.run(2, loaded, (none, good)) == [None, None]
    for said in ranks.run(2, loaded, (good, bad)):
        assert f"{bad}/checkpoint/trainer.pt is damaged" in said
    for said in ranks.run(2, loaded, (good, none)):
        assert f"{none}/checkpoint/trainer.pt cannot be read: No such file" in said
    for said in ranks.run(2, loaded, (good, other)):
        assert said.endswith("rank 1 has another one than rank 0. Copy one to all.")


def run_again(rank, folder):
    """What a run of another model says to a checkpoint that is whole."""
    worker, said = jobs.place_of(rank), []
    for model in ("fnn3", "lenet5"):
        try:
            jobs.train(worker, jobs.options(None, model=model, workers=1), folder)
        except StateError as error:
            said.append(str(error))
    return said


def test_the_checkpoint_of_another_model_is_one_line(ranks, tmp_path):
    write(tmp_path, {**WHOLE, "model": {"a": torch.zeros(1)}, "optimizer": {}})
    said = ranks.run(1, run_again, tmp_path)[0]
    assert len(said) == 2
    for text in said:
        assert "trainer.pt is of another model or run: RuntimeError: Error(s) in loading" in text
        assert "\n" not in text
