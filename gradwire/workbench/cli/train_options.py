"""The options of `gradwire train`, with what they teach."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.recipes import RECIPES
from gradwire.workbench.data import READERS
from gradwire.workbench.models import MODELS, TRAINABLE
from gradwire.workbench.train.options import OPTIMIZERS, Options

WHAT, HOW, WORK, KEEP = "What to train", "Compression", "Workers", "Run folder"


def recipes(field: str) -> str:
    """The models' values of a field, on their own data and on the embedded, for a help line."""
    values = []
    for name in TRAINABLE:
        spec = MODELS[name]
        values.append(f"{name} {getattr(spec, field):g} / {getattr(spec.embedded, field):g}")
    return f"Default: the model's, on its own data / on the embedded ({', '.join(values)})."


def option(*names: str, panel: str, help: str, default: object = None, **more: Any) -> Any:
    """An option whose default is filled in later; `default` is what the help shows."""
    text = help if default is None else f"{help} Default: {default}."
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, **more)


Model = Annotated[
    str | None,
    option(
        "--model",
        "-m",
        panel=WHAT,
        default=Options.model,
        help=f"The network: {', '.join(TRAINABLE)}.",
    ),
]
DataDir = Annotated[
    Path | None,
    option(
        "--data-dir",
        panel=WHAT,
        help="Folder with the model's own data set in the usual files. Without it: 5,000 embedded "
        "digits, or made-up phrases and tones for the LSTMs, which are then small.",
    ),
]
Data = Annotated[
    str | None,
    option(
        "--data",
        panel=WHAT,
        help=f"The data set in --data-dir: {', '.join(READERS)}. Default: the model's.",
    ),
]
Clip = Annotated[
    float | None,
    option(
        "--clip",
        panel=WHAT,
        help="Largest norm of the averaged gradient, 0 for any. Default: lstm-ptb 0.25, "
        "lstm-an4 400, gpt-nano and gpt-micro 1, others 0.",
    ),
]
Epochs = Annotated[
    int | None,
    option(
        "--epochs",
        "-e",
        panel=WHAT,
        help=f"Passes over the training set. {recipes('epochs')}",
    ),
]
Batch = Annotated[
    int | None,
    option(
        "--batch",
        "-b",
        panel=WHAT,
        help=f"Examples a step and worker. {recipes('batch')}",
    ),
]
Lr = Annotated[
    float | None,
    option(
        "--lr",
        panel=WHAT,
        help=f"Learning rate. {recipes('lr')}",
    ),
]
LrDrop = Annotated[
    str | None,
    option(
        "--lr-drop",
        panel=WHAT,
        metavar="EPOCH,...",
        help="Divide the learning rate by ten after each of these epochs.",
    ),
]
Cosine = Annotated[
    bool | None,
    option(
        "--cosine",
        panel=WHAT,
        help="Warm the learning rate up over a tenth of the run, then let it fall to 0 like a "
        "cosine.",
    ),
]
Optimizer = Annotated[
    str | None,
    option(
        "--optimizer",
        panel=WHAT,
        help=f"{' or '.join(OPTIMIZERS)}. Default: the model's, adamw for gpt-nano and gpt-micro.",
    ),
]
Momentum = Annotated[
    float | None,
    option(
        "--momentum",
        panel=WHAT,
        default=f"{Options.momentum}, and none for lstm-ptb on its own data",
        help="SGD's momentum, AdamW's beta1.",
    ),
]
Beta2 = Annotated[
    float | None,
    option("--beta2", panel=WHAT, default=Options.beta2, help="AdamW's second beta."),
]
Eps = Annotated[
    float | None, option("--eps", panel=WHAT, default=Options.eps, help="AdamW's epsilon.")
]
Nesterov = Annotated[
    bool | None, option("--nesterov", panel=WHAT, help="Nesterov's momentum instead of the usual.")
]
WeightDecay = Annotated[
    float | None,
    option("--weight-decay", panel=WHAT, default=Options.weight_decay, help="The optimiser's."),
]
Seed = Annotated[
    int | None,
    option(
        "--seed",
        "-s",
        panel=WHAT,
        default=Options.seed,
        help="Weights, order of examples, crops: the same seed gives the same numbers on CPU.",
    ),
]
Recipe = Annotated[
    str | None,
    option(
        "--recipe",
        panel=HOW,
        help=f"Options that were measured together: {', '.join(RECIPES)}. What is given beside it "
        "wins. --lr, --momentum and --weight-decay stay those of dense, and what the recipe needs "
        "is made of them: plain-union takes momentum away, goes 1.5 / (1 - momentum) times as "
        "fast and has 3 times the decay; it wants batch norm and --cosine.",
    ),
]
Method = Annotated[
    str | None,
    option(
        "--method",
        panel=HOW,
        default=Options.method,
        help="How a worker chooses what to send, also written method/exchange. "
        "See `gradwire methods`.",
    ),
]
MethodOptions = Annotated[
    list[str] | None,
    option(
        "--option",
        panel=HOW,
        metavar="NAME=VALUE",
        help="An option of the method or the exchange, e.g. shared=false for randk, rows=3 for "
        "gs-sgd. May be repeated.",
    ),
]
Density = Annotated[
    float | None,
    option(
        "--density",
        "-d",
        panel=HOW,
        default=Options.density,
        help="The share of entries a worker sends, in (0, 1].",
    ),
]
Exchange = Annotated[
    str | None,
    option("--exchange", panel=HOW, help="How workers agree. Default: the method's own."),
]
Values = Annotated[
    str | None,
    option(
        "--values",
        panel=HOW,
        default=Options.values,
        help="How values travel: fp32, bf16, fp16, int8, int4 or sign.",
    ),
]
Indices = Annotated[
    str | None,
    option(
        "--indices",
        panel=HOW,
        default=Options.indices,
        help="How indices travel: int32, packed, local16, bitmap, or auto (the smallest).",
    ),
]
Rounding = Annotated[
    str | None,
    option(
        "--rounding",
        panel=HOW,
        default=Options.rounding,
        help="How bf16, int8 and int4 values are rounded: nearest or stochastic.",
    ),
]
DenseSteps = Annotated[
    int | None,
    option(
        "--dense-steps",
        panel=HOW,
        default=Options.dense_steps,
        help="Steps at the start that send everything.",
    ),
]
Warmup = Annotated[
    str | None,
    option(
        "--warmup",
        panel=HOW,
        metavar="DENSITY,...",
        help="Densities to go through before --density; those of Deep Gradient Compression are "
        "0.25,0.0625,0.015625,0.004.",
    ),
]
WarmupSteps = Annotated[
    int | None,
    option(
        "--warmup-steps",
        panel=HOW,
        default=Options.warmup_steps,
        help="Steps at each of the --warmup densities.",
    ),
]
MomentumCorrection = Annotated[
    bool | None,
    option(
        "--momentum-correction",
        panel=HOW,
        help="Apply --momentum to each worker's gradients before they are chosen (Deep Gradient "
        "Compression), and none in the optimiser. SGD's weight decay is then --weight-decay "
        "over 1 - momentum, as much as its own momentum would have made of it.",
    ),
]
Masking = Annotated[
    bool | None,
    option(
        "--masking/--no-masking",
        panel=HOW,
        default="masking",
        help="With --momentum-correction: forget the momentum of what was sent.",
    ),
]
LocalClip = Annotated[
    float | None,
    option(
        "--local-clip",
        panel=HOW,
        help="The most that the L2 norm of the mean gradient should be; each worker clips its own, "
        "before it is compressed, at this / sqrt(workers). Default: never.",
    ),
]
FollowLr = Annotated[
    bool | None,
    option(
        "--follow-lr",
        panel=HOW,
        help="What waits counts with the learning rate of its own step, not of the one that sends "
        "it: with --cosine, whose warm-up otherwise multiplies it.",
    ),
]
KeepDense = Annotated[
    list[str] | None,
    option(
        "--keep-dense",
        panel=HOW,
        metavar="PATTERN",
        help="Parameters that are never compressed, e.g. '*.bias'. May be repeated.",
    ),
]
Compare = Annotated[
    list[str] | None,
    option(
        "--compare",
        panel=HOW,
        metavar="METHOD",
        help="Train this method too, with the same seed, and report both; dense is the usual "
        "one. May be repeated.",
    ),
]
Workers = Annotated[
    int | None,
    option(
        "--workers",
        "-w",
        panel=WORK,
        help="Processes to start on this machine. Default: one a GPU, or 2 on CPU. "
        "Under torchrun, its ranks are used.",
    ),
]
Device = Annotated[
    str | None,
    option("--device", panel=WORK, default="auto", help="cpu (Gloo), cuda (NCCL), or auto."),
]
Out = Annotated[
    Path | None,
    option(
        "--out",
        "-o",
        panel=KEEP,
        help="The run folder. Default: runs/, the model, the method and the time.",
    ),
]
Overwrite = Annotated[
    bool,
    option(
        "--overwrite",
        panel=KEEP,
        help="Replace the run in --out, if there is one.",
    ),
]
Resume = Annotated[
    Path | None,
    option(
        "--resume",
        panel=KEEP,
        help="Go on with the run in this folder. Other options are refused where they differ from "
        "the run's, but for --workers, --epochs and --data-dir.",
    ),
]
MaxSteps = Annotated[
    int | None,
    option(
        "--max-steps",
        panel=KEEP,
        min=1,
        help="Stop after this many steps in all, with a checkpoint.",
    ),
]
CheckpointEvery = Annotated[
    int | None,
    option(
        "--checkpoint-every",
        panel=KEEP,
        min=1,
        help="Steps between checkpoints, besides those at the ends of epochs.",
    ),
]
RecordGradients = Annotated[
    int | None,
    option(
        "--record-gradients",
        panel=KEEP,
        min=1,
        help="Every so many steps write what rank 0 chose from (gradient + residual; of --method "
        "dense the gradient) to gradients/, for bench compress --gradient.",
    ),
]
LogEvery = Annotated[
    int | None,
    option(
        "--log-every",
        panel=KEEP,
        default=Options.log_every,
        help="Steps between lines in metrics.jsonl.",
    ),
]
Quiet = Annotated[bool, option("--quiet", "-q", panel=KEEP, help="No progress.")]
