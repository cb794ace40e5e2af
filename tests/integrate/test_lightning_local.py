"""LocalStepsStrategy of Lightning: rounds, the weights that are validated and saved, resume."""

import pytest
import torch
from torch import nn

from tests.integrate import trainers

FIELDS = {"every": 3, "method": "topk", "density": 0.3, "dense_below": 0, "keep_unsent": True}


@pytest.fixture(autouse=True)
def _imported(ranks):
    trainers.import_on(ranks, "lightning")


def flat(model):
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def shared_of(local):
    return torch.cat([x.reshape(-1) for x in local.shared_weights().values()])


def trainer_and_model(folder, epochs, optimizers=1, **options):
    """Eight steps per epoch, a validation after each; the model notes its weights there."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    from gradwire.integrate.lightning import LocalStepsStrategy

    class Regression(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 1))
            self.seen, self.own = [], []

        def training_step(self, batch, _):
            return (self.net(batch[0]) - 1).square().mean()

        def validation_step(self, batch, _):
            self.seen.append(flat(self))
            self.log("loss", (self.net(batch[0]) - 1).square().mean(), sync_dist=True)

        def on_validation_end(self):
            self.seen.append(flat(self))

        def on_train_batch_end(self, *_):
            self.own.append(flat(self))

        def configure_optimizers(self):
            made = [torch.optim.AdamW(self.parameters(), lr=0.01) for _ in range(optimizers)]
            return made if optimizers > 1 else made[0]

    torch.manual_seed(0)
    x = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    model, data = Regression(), DataLoader(TensorDataset(x), batch_size=4)
    trainer = Trainer(
        strategy=LocalStepsStrategy(**FIELDS | options),
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        # Saved as validation ends, before the module hears of it.
        callbacks=[
            ModelCheckpoint(folder, monitor="loss", save_last=True, save_on_train_epoch_end=False)
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return trainer, model, data


def fits(rank, folder):
    with trainers.launched(rank):
        whole, model, data = trainer_and_model(f"{folder}-whole", 4)
        whole.fit(model, data, data)
        local, end = whole.strategy.local, flat(model)
        counted = local.inner_steps, local.stats().steps
        half, first, data = trainer_and_model(folder, 2)
        half.fit(first, data, data)
        rest, second, data = trainer_and_model(folder, 4)
        rest.fit(second, data, data, ckpt_path=f"{folder}/last.ckpt")
        return model.own, model.seen, end, shared_of(local), counted, flat(second)


def test_rounds_validation_and_resume(ranks, tmp_path):
    folder = tmp_path / "run"
    results = ranks.run(2, fits, str(folder))
    (own, seen, end, shared, counted, resumed), other = results
    assert not torch.equal(own[0], other[0][0]), "each rank trains on its own data"
    assert all(torch.equal(a, b) for a, b in zip(seen, other[1], strict=True))
    assert not torch.equal(own[7], seen[-1])
    # 32 steps are ten rounds and two steps; these are exchanged as the fit ends.
    assert counted == (32, 11)
    assert torch.equal(end, shared)
    assert torch.equal(end, other[2])
    assert torch.equal(resumed, end)
    assert (folder / "last.ckpt.gradwire" / "gradwire.json").is_file()
    saved = torch.load(f"{folder}-whole/last.ckpt", weights_only=False)["state_dict"]
    weights = torch.cat([tensor.reshape(-1) for tensor in saved.values()])
    assert torch.equal(weights, seen[-1]), "a checkpoint holds the weights that were validated"


def refuses(rank, folder):
    from gradwire.integrate.lightning import LocalStepsStrategy

    with trainers.launched(rank):
        trainer, model, data = trainer_and_model(folder, 1, optimizers=2)
        model.automatic_optimization = False
        two = trainers.refusal(trainer.fit, model, data)
        return (
            two,
            trainers.refusal(LocalStepsStrategy, every=0),
            trainers.refusal(LocalStepsStrategy, recipe="muon", find_unused_parameters=True),
        )


def test_wrong_arguments_are_refused(ranks, tmp_path):
    for two, every, place in ranks.run(2, refuses, str(tmp_path)):
        assert "counts the steps of one optimiser, configure_optimizers returned 2" in two
        assert every.startswith("ConfigError: every")
        assert "LocalStepsStrategy(..., ddp={'find_unused_parameters': True})" in place
