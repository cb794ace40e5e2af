import wave

import numpy as np
import pytest
import torch

from gradwire.workbench import data
from gradwire.workbench.data import LETTERS, DataError
from gradwire.workbench.data.an4 import read_wav
from gradwire.workbench.data.speech import spectrogram

SHAPE = (161,)


def write_wav(path, samples, channels=1, rate=16000):
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.to(torch.int16).numpy().tobytes())


def write_an4(folder):
    """Three training utterances of 0.1, 0.2 and 0.3 s, one test utterance."""
    for part, words in (("train", ["YES", "GO ON", "o'BRIEN"]), ("test", ["A"])):
        lines = []
        for i, text in enumerate(words):
            write_wav(folder / part / f"{i}.wav", 100 * torch.randn(1600 * (i + 1)))
            lines.append(f"{part}/{i}.wav\t{text}\n")
        (folder / f"{part}.tsv").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("place", [".", "an4"])
def test_reads_sounds_and_letters(tmp_path, place):
    write_an4(tmp_path / place)
    speech = data.load_dataset("an4", tmp_path, SHAPE)
    assert (speech.examples, speech.test_examples) == (3, 1)
    sound, frames, letters, counts = speech.training_batch(torch.tensor([2, 0]), seed=0)
    assert sound.shape == (2, 161, 31)
    assert frames.tolist() == [31, 11]
    assert sound[1, :, 11:].abs().max() == 0
    assert counts.tolist() == [7, 3]
    assert "".join(LETTERS[i] for i in letters) == "O'BRIENYES"


def test_samples_come_back_as_they_were_written(tmp_path):
    samples = torch.arange(-500, 500)
    write_wav(tmp_path / "a.wav", samples)
    assert torch.equal(read_wav(tmp_path / "a.wav").long(), samples)


def test_a_tone_is_one_bright_row_of_the_spectrogram():
    time = torch.arange(16000) / 16000
    picture = spectrogram(5000 * torch.sin(2 * torch.pi * 1000 * time))
    assert picture.shape == (161, 101)
    assert (picture[:, 5:-5].argmax(0) == 1000 // 50).all()
    assert picture.mean().abs() < 1e-4
    assert picture.std().item() == pytest.approx(1, abs=1e-3)


def test_the_spectrogram_is_that_of_the_formula():
    sound = np.random.default_rng(0).normal(0, 300, 1600)
    padded = np.pad(sound, 160, mode="reflect")
    frames = np.stack([padded[160 * t : 160 * t + 320] for t in range(11)])
    loud = np.log1p(np.abs(np.fft.rfft(frames * np.hamming(321)[:-1])))
    wanted = (loud - loud.mean()) / loud.std(ddof=1)
    computed = spectrogram(torch.from_numpy(sound))
    np.testing.assert_allclose(computed.numpy(), wanted.T, atol=1e-3)


def damage(folder, kind):
    path = folder / "train" / "1.wav"
    if kind == "missing":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif kind == "other":
        path.write_bytes(b"RIFX" + path.read_bytes()[4:])
    elif kind == "stereo":
        write_wav(path, torch.zeros(800), channels=2)
    elif kind == "short":
        write_wav(path, torch.zeros(100))
    elif kind == "list":
        (folder / "train.tsv").unlink()
    else:
        (folder / "train.tsv").write_text("train/0.wav\tROOM 5\n" if kind == "letter" else "x\n")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", r"no .*1.wav. AN4 is the lists"),
        ("cut", r"1.wav holds 6,300 bytes of 6,400"),
        ("other", r"1.wav is not a wav file"),
        ("stereo", "has 2 channels of 16 bits at 16000 Hz; it takes 1 of 16 at 16000"),
        ("short", "training utterance 1 has 100 samples, one frame takes 320"),
        ("list", r"no train.tsv in .*an4. AN4 is the lists"),
        ("letter", "line 1: the transcript has '5'"),
        ("tab", "line 1: no transcript in 'x'"),
    ],
)
def test_what_is_wrong_is_one_clear_line(tmp_path, kind, words):
    damage(write_an4(tmp_path), kind)
    with pytest.raises(DataError, match=words) as error:
        data.load_dataset("an4", tmp_path, SHAPE)
    assert "\n" not in str(error.value)


def test_the_tones_are_always_the_same_and_spell_their_letters():
    tones = data.load_dataset("tones", None, SHAPE)
    again = data.load_dataset("tones", None, SHAPE)
    assert torch.equal(tones.train[5], again.train[5])
    word = tones.train_letters[5]
    picture = spectrogram(tones.train[5])
    # 50 ms of silence, then 150 ms a letter and 50 ms of silence: letter i is loudest at 10 i + 12.
    for i, letter in enumerate(word.tolist()):
        frequency = 300 * (LETTERS.index(LETTERS[letter]) - LETTERS.index("A") + 1)
        assert picture[:, 20 * i + 12].argmax() == frequency // 50
