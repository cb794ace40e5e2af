"""The Transformers Trainer: trained twice, checkpoints with and without, what is refused."""

import shutil

import pytest
import torch

from tests.integrate import trainers


@pytest.fixture(autouse=True)
def _imported(ranks):
    trainers.import_on(ranks, "transformers")


def trainer_of(folder, steps=2, **options):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    data = trainers.example("transformers_trainer")["data"]()
    return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)


def runs(rank, folder):
    from gradwire.integrate.transformers import attach

    with trainers.launched(rank), trainers.Heard() as lines:
        trainer_of(f"{folder}/dense").train()
        trainer = trainer_of(folder)
        callback = attach(trainer, density=0.01)
        twice = trainers.refusal(attach, trainer, density=0.01)
        trainer.train()
        wire = callback.wire
        trainer.train()  # the wrapped model stays, and so does the wire
        again = callback.wire is wire and wire.steps
        mixed = trainers.refusal(trainer.train, f"{folder}/dense/checkpoint-2")
        wire.close()

        trainer = trainer_of(folder, 3, save_only_model=True)
        from_dense = attach(trainer, density=0.01)
        trainer.train(f"{folder}/dense/checkpoint-2")
        from_dense.wire.close()
        if rank == 0:
            shutil.rmtree(f"{folder}/checkpoint-2/gradwire")
        trainer = trainer_of(folder, 4)
        broken = attach(trainer, density=0.01)
        gone = trainers.refusal(trainer.train, f"{folder}/checkpoint-2")
        broken.wire.close()
        return twice, again, mixed, lines, from_dense.wire.steps, gone


def test_trained_twice_and_checkpoints_that_do_not_fit(ranks, tmp_path):
    for twice, again, mixed, lines, steps, gone in ranks.run(2, runs, str(tmp_path)):
        assert "has a GradwireCallback already: attach once" in twice
        assert again == 4
        assert "this Trainer has residuals of 4 steps: make a new Trainer" in mixed
        assert any("written without gradwire: residuals start at zero" in x for x in lines)
        assert steps == 1
        assert gone.startswith("StateError")
        assert "resume from an older checkpoint" in gone
    assert not (tmp_path / "checkpoint-3" / "gradwire").exists(), "save_only_model"


def scales(rank, folder):
    from gradwire.integrate.transformers import attach

    with trainers.launched(rank):
        trainer = trainer_of(folder, 1, save_strategy="no")
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
        callback = attach(trainer, density=0.01)
        trainer.train()
        callback.wire.close()
        return callback.wire.scaler is trainer.accelerator.scaler


def test_the_scaler_is_passed_on(ranks, tmp_path):
    assert all(ranks.run(2, scales, str(tmp_path)))


def decides(rank, folder):
    from gradwire.integrate.transformers import attach

    with trainers.launched(rank):
        trainer = trainer_of(folder, 9, save_strategy="no")
        callback = attach(trainer, method="auto", min_density=0.05)
        trainer.train()
        wire = callback.wire
        wire.close()
        return wire.config.asdict(), wire.reason, wire.auto is None


def test_the_method_may_be_chosen(ranks, tmp_path):
    first, second = ranks.run(2, decides, str(tmp_path))
    assert first == second
    assert first[1].startswith("measured: ")
    assert first[2]


def refuses(rank, folder):
    from gradwire.integrate.transformers import attach

    with trainers.launched(rank):
        trainer = trainer_of(folder)
        texts = [trainers.refusal(attach, trainer.model), trainers.refusal(attach, trainer)]
        trainer.is_fsdp_enabled = True
        return [*texts, trainers.refusal(attach, trainer)]


def test_wrong_objects_are_refused(ranks, tmp_path):
    (texts,) = ranks.run(1, refuses, str(tmp_path))
    model, alone, fsdp = texts
    assert "attach needs a transformers.Trainer, got GPT2LMHeadModel" in model
    assert "one process here" in alone
    assert "uses FSDP, attach needs DistributedDataParallel" in fsdp
