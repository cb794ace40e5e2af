"""The Lightning strategy: what stands beside a checkpoint, a second fit, what is refused."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from tests.integrate import trainers


@pytest.fixture(autouse=True)
def _imported(ranks):
    trainers.import_on(ranks, "lightning")


def trainer_and_model(folder, epochs, strategy=None, **options):
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from gradwire.integrate.lightning import GradwireStrategy

    example = trainers.example("lightning_trainer")
    torch.manual_seed(0)
    trainer = Trainer(
        strategy=strategy or GradwireStrategy(density=0.01),
        accelerator="cpu",
        devices=2,
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(folder, **options)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return trainer, example["Regression"](), example["data"]()


def residual(wire):
    return torch.cat([wire.residual(s.name).flatten() for b in wire.bundles for s in b.slots])


def fits_twice(rank, folder):
    """A second fit of the model goes on with its residual; one of another model starts at zero."""
    with trainers.launched(rank):
        trainer, model, data = trainer_and_model(folder, 1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        trainer.strategy.precision_plugin.scaler = scaler
        trainer.fit(model, data)
        first = trainer.strategy.wire
        assert first.scaler is scaler
        trainer.save_checkpoint(f"{folder}/after.ckpt")  # the wire is closed by now
        before = residual(first)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, data)
        second = trainer.strategy.wire
        _, other, _ = trainer_and_model(folder, 1)
        trainer.fit_loop.max_epochs = 3
        trainer.fit(other, data)
        third = trainer.strategy.wire
        return float(before.norm()), first.steps, second.steps, third.steps


def test_a_second_fit_goes_on(ranks, tmp_path):
    for norm, first, second, third in ranks.run(2, fits_twice, str(tmp_path)):
        assert norm > 0
        assert (first, second) == (8, 16), "the second wire counts on"
        assert third == 8, "another model has a wire of its own"
    assert (tmp_path / "after.ckpt.gradwire" / "gradwire.json").is_file()


def decides(rank, folder):
    """Eight steps are enough to choose; a second fit goes on with the choice."""
    from gradwire.integrate.lightning import GradwireStrategy

    with trainers.launched(rank):
        strategy = GradwireStrategy(method="auto", min_density=0.05)
        trainer, model, data = trainer_and_model(folder, 1, strategy, save_top_k=0)
        trainer.fit(model, data)
        first = strategy.wire
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, data)
        return [(w.config.asdict(), w.reason, w.auto is None) for w in (first, strategy.wire)]


def test_the_method_may_be_chosen(ranks, tmp_path):
    results = ranks.run(2, decides, str(tmp_path))
    assert results[0] == results[1]
    first, second = results[0]
    assert first == second
    assert first[1].startswith("measured: ")
    assert first[2]


def saves(rank, folder):
    """Three epochs, the last checkpoint kept and linked to; weights alone; dense."""
    from lightning.pytorch.strategies import DDPStrategy

    with trainers.launched(rank):
        trainer, model, data = trainer_and_model(f"{folder}/kept", 3, save_last="link")
        trainer.fit(model, data)
        trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
        dense, model, data = trainer_and_model(f"{folder}/dense", 1, DDPStrategy())
        dense.fit(model, data)


def resumes(rank, folder, file):
    """Steps of the wire after one more epoch from `file`, or the refusal; and what was said."""
    with trainers.launched(rank), trainers.Heard() as lines:
        trainer, model, data = trainer_and_model(f"{folder}/more", 4, save_top_k=0)
        refused = trainers.refusal(trainer.fit, model, data, ckpt_path=file)
        wire = trainer.strategy.wire
        wire.close()
        return refused, wire.steps, lines


def test_checkpoints_and_their_folders(ranks, tmp_path):
    ranks.run(2, saves, str(tmp_path))
    kept = tmp_path / "kept"
    names = sorted(p.name for p in kept.iterdir())
    assert names == ["epoch=2-step=24.ckpt", "epoch=2-step=24.ckpt.gradwire", "last.ckpt"]
    assert (kept / "last.ckpt").is_symlink()
    assert not (tmp_path / "weights.ckpt.gradwire").exists()

    def resume(file):
        return ranks.run(2, resumes, str(tmp_path), str(file))[0]

    assert resume(kept / "last.ckpt")[:2] == ("no error", 32)
    (dense,) = (tmp_path / "dense").iterdir()
    refused, steps, lines = resume(dense)
    assert (refused, steps) == ("no error", 24)
    assert any("written without gradwire: residuals start at zero" in line for line in lines)

    folder = kept / "epoch=2-step=24.ckpt.gradwire"
    shutil.rmtree(folder)
    refused = resume(kept / "last.ckpt")[0]
    assert refused.startswith("StateError")
    assert "copy this folder with the file" in refused


class Later:
    steps = 32


def refuses(rank):
    from gradwire.integrate import lightning

    strategy = lightning.GradwireStrategy(density=0.01)
    strategy._steps = 24
    lightning.load, load = (lambda wire, folder: None), lightning.load
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.ckpt"
        Path(f"{file}.gradwire").mkdir()
        Path(f"{file}.gradwire/gradwire.json").touch()
        late = trainers.refusal(strategy._resume, Later(), file)
    lightning.load = load
    make = lightning.GradwireStrategy
    return [
        late,
        trainers.refusal(lightning._folder, "s3://bucket/last.ckpt"),
        trainers.refusal(make, "topk"),
        trainers.refusal(make, density=2),
        trainers.refusal(make, method="auto", min_density=2),
        trainers.refusal(make, find_unused_parameters=True),
        trainers.refusal(make, ddp="find_unused_parameters"),
        trainers.refusal(make, ddp={"ddp_comm_hook": print}),
    ]


def test_wrong_folders_and_arguments_are_refused(ranks):
    (texts,) = ranks.run(1, refuses)
    late, remote, config, density, bound, place, ddp, hook = texts
    assert late.startswith("StateError")
    assert "x.ckpt is of step 24 and" in late
    assert "x.ckpt.gradwire of step 32" in late
    assert "needs a local or mounted folder" in remote
    assert config == "ConfigError: config must be a gradwire.Config, got str"
    assert density.startswith("ConfigError: density must be in")
    assert bound.startswith("ConfigError: min_density must be in")
    assert "GradwireStrategy(..., ddp={'find_unused_parameters': True})" in place
    assert "ddp must be a dict of options of DDPStrategy, got str" in ddp
    assert "DDP takes one hook, which is gradwire's" in hook
