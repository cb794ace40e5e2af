"""A language model over slow links with the Transformers Trainer: Muon inside, rounds of 5 steps.

torchrun --nproc-per-node 2 examples/transformers_local_steps.py
  and on from there: --resume runs/local/checkpoint-8 --steps 16
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from gradwire.integrate.transformers import local_steps


def data():
    """Sixty-four texts of sixteen letters, each letter the one after the last."""
    texts = (torch.arange(64)[:, None] + torch.arange(16)) % 32
    return [{"input_ids": text, "labels": text} for text in texts]


def main(folder="runs/local", steps=8, resume=None):
    set_seed(0)
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
        save_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        weight_decay=0.1,
        lr_scheduler_type="constant",
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data())
    callback = local_steps(trainer, recipe="muon")  # this line
    trainer.train(resume_from_checkpoint=resume)

    stats = callback.local.stats()
    if trainer.is_world_process_zero():
        share = stats.bytes_sent / max(1, stats.bytes_dense)
        print(f"sent {stats.bytes_sent:,} bytes, {share:.1%} of what a dense all-reduce sends")
    callback.local.close()
    return trainer.model, stats


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="runs/local")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--resume")
    main(**vars(parser.parse_args()))
