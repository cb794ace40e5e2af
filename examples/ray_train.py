"""Ray Train with gradwire: `prepare_model` makes a DDP model, and gradwire attaches to it.

python examples/ray_train.py
  and on from there: --epochs 8
"""

import argparse
import os
import tempfile

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch import nn

import gradwire


def train(config):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(100, 300), nn.ReLU(), nn.Linear(300, 1))
    model = prepare_model(net)
    wire = gradwire.attach(model, method="topk", density=0.01)  # this line
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    start = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(os.path.join(folder, "model.pt"), weights_only=True)
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            gradwire.load(wire, os.path.join(folder, "gradwire"))
            start = saved["epoch"]

    rank = ray.train.get_context().get_world_rank()
    for epoch in range(start, config["epochs"]):
        for step in range(8):
            generator = torch.Generator().manual_seed(1000 * epoch + 10 * step + rank)
            x = torch.randn(16, 100, generator=generator).to(get_device())
            loss = (model(x) - x[:, :5].sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        stats = wire.stats()
        metrics = {"bytes_sent": stats.bytes_sent, "bytes_dense": stats.bytes_dense}
        metrics |= {"loss": loss.item(), "residual_norm": stats.residual_norm}
        with tempfile.TemporaryDirectory() as folder:
            # Ray merges the folders of all workers into one checkpoint.
            gradwire.save(wire, os.path.join(folder, "gradwire"))
            if rank == 0:
                saved = {
                    "model": model.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epoch": epoch + 1,
                }
                torch.save(saved, os.path.join(folder, "model.pt"))
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))
    wire.close()


def main(epochs=4, folder="runs/ray"):
    """A run of the same folder goes on from its last checkpoint."""
    place, name = os.path.split(os.path.abspath(folder))
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": epochs},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=place, name=name),
    )
    return trainer.fit().metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default="runs/ray")
    parser.add_argument("--epochs", type=int, default=4)
    metrics = main(**vars(parser.parse_args()))
    share = metrics["bytes_sent"] / metrics["bytes_dense"]
    print(f"sent {metrics['bytes_sent']:,} bytes, {share:.1%} of what a dense all-reduce sends")
