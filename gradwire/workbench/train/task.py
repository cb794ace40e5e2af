"""Training tasks: the loss of a batch, and the score of a model on the test set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = Sequence[Tensor]


@dataclass(frozen=True)
class TrainTask:
    """A loss to train with, and a score to report.

    measure: the name of the score. column: its name in metrics.jsonl.
    count: returns (part, whole) of a test batch in float64, for example right answers and answers.
    score: returns the score for the sums of `count` over all batches. words: formats the score.
    """

    measure: str
    column: str
    loss: Callable[[nn.Module, Batch], Tensor]
    count: Callable[[nn.Module, Batch], Tensor]
    score: Callable[[Tensor], float]
    words: Callable[[float], str]
    higher_is_better: bool = False


def _part_of_whole(sums: Tensor) -> float:
    return float(sums[0] / sums[1])


def _format_percent(score: float) -> str:
    return f"{100 * score:.1f} %"


def _classify_loss(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def _count_right(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    right = (model(images).argmax(dim=1) == labels).sum()
    return torch.stack([right, right.new_tensor(len(labels))]).double()


def _language_loss(model: nn.Module, batch: Batch) -> Tensor:
    words, following = batch
    return F.cross_entropy(model(words).flatten(0, 1), following.flatten())


def _sum_language_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss = _language_loss(model, batch).double()
    return torch.stack([loss * batch[1].numel(), loss.new_tensor(batch[1].numel())])


def _perplexity(sums: Tensor) -> float:
    return float((sums[0] / sums[1]).exp())


def _speech_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the CTC loss: the sum over an utterance's letters, the mean over utterances.

    An utterance with more letters than frames cannot be spelled. Its loss is 0.
    """
    sound, frames, letters, counts = batch
    scores, times = model(sound, frames)
    chances = scores.float().log_softmax(dim=2).transpose(0, 1)
    total = F.ctc_loss(chances, letters, times, counts, reduction="sum", zero_infinity=True)
    return total / len(sound)


def _count_misspelled(model: nn.Module, batch: Batch) -> Tensor:
    """Return the number of wrong letters in the likeliest spellings, and the number of letters.

    A wrong letter is one to change, add or drop. The likeliest spelling takes the likeliest class
    of each frame, joins repeats and drops blanks. No dictionary is used.
    """
    sound, frames, letters, counts = batch
    scores, times = model(sound, frames)
    best = scores.argmax(dim=2).cpu()
    wrong = 0
    for row, time, wanted in zip(
        best, times.tolist(), letters.cpu().split(counts.tolist()), strict=True
    ):
        joined = row[:time].unique_consecutive()
        wrong += edits(joined[joined > 0].tolist(), wanted.tolist())
    return torch.tensor([wrong, len(letters)], dtype=torch.float64, device=sound.device)


def edits(spelled: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the least number of edits from `spelled` to `wanted` (Levenshtein distance)."""
    row = list(range(len(wanted) + 1))
    for i, letter in enumerate(spelled, start=1):
        before, row[0] = row[0], i
        for j, other in enumerate(wanted, start=1):
            best = min(row[j] + 1, row[j - 1] + 1, before + (letter != other))
            before, row[j] = row[j], best
    return row[-1]


TASKS = {
    "classify": TrainTask(
        "test accuracy",
        "test_accuracy",
        _classify_loss,
        _count_right,
        _part_of_whole,
        _format_percent,
        True,
    ),
    "language": TrainTask(
        "test perplexity",
        "test_perplexity",
        _language_loss,
        _sum_language_loss,
        _perplexity,
        "{:.2f}".format,
    ),
    "bytes": TrainTask(
        "test loss",
        "test_loss",
        _language_loss,
        _sum_language_loss,
        _part_of_whole,
        "{:.4f}".format,
    ),
    "speech": TrainTask(
        "test letter error",
        "test_letter_error",
        _speech_loss,
        _count_misspelled,
        _part_of_whole,
        _format_percent,
    ),
}
