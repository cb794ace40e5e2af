"""Lightning with gradwire: one argument of the Trainer differs. On CPUs here, on GPUs just so.

torchrun --nproc-per-node 2 examples/lightning_trainer.py
  and on from there: --resume runs/lightning/last.ckpt --epochs 8
"""

import argparse
import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire.integrate.lightning import GradwireStrategy


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 1))

    def training_step(self, batch, _):
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def data():
    x = torch.randn(256, 100, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :5].sum(1, keepdim=True)), batch_size=16)


def main(folder="runs/lightning", epochs=4, resume=None):
    seed_everything(0)
    model = Regression()
    trainer = Trainer(
        strategy=GradwireStrategy(method="topk", density=0.01),  # this line
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices="auto" if torch.cuda.is_available() else 2,
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),  # torchrun's machines
        max_epochs=epochs,
        accumulate_grad_batches=2,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data(), ckpt_path=resume)
    stats = trainer.strategy.wire.stats()
    if trainer.is_global_zero:
        share = stats.bytes_sent / max(1, stats.bytes_dense)
        print(f"sent {stats.bytes_sent:,} bytes, {share:.1%} of what a dense all-reduce sends")
    return model, stats


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="runs/lightning")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--resume")
    main(**vars(parser.parse_args()))
