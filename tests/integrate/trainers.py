"""The examples of the trainers, run by the ranks of the pool as torchrun would run them."""

import contextlib
import gc
import importlib
import logging
import os
import runpy
import sys
import types
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextlib.contextmanager
def launched(rank):
    """What torchrun sets, and what the trainers keep between runs put back.

    Ranks that share a GPU are the only ones of their machines, as NCCL is told too.
    """
    world = str(dist.get_world_size())
    place = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0"}
    if dist.get_backend() == "nccl":
        place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
        place["GROUP_WORLD_SIZE"] = world
    settings = place | {
        "RANK": str(rank), "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "test", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    before = dict(os.environ)
    os.environ |= settings
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ |= before
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        gc.collect()


def import_on(ranks, name):
    """Trainers take long to import: that must not count as the ranks hanging."""
    ranks.run(2, _import, f"gradwire.integrate.{name}")


def _import(rank, name):
    importlib.import_module(name)


def example(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def without_ray(rank, epochs, folder=None):
    """The last metrics of Ray's example on plain DDP, from Ray's checkpoint in a folder if given.

    Ray must change none of them.
    """
    reported = []
    names = ("ray", "ray.train", "ray.train.torch")
    ray, train, of_torch = modules = [types.ModuleType(name) for name in names]
    ray.train = train
    train.Checkpoint = types.SimpleNamespace(from_directory=lambda folder: folder)
    train.RunConfig = train.ScalingConfig = of_torch.TorchTrainer = None
    checkpoint = types.SimpleNamespace(as_directory=lambda: contextlib.nullcontext(folder))
    train.get_checkpoint = lambda: checkpoint if folder else None
    train.get_context = lambda: types.SimpleNamespace(get_world_rank=lambda: rank)
    train.report = lambda metrics, checkpoint: reported.append(metrics)
    of_torch.get_device = lambda: torch.device("cpu")
    of_torch.prepare_model = torch.nn.parallel.DistributedDataParallel
    with mock.patch.dict(sys.modules, dict(zip(names, modules, strict=True))):
        script = example("ray_train")
    script["train"]({"epochs": epochs})
    return reported[-1]


def run_example(rank, name, *calls):
    """Weights, bytes sent and dense, residual norm after the last of these calls of main."""
    with launched(rank):
        main = example(name)["main"]
        for call in calls:
            model, stats = main(**call)
        weights = torch.cat([p.detach().reshape(-1).cpu() for p in model.parameters()])
        return weights.numpy().tobytes(), stats.bytes_sent, stats.bytes_dense, stats.residual_norm


class Heard(logging.Handler):
    """What the library says while this is open."""

    def __enter__(self):
        self.lines = []
        logging.getLogger("gradwire").addHandler(self)
        return self.lines

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __exit__(self, *_):
        logging.getLogger("gradwire").removeHandler(self)


def refusal(function, *args, **kwargs):
    """The type and the text of the error that a call ends in."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
