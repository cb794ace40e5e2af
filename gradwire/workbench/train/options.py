"""Options of a training run, kept in config.json of the run folder."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from gradwire.config import Config
from gradwire.errors import ConfigError, unknown
from gradwire.optim import muon
from gradwire.recipes import LOCAL_RECIPES, RECIPES, Recipe, find_local_recipe, find_recipe
from gradwire.registry import options_of, parse_options, resolve_names
from gradwire.workbench import models
from gradwire.workbench.data import EMBEDDED, READERS
from gradwire.workbench.train.flag import (
    COMPRESSION,
    FOLDER,
    TRAINING,
    WORKERS,
    Flag,
    default_text,
)
from gradwire.workbench.train.task import TASKS, TrainTask

_OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon"}
_MUON_RATE = 4.0
"""Muon's usual learning rate over AdamW's (`gradwire study language`)."""
_WARM_UP = 0.1
_NO_RECIPE = Recipe("", {})
_UNION = RECIPES["plain-union"]


def _defaults_of_models(field: str) -> str:
    """Return in words the value of a field for each model, on its own and on embedded data."""
    values = []
    for name in models.TRAINABLE:
        spec = models.model_spec(name)
        values.append(f"{name} {getattr(spec, field):g} / {getattr(spec.embedded, field):g}")
    return f"the model's, on its own data / on embedded data ({', '.join(values)})"


def _exceptions(field: str) -> str:
    """Return in words the models whose value of a field is unusual, and the usual value."""
    usual = getattr(models.ModelSpec, field)
    values = {name: getattr(models.model_spec(name), field) for name in models.TRAINABLE}
    others = [f"{name} {default_text(value)}" for name, value in values.items() if value != usual]
    return f"{', '.join(others)}, others {default_text(usual)}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """All settings that the numbers of a run depend on.

    `resolve` fills in the defaults of the model. Give lr, momentum and weight_decay as for a dense
    run; a `recipe` rescales them. The names are those of the flags and of config.json.
    """

    model: Annotated[
        str, Flag(TRAINING, f"The network: {', '.join(models.TRAINABLE)}.", short="-m")
    ] = "lenet5"
    data: Annotated[
        str,
        Flag(TRAINING, f"The data set in --data-dir: {', '.join(READERS)}.", default="the model's"),
    ] = ""
    data_dir: Annotated[
        str | None,
        Flag(
            TRAINING,
            "The folder of the model's own data set in the usual files. Without a folder the data "
            "are embedded: 5,000 digits, novels for the GPTs of bytes, or made-up phrases and "
            "tones. Networks for text and speech are then small.",
            path=True,
        ),
    ] = None
    epochs: Annotated[
        int,
        Flag(
            TRAINING,
            "Passes over the training set.",
            short="-e",
            default=_defaults_of_models("epochs"),
        ),
    ]
    batch: Annotated[
        int,
        Flag(
            TRAINING,
            "Examples per step and worker.",
            short="-b",
            default=_defaults_of_models("batch"),
        ),
    ]
    lr: Annotated[float, Flag(TRAINING, "The learning rate.", default=_defaults_of_models("lr"))]
    lr_drop: Annotated[
        tuple[int, ...],
        Flag(
            TRAINING,
            "Divide the learning rate by ten after each of these epochs.",
            metavar="EPOCH,...",
        ),
    ] = ()
    cosine: Annotated[
        bool,
        Flag(
            TRAINING,
            "Warm the learning rate up over a tenth of the run, then let it fall to 0 like a "
            "cosine. GPTs of bytes do so without --lr-drop.",
        ),
    ] = False
    optimizer: Annotated[
        str,
        Flag(
            TRAINING,
            f"{', '.join(_OPTIMIZERS)}. Muon is for hidden matrices, with AdamW for the rest "
            "(gradwire.optim.muon).",
            default=f"{_exceptions('optimizer')}; muon with a recipe that is for it",
        ),
    ] = ""
    # Config.momentum is for momentum correction. `momentum_correction` copies this momentum to it.
    momentum: Annotated[
        float,
        Flag(
            TRAINING,
            "SGD's momentum, AdamW's beta1.",
            config=None,
            default=f"{_exceptions('momentum')}; {models.Embedded.momentum:g} on embedded data",
        ),
    ] = 0.9
    beta2: Annotated[float, Flag(TRAINING, "AdamW's second beta.")] = 0.99
    eps: Annotated[float, Flag(TRAINING, "AdamW's epsilon.")] = 1e-8
    nesterov: Annotated[bool, Flag(TRAINING)] = Config.nesterov
    weight_decay: Annotated[
        float,
        Flag(TRAINING, "The optimiser's weight decay.", default=_exceptions("weight_decay")),
    ] = 0.0
    # Config.clip is another thing: it is `local_clip` here, which acts before compression.
    clip: Annotated[
        float,
        Flag(
            TRAINING,
            "The largest norm of the averaged gradient, 0 for any.",
            config=None,
            default=_exceptions("clip"),
        ),
    ] = 0.0
    seed: Annotated[
        int,
        Flag(
            TRAINING,
            "The seed of weights, order of examples and crops. The same seed gives the same "
            "numbers on CPU.",
            short="-s",
        ),
    ] = 0
    recipe: Annotated[
        str,
        Flag(
            COMPRESSION,
            f"Options that were measured together: {', '.join([*RECIPES, *LOCAL_RECIPES])}. Other "
            f"flags win over the recipe. {' and '.join(LOCAL_RECIPES)} exchange weights every few "
            "steps (gradwire.local_steps), with --optimizer muon. Give --lr, --momentum and "
            "--weight-decay as for a dense run. The others "
            f"change them: plain-union has no momentum, {_UNION.lr_scale:g} / "
            f"(1 - momentum) times the learning rate and {_UNION.decay_scale:g} times the weight "
            "decay. plain-union needs batch norm and --cosine.",
        ),
    ] = ""
    method: Annotated[str, Flag(COMPRESSION, "See `gradwire methods`.")] = Config.method
    options: Annotated[
        tuple[str, ...],
        Flag(
            COMPRESSION,
            "May be repeated.",
            metavar="NAME=VALUE",
            former=("option", "method_options"),
        ),
    ] = ()
    density: Annotated[float, Flag(COMPRESSION, short="-d")] = Config.density
    exchange: Annotated[str, Flag(COMPRESSION)] = Config.exchange
    values: Annotated[str, Flag(COMPRESSION)] = Config.values
    indices: Annotated[str, Flag(COMPRESSION)] = Config.indices
    rounding: Annotated[str, Flag(COMPRESSION)] = Config.rounding
    dense_steps: Annotated[int, Flag(COMPRESSION)] = Config.dense_steps
    warmup: Annotated[tuple[float, ...], Flag(COMPRESSION, metavar="DENSITY,...")] = Config.warmup
    warmup_steps: Annotated[int, Flag(COMPRESSION)] = Config.warmup_steps
    momentum_correction: Annotated[
        bool,
        Flag(
            COMPRESSION,
            "Apply --momentum to the gradients of each worker before compression (Deep Gradient "
            "Compression), and no momentum in the optimiser. SGD's weight decay is then "
            "--weight-decay / (1 - momentum), as SGD's own momentum would have made it.",
        ),
    ] = False
    masking: Annotated[bool, Flag(COMPRESSION)] = Config.masking
    # Not `clip`, as in Config: here `clip` limits the averaged gradient.
    local_clip: Annotated[float, Flag(COMPRESSION, config="clip")] = Config.clip
    follow_lr: Annotated[
        bool,
        Flag(
            COMPRESSION,
            "Count a residual with the learning rate of its own step, not of the step that sends "
            "it. With --cosine: the rising learning rate would otherwise multiply the residual.",
        ),
    ] = False
    dense: Annotated[
        tuple[str, ...],
        Flag(COMPRESSION, "May be repeated.", metavar="PATTERN", former=("keep_dense",)),
    ] = Config.dense
    every: Annotated[
        int,
        Flag(
            COMPRESSION,
            "Steps of a round, for the recipes that exchange weights.",
            default="the recipe's",
        ),
    ] = 0
    compare: Annotated[
        tuple[str, ...],
        Flag(
            COMPRESSION,
            "Train this method too, with the same seed, and report both. The usual one is dense. "
            "dense-adamw, dense-muon and dense-sgd also name the optimiser, at its own usual "
            "learning rate unless --lr was given. May be repeated.",
            metavar="METHOD",
        ),
    ] = ()
    workers: Annotated[
        int,
        Flag(
            WORKERS,
            "Processes to start on this machine. Under torchrun the ranks are the workers.",
            short="-w",
            default="one per GPU, or 2 on CPU",
        ),
    ]
    device: Annotated[str, Flag(WORKERS, "cpu (Gloo), cuda (NCCL), or auto.", default="auto")] = (
        "cpu"
    )
    log_every: Annotated[int, Flag(FOLDER, "Steps between lines in metrics.jsonl.")] = 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", self._data())
        optimizer = self.optimizer or models.model_spec(self.model).optimizer
        object.__setattr__(self, "optimizer", optimizer)
        config = self.config()
        for name in ("method", "exchange"):
            object.__setattr__(self, name, getattr(config, name))
        for name in ("workers", "epochs", "batch", "log_every"):
            _check_range(name, getattr(self, name), at_least=1)
        for name in ("weight_decay", "momentum", "clip", "local_clip", "seed"):
            _check_range(name, getattr(self, name), at_least=0)
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"lr must be above 0, got {self.lr}.")
        if self.momentum >= 1:
            raise ConfigError(f"momentum must be in [0, 1), got {self.momentum}.")
        self._check_optimizer()
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov needs a momentum above 0, got 0.")
        if not self.masking and not self.momentum_correction:
            raise ConfigError("masking can only be left out with momentum_correction.")
        if list(self.lr_drop) != sorted(set(self.lr_drop)) or min(self.lr_drop, default=1) < 1:
            raise ConfigError(f"lr_drop must be rising epochs from 1 on, got {self.lr_drop}.")
        self._check_rounds()
        if self.lr_drop and self.cosine:
            raise ConfigError("the learning rate has one schedule: lr_drop or cosine, not both.")
        if self.device not in ("cpu", "cuda"):
            raise unknown("device", self.device, ("cpu", "cuda"))
        for name in self.compare:
            self.with_method(name)

    def config(self, epoch_steps: int = 1) -> Config:
        """Return the Config for `gradwire.attach`.

        epoch_steps: the steps of an epoch. The warm-up of a recipe has an epoch at each density.
        """
        steps = self.warmup_steps
        if self.recipe and self.warmup and not steps:
            steps = epoch_steps
        decay = LOCAL_RECIPES[self.recipe].fields.get("decay", 1.0) if self.has_rounds else 1.0
        return Config(
            method=self.method,
            decay=decay,
            options=parse_options(self.options, self.method, self.exchange),
            exchange=self.exchange,
            density=self.density,
            values=self.values,
            indices=self.indices,
            rounding=self.rounding,
            dense=self.dense,
            dense_steps=self.dense_steps,
            warmup=self.warmup,
            warmup_steps=steps,
            clip=self.local_clip,
            **(self._momentum | {"masking": self.masking} if self.momentum_correction else {}),
        )

    @property
    def has_rounds(self) -> bool:
        """True: workers exchange weights every few steps, by `gradwire.local_steps`."""
        return self.recipe in LOCAL_RECIPES

    def rounds(self) -> dict[str, Any]:
        """Return the arguments for `gradwire.local_steps`."""
        config = self.config()
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        return {"recipe": self.recipe, "every": self.every, **fields}

    def _check_rounds(self) -> None:
        """Raise ConfigError for settings that contradict a recipe with rounds, or need one."""
        names = " or ".join(LOCAL_RECIPES)
        if not self.has_rounds:
            if self.every:
                raise ConfigError(f"every is for a recipe with rounds: give recipe {names} too.")
            return
        _check_range("every", self.every, at_least=1)
        for name in ("momentum_correction", "follow_lr", "local_clip"):
            if getattr(self, name):
                raise ConfigError(
                    f"recipe {self.recipe!r} exchanges weights, not gradients: leave {name} out."
                )

    @property
    def _recipe(self) -> Recipe:
        return find_recipe(self.recipe) if self.recipe and not self.has_rounds else _NO_RECIPE

    @property
    def _momentum(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov}

    def _check_optimizer(self) -> None:
        if self.optimizer not in _OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, _OPTIMIZERS)
        if not 0 <= self.beta2 < 1:
            raise ConfigError(f"beta2 must be in [0, 1), got {self.beta2}.")
        if not 0 < self.eps < math.inf:
            raise ConfigError(f"eps must be above 0, got {self.eps}.")
        if self.nesterov and self.optimizer != "sgd" and not self.momentum_correction:
            raise ConfigError("nesterov is for optimizer sgd, or with momentum_correction.")
        if self._recipe.without_momentum and self.optimizer != "sgd":
            raise ConfigError(f"recipe {self.recipe!r} is for optimizer sgd: it has no momentum.")
        if self._recipe.without_momentum and (self.nesterov or self.momentum_correction):
            raise ConfigError(
                f"recipe {self.recipe!r} has no momentum: leave nesterov and momentum_correction "
                f"out."
            )

    def optimizer_for(self, model: nn.Module) -> Optimizer:
        """Return the optimiser of a model. Muon has to know the names of its parameters."""
        if self.optimizer != "muon":
            return self.make_optimizer(model.parameters())
        betas = (self.momentum, self.beta2)
        return muon(model, self.lr_at(0), self.weight_decay, betas=betas, eps=self.eps)

    def make_optimizer(self, parameters: Iterable[Tensor]) -> Optimizer:
        """Return SGD or AdamW, without momentum (beta1 = 0) if the gradients already have it."""
        lr, corrected = self.lr_at(0), self.momentum_correction
        decay = self.weight_decay * self._recipe.decay_scale
        if self._recipe.without_momentum:
            return SGD(parameters, lr, weight_decay=decay)
        if self.optimizer == "sgd" and corrected:
            # SGD's momentum would multiply the decay by 1 / (1 - momentum) in the long run.
            return SGD(parameters, lr, weight_decay=decay / (1 - self.momentum))
        if self.optimizer == "sgd":
            return SGD(parameters, lr, weight_decay=decay, **self._momentum)
        betas = (0.0 if corrected else self.momentum, self.beta2)
        fused = self.device == "cuda"
        return AdamW(parameters, lr, betas, self.eps, decay, fused=fused)

    def with_method(self, name: str) -> "Options":
        """Return the same run with another "method", "method/exchange" or "dense-adamw".

        Options that the other method does not have are left out. For dense, settings that only
        compression uses get their defaults.
        """
        first, _, optimizer = name.partition("-")
        if first == "dense" and optimizer in _OPTIMIZERS:
            return self.with_method(first)._with_optimizer(optimizer)
        other: dict[str, Any] = {"method": name, "exchange": "", "compare": ()}
        method, exchange = resolve_names(name)
        known = options_of(method, exchange) if method == self.method else {}
        other["options"] = tuple(text for text in self.options if text.partition("=")[0] in known)
        if name.partition("/")[0] == "dense":
            other |= {"values": "fp32", "rounding": "nearest"}
            other |= {"dense_steps": 0, "warmup": (), "warmup_steps": 0}
            other |= {"momentum_correction": False, "masking": True, "local_clip": 0.0}
            other |= {"recipe": "", "follow_lr": False, "every": 0}
        elif self.has_rounds:
            raise ConfigError(
                f"recipe {self.recipe!r} can only be compared with dense, not {name}."
            )
        return dataclasses.replace(self, **other)

    def _with_optimizer(self, name: str) -> "Options":
        """Return the same run with another optimiser, at its usual rate if this has its own."""
        lr = self.lr
        if lr == usual_lr(self.model, self.embedded, self.optimizer):
            lr = usual_lr(self.model, self.embedded, name)
        return dataclasses.replace(self, optimizer=name, lr=lr)

    def _data(self) -> str:
        """Return the named data set; otherwise the model's own with data_dir, embedded without."""
        spec = models.model_spec(self.model)
        if not spec.embedded:
            raise ConfigError(
                f"model {self.model!r} is here for its size: there is no reader of its data. "
                f"Models that train: {', '.join(models.TRAINABLE)}."
            )
        known = (*spec.data, spec.embedded.data)
        if self.data and self.data not in known:
            raise unknown(f"data set of {self.model}", self.data, known)
        return self.data or (spec.data[0] if self.data_dir else spec.embedded.data)

    @property
    def embedded(self) -> bool:
        """True: the data need no files."""
        return self.data in EMBEDDED

    @property
    def task(self) -> TrainTask:
        """The loss and the score of the model."""
        return TASKS[models.model_spec(self.model).task]

    @property
    def size(self) -> Mapping[str, Any]:
        """Keywords that make the network small for embedded data."""
        spec = models.model_spec(self.model)
        return spec.embedded.size if self.embedded and spec.embedded else {}

    @property
    def title(self) -> str:
        """The run in a few words, e.g. "topk/allgather at 1 %"."""
        if self.has_rounds:
            return f"{self.recipe}, {_OPTIMIZERS[self.optimizer]} inside rounds of {self.every}"
        if self.method == "dense":
            # SGD is what dense training has always been compared with here.
            return "dense" if self.optimizer == "sgd" else f"dense {_OPTIMIZERS[self.optimizer]}"
        usual = ("fp32", "int32", "nearest")
        codes = [c for c in (self.values, self.indices, self.rounding) if c not in usual]
        codes += ["momentum correction"] * self.momentum_correction
        codes += [self.recipe] if self.recipe else []
        return ", ".join([f"{self.method}/{self.exchange} at {100 * self.density:g} %", *codes])

    def lr_at(self, epoch: float) -> float:
        """Return the learning rate at `epoch`, which may be a fraction.

        Each epoch of `lr_drop` divides the learning rate by ten. With `cosine` it follows
        `cosine_factor`.
        """
        peak = self.lr * self._recipe.lr_factor(self.momentum)
        if self.cosine:
            return peak * cosine_factor(epoch / self.epochs)
        return peak * 0.1 ** sum(epoch >= drop for drop in self.lr_drop)

    def asdict(self) -> dict[str, Any]:
        """Return the options as plain JSON values."""
        return {
            k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()
        }


def resolve(choices: Mapping[str, Any], workers: int | None = None) -> Options:
    """Return options with the defaults of the recipe and of the model.

    choices: the values that the user has chosen; None stands for no choice.
    workers: the number of ranks that torchrun has started. Without torchrun the default is one
    worker per GPU, or 2 on CPU.
    """
    chosen = {k: v for k, v in choices.items() if v is not None}
    spec = models.model_spec(chosen.get("model", Options.model))
    is_local = chosen.get("recipe", "") in LOCAL_RECIPES
    chosen["device"] = pick_device(chosen.get("device", "auto"))
    gpus = torch.cuda.device_count() if chosen["device"] == "cuda" else 0
    if workers and chosen.get("workers", workers) != workers:
        raise ConfigError(
            f"--workers {chosen['workers']}, but torchrun started {workers} ranks. "
            f"Leave --workers out."
        )
    files = chosen.get("data_dir") or chosen.get("data", "") in spec.data
    source = spec if files or not spec.embedded else spec.embedded
    usual = {name: getattr(source, name) for name in ("epochs", "batch", "momentum")}
    usual |= {"workers": workers or gpus or 2, "clip": spec.clip}
    usual |= {"weight_decay": spec.weight_decay, "cosine": spec.cosine and "lr_drop" not in chosen}
    usual["optimizer"] = "muon" if is_local else spec.optimizer
    optimizer = chosen.get("optimizer") or usual["optimizer"]
    usual["lr"] = usual_lr(spec.name, source is spec.embedded, optimizer)
    if is_local:
        recipe = find_local_recipe(chosen["recipe"])
        names = {field.name for field in dataclasses.fields(Options)}
        fields = recipe.fields_without(chosen)
        usual |= {name: value for name, value in fields.items() if name in names}
        usual["options"] = tuple(f"{k}={v}" for k, v in fields.get("options", {}).items())
    elif chosen.get("recipe"):
        recipe = find_recipe(chosen["recipe"])
        usual |= recipe.fields_without(chosen)
        usual["momentum_correction"] = "momentum" in recipe.fields
    return Options(**(usual | chosen))


def usual_lr(model: str, embedded: bool, optimizer: str) -> float:
    """Return the learning rate of a model for an optimiser, where nobody has chosen one."""
    spec = models.model_spec(model)
    source = spec.embedded if embedded and spec.embedded else spec
    if optimizer != "muon" or spec.optimizer != "adamw":
        return source.lr
    return getattr(source, "muon_lr", 0.0) or source.lr * _MUON_RATE


def cosine_factor(done: float) -> float:
    """Return the factor on the learning rate after the part `done` (0 to 1) of a run.

    The factor rises over the first tenth of the run, then falls to 0 like a cosine.
    """
    if done < _WARM_UP:
        # Not 0: the first step would do nothing.
        return max(done / _WARM_UP, 0.01)
    return 0.5 * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP)))


def pick_device(name: str) -> str:
    """Return "cpu" or "cuda" for the name of a device; "auto" is CUDA if torch sees a GPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device 'cuda': this torch sees no GPU. Start a run with --device cpu.")
    if name not in ("cpu", "cuda"):
        raise unknown("device", name, ("auto", "cpu", "cuda"))
    return name


def _check_range(name: str, value: float, at_least: int) -> None:
    if not at_least <= value < math.inf:
        raise ConfigError(f"{name} must be at least {at_least}, got {value}.")
