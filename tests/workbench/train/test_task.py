import math

import pytest
import torch
from torch import nn

from gradwire.workbench.train.task import TASKS, edits


class Says(nn.Module):
    """A model that gives the same answer to everything."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, *_):
        return self.answer


def one_hot(classes, rows):
    return 9 * nn.functional.one_hot(torch.tensor(rows), classes).float()


def test_accuracy_is_the_share_that_is_right():
    batch = torch.zeros(4), torch.tensor([0, 1, 2, 2])
    sums = TASKS["classify"].count(Says(one_hot(3, [0, 1, 1, 2])), batch)
    assert sums.tolist() == [3, 4]
    assert TASKS["classify"].score(sums) == 0.75
    assert TASKS["classify"].words(0.75) == "75.0 %"


def test_perplexity_of_a_guess_is_the_number_of_words():
    task = TASKS["language"]
    batch = torch.zeros(2, 5), torch.randint(7, (2, 5))
    model = Says(torch.zeros(2, 5, 7))
    sums = task.count(model, batch) + task.count(model, batch)
    assert sums[1] == 20
    assert task.score(sums) == pytest.approx(7)
    assert task.loss(model, batch).item() == pytest.approx(math.log(7))


def test_letters_are_read_without_repeats_and_blanks_up_to_the_length():
    task = TASKS["speech"]
    said = one_hot(4, [[0, 1, 1, 0, 1, 2, 3], [3, 3, 0, 0, 1, 2, 2]])
    batch = torch.zeros(2), torch.tensor([6, 4]), torch.tensor([1, 1, 2, 1]), torch.tensor([3, 1])
    sums = task.count(Says((said, torch.tensor([6, 4]))), batch)
    # 1 1 2 as wanted; 3 where 1 is wanted, and what is beyond four frames does not count.
    assert sums.tolist() == [1, 4]


def test_ctc_loss_of_an_utterance_without_choice():
    task = TASKS["speech"]
    batch = torch.zeros(1), torch.tensor([2]), torch.tensor([1, 2]), torch.tensor([2])
    loss = task.loss(Says((torch.zeros(1, 2, 3), torch.tensor([2]))), batch)
    assert loss.item() == pytest.approx(2 * math.log(3))


def test_an_utterance_that_cannot_be_spelled_counts_nothing():
    batch = torch.zeros(1), torch.tensor([1]), torch.tensor([1, 2]), torch.tensor([2])
    loss = TASKS["speech"].loss(Says((torch.zeros(1, 1, 3), torch.tensor([1]))), batch)
    assert loss.item() == 0


@pytest.mark.parametrize(
    ("said", "wanted", "count"),
    [("", "", 0), ("abc", "", 3), ("", "ab", 2), ("kitten", "sitting", 3), ("ab", "ba", 2)],
)
def test_edits(said, wanted, count):
    assert edits([ord(c) for c in said], [ord(c) for c in wanted]) == count
