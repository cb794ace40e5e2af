"""local_steps of the Transformers Trainer: rounds, what is evaluated and saved, resume."""

import copy

import pytest
import torch

from tests.integrate import trainers
from tests.integrate.test_transformers import trainer_of

FIELDS = {"every": 3, "method": "topk", "density": 0.3, "dense_below": 0, "keep_unsent": True}


@pytest.fixture(autouse=True)
def _imported(ranks):
    trainers.import_on(ranks, "transformers")


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def shared_of(callback):
    weights = callback.local.shared_weights()
    return torch.cat([weights[name].reshape(-1) for name in callback.local.weights])


class Look:
    """What the model holds whenever the Trainer evaluates."""

    def __init__(self, trainer):
        self.trainer, self.seen = trainer, []
        self.loop = trainer.evaluation_loop
        trainer.evaluation_loop = self

    def __call__(self, *args, **kwargs):
        self.seen.append(flat(self.trainer.model))
        return self.loop(*args, **kwargs)


def trains(rank, folder):
    from gradwire.integrate.transformers import local_steps

    with trainers.launched(rank):
        trainer = trainer_of(folder, 8, learning_rate=0.01, save_steps=4, eval_steps=4)
        trainer.eval_dataset = trainer.train_dataset
        trainer.args.eval_strategy = trainer.args.logging_strategy
        look = Look(trainer)
        callback = local_steps(trainer, **FIELDS)
        twice = trainers.refusal(local_steps, trainer, **FIELDS)
        own, shared = [], []
        step = callback.on_optimizer_step

        def noted(*args, **kwargs):
            step(*args, **kwargs)
            own.append(flat(trainer.model))
            shared.append(shared_of(callback))

        callback.on_optimizer_step = noted
        trainer.train()
        end = flat(trainer.model)
        stats = callback.local.stats()
        return twice, own, shared, look.seen, end, shared_of(callback), stats


def test_rounds_and_the_weights_that_are_evaluated(ranks, tmp_path):
    results = ranks.run(2, trains, str(tmp_path))
    (_, own, shared, seen, end, last, stats), other = results
    assert "has a LocalStepsCallback already: attach once" in results[0][0]
    assert all(torch.equal(a, b) for a, b in zip(shared, other[2], strict=True))
    assert not torch.equal(own[0], other[1][0]), "each rank trains on its own data"
    assert torch.equal(shared[0], shared[1])
    assert not torch.equal(shared[1], shared[2]), "a round is three steps"
    # Evaluated after steps 4 and 8: not what the rank had, but what all share.
    assert torch.equal(seen[0], shared[3])
    assert torch.equal(seen[1], shared[7])
    assert not torch.equal(own[3], shared[3])
    # The last two steps are exchanged as training ends.
    assert torch.equal(end, last)
    assert torch.equal(end, other[4])
    assert not torch.equal(end, shared[7])
    assert stats.steps == 3
    assert 0 < stats.bytes_sent < stats.bytes_dense
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    size = sum(tensor.numel() for tensor in saved.values())
    assert size == len(shared[3])
    total = sum(float(tensor.double().sum()) for tensor in saved.values())
    assert total == pytest.approx(float(shared[3].double().sum()), abs=1e-6)


def resumes(rank, folder):
    from gradwire.integrate.transformers import local_steps

    ends = []
    with trainers.launched(rank):
        for steps, start in ((8, None), (4, None), (8, f"{folder}/checkpoint-4")):
            place = f"{folder}-whole" if not ends else folder
            torch.manual_seed(0)
            trainer = trainer_of(place, steps, save_steps=4, lr_scheduler_type="constant")
            callback = local_steps(trainer, **FIELDS)
            trainer.train(start)
            ends.append((flat(trainer.model), copy.deepcopy(callback.local.stats().residual_norm)))
    return ends


def test_a_resumed_run_ends_with_the_same_bits(ranks, tmp_path):
    results = ranks.run(2, resumes, str(tmp_path / "run"))
    for whole, half, rest in results:
        assert torch.equal(whole[0], rest[0])
        assert whole[1] == rest[1] > 0
        assert not torch.equal(half[0], rest[0])
    assert results[0][0][1] != results[1][0][1], "each rank gets its own residual back"


def has_muon(rank, folder):
    from gradwire.integrate.transformers import local_steps

    with trainers.launched(rank):
        trainer = trainer_of(folder, 2, save_strategy="no", learning_rate=0.02, weight_decay=0.1)
        callback = local_steps(trainer, recipe="muon")
        trainer.train()
        (optimizer,) = callback.local.optimizers
        groups = {(g["rule"], g["initial_lr"], g["weight_decay"]) for g in optimizer.param_groups}
        given = trainer_of(folder, 2, save_strategy="no")
        given.optimizer = torch.optim.SGD(given.model.parameters(), lr=0.1)
        own = local_steps(given, every=1)
        given.train()
        wrong = trainers.refusal(local_steps, trainer_of(folder), recipe="mu")
        return type(optimizer).__name__, groups, type(own.local.optimizers[0]).__name__, wrong


def test_a_recipe_brings_its_optimiser(ranks, tmp_path):
    name, groups, own, wrong = ranks.run(2, has_muon, str(tmp_path))[0]
    assert name == "MuonAdamW"
    assert groups == {("muon", 0.02, 0.1), ("adamw", 0.02, 0.1), ("adamw", 0.02, 0.0)}
    assert own == "SGD"
    assert wrong.startswith("ConfigError: unknown recipe 'mu'. Did you mean 'muon'")
