"""`gradwire train`."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from gradwire.errors import ConfigError
from gradwire.workbench.cli import train_options as opt
from gradwire.workbench.cli.outcome import conduct
from gradwire.workbench.cli.say import complain
from gradwire.workbench.train import Plan, Sitting, program

EXAMPLES = """Examples:

  gradwire train --model lenet5 --density 0.01 --workers 4 --compare dense

  gradwire train --model resnet20 --data-dir ~/data --method topk --density 0.001 --lr-drop 80,120

  gradwire train --model resnet20 --data-dir ~/data --recipe plain-union --cosine --compare dense

  torchrun --nproc-per-node=8 -m gradwire train --model resnet20 --data-dir ~/data --out runs/a

  gradwire train --resume runs/a
"""


def train(
    model: opt.Model = None,
    data: opt.Data = None,
    data_dir: opt.DataDir = None,
    epochs: opt.Epochs = None,
    batch: opt.Batch = None,
    lr: opt.Lr = None,
    lr_drop: opt.LrDrop = None,
    cosine: opt.Cosine = None,
    optimizer: opt.Optimizer = None,
    momentum: opt.Momentum = None,
    beta2: opt.Beta2 = None,
    eps: opt.Eps = None,
    nesterov: opt.Nesterov = None,
    weight_decay: opt.WeightDecay = None,
    clip: opt.Clip = None,
    seed: opt.Seed = None,
    recipe: opt.Recipe = None,
    method: opt.Method = None,
    method_options: opt.MethodOptions = None,
    density: opt.Density = None,
    exchange: opt.Exchange = None,
    values: opt.Values = None,
    indices: opt.Indices = None,
    rounding: opt.Rounding = None,
    dense_steps: opt.DenseSteps = None,
    warmup: opt.Warmup = None,
    warmup_steps: opt.WarmupSteps = None,
    momentum_correction: opt.MomentumCorrection = None,
    masking: opt.Masking = None,
    local_clip: opt.LocalClip = None,
    follow_lr: opt.FollowLr = None,
    keep_dense: opt.KeepDense = None,
    compare: opt.Compare = None,
    workers: opt.Workers = None,
    device: opt.Device = None,
    out: opt.Out = None,
    overwrite: opt.Overwrite = False,
    resume: opt.Resume = None,
    max_steps: opt.MaxSteps = None,
    checkpoint_every: opt.CheckpointEvery = None,
    record_gradients: opt.RecordGradients = None,
    log_every: opt.LogEvery = None,
    quiet: opt.Quiet = False,
) -> None:
    """Train a model on P workers with compressed gradients, and write a report.

    Alone it starts its own workers; under torchrun it uses the ranks it is given; on CUDA it uses
    NCCL. Ctrl-C or SIGTERM saves a checkpoint, shows the command that goes on from there, bit for
    bit, and exits with code 130.
    """
    given: dict[str, Any] = {
        "model": model, "data": data, "data_dir": _absolute(data_dir), "epochs": epochs,
        "batch": batch, "lr": lr, "lr_drop": _numbers("--lr-drop", lr_drop, int),
        "cosine": cosine, "recipe": recipe, "follow_lr": follow_lr,
        "optimizer": optimizer, "beta2": beta2, "eps": eps,
        "momentum": momentum, "nesterov": nesterov, "momentum_correction": momentum_correction,
        "masking": masking, "clip": clip, "local_clip": local_clip, "weight_decay": weight_decay,
        "seed": seed, "method": method, "density": density, "exchange": exchange, "values": values,
        "indices": indices, "rounding": rounding, "dense_steps": dense_steps,
        "method_options": tuple(method_options or ()) or None, "warmup_steps": warmup_steps,
        "warmup": _numbers("--warmup", warmup, float),
        "keep_dense": tuple(keep_dense or ()) or None, "compare": tuple(compare or ()) or None,
        "workers": workers, "device": device, "log_every": log_every,
    }  # fmt: skip
    sitting = Sitting(max_steps, checkpoint_every, record_gradients, quiet)
    command = f"{program()} {shlex.join(sys.argv[1:])}"
    try:
        code = conduct(_plan(given, out, overwrite, resume, sitting=sitting, command=command))
    except KeyboardInterrupt:
        complain("stopped at once; the last checkpoint is what remains.")
        code = 130
    if code:
        raise typer.Exit(code)


def _plan(
    given: dict[str, Any], out: Path | None, overwrite: bool, resume: Path | None, **rest: Any
) -> Plan:
    """What was asked for."""
    if resume is None:
        return Plan.new(given, out, overwrite=overwrite, **rest)
    if out is not None or overwrite:
        raise ConfigError("--resume goes on in its own folder: leave --out and --overwrite out.")
    return Plan.resume(resume, given, **rest)


def _absolute(folder: Path | None) -> str | None:
    """The folder's name as it is good from anywhere, for config.json."""
    return str(folder.expanduser().absolute()) if folder else None


def _numbers(name: str, text: str | None, kind: Callable[[str], float]) -> tuple[float, ...] | None:
    """The numbers in a comma-separated option."""
    if text is None:
        return None
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{name} takes numbers with commas between, got {text!r}.") from None
