"""The plan of one sequence: a setup and its operations, drawn from a seed.

An operation holds all that it needs, so that it means the same when those before it are left out.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

DDP, FSDP, LOCAL, CLUSTER, VIRTUAL_LOCAL = KINDS = (
    "DDP",
    "FSDP2",
    "local steps",
    "virtual cluster",
    "virtual local steps",
)
REAL = (DDP, FSDP, LOCAL)
"""Kinds that run on real ranks over Gloo."""
_PATTERN = [
    *(DDP, CLUSTER, VIRTUAL_LOCAL, CLUSTER, FSDP, VIRTUAL_LOCAL, CLUSTER, VIRTUAL_LOCAL),
    *(LOCAL, CLUSTER, VIRTUAL_LOCAL),
    *(DDP, CLUSTER, VIRTUAL_LOCAL, CLUSTER, LOCAL, VIRTUAL_LOCAL, CLUSTER, VIRTUAL_LOCAL, CLUSTER),
]
"""The kinds of twenty sequences, so that a quarter runs on real ranks."""

SHORTEST, LONGEST = 20, 32
MOST = 3
"""The most ranks that a resized run has."""
RATES = [1.0, 0.5, 0.25, 2.0]
"""Powers of two, with which residuals are multiplied without rounding."""
MOMENTS = ("accumulate", "encode", "exchange", "decode", "optimizer", "write", "replace")
"""Moments of faults.inject at which a rank is killed."""

Draw = random.Random


@dataclass(frozen=True)
class Operation:
    """One operation of all ranks: a name, and arguments drawn once."""

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = ", ".join(f"{key}={value!r}" for key, value in self.args.items())
        return f"{self.name}({words})"


@dataclass(frozen=True)
class Setup:
    """The kind of a sequence, its number of ranks, and the settings of model and wire.

    unused: find_unused_parameters of DDP. views: gradient_as_bucket_view of DDP.
    local: the arguments of local_steps beside the fields of Config.
    """

    kind: str
    world: int
    fields: Mapping[str, Any]
    dtype: str = "float32"
    scaler: bool = False
    unused: bool = False
    views: bool = False
    local: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_real(self) -> bool:
        return self.kind in REAL


@dataclass(frozen=True)
class Plan:
    """A setup, and the operations in their order; `name` is "seed/number"."""

    name: str
    setup: Setup
    operations: tuple[Operation, ...]


def draw_plan(seed: int, number: int) -> Plan:
    """Return the plan of one sequence, which depends on nothing but seed and number."""
    draw = random.Random(f"{seed}/{number}")
    kind = _PATTERN[number % len(_PATTERN)]
    setup = _draw_setup(draw, kind)
    names, weights = zip(*_WEIGHTS[kind].items(), strict=True)
    count = draw.randint(SHORTEST, LONGEST)
    operations = [
        _draw_operation(draw, name, setup) for name in draw.choices(names, weights, k=count)
    ]
    if setup.is_real and draw.random() < 0.5:
        moment = draw.choice(MOMENTS)
        kill = Operation("kill", {"rank": draw.randrange(2), "moment": moment} | _data(draw))
        operations.insert(draw.randrange(count // 2, count), kill)
    return Plan(f"{seed}/{number}", setup, tuple(operations))


_METHODS: list[dict[str, Any]] = [
    {"method": "topk"},
    {"method": "topk", "values": "bf16"},
    {"method": "topk", "values": "int8", "indices": "packed"},
    {"method": "topk", "values": "int4", "rounding": "stochastic"},
    {"method": "topk", "exchange": "gtopk"},
    {"method": "topk", "exchange": "oktopk"},
    {"method": "topk", "exchange": "union"},
    {"method": "topk", "dense": ("*bias",)},
    {"method": "topk", "dense_steps": 3},
    {"method": "topk", "watch": 3},
    {"method": "randk"},
    {"method": "dgc"},
    {"method": "bisect"},
    {"method": "chunked", "values": "int4", "indices": "packed"},
    {"method": "threshold", "value": 0.05},
    {"method": "deft"},
    {"method": "exdyna"},
    {"method": "dense"},
]


def _draw_setup(draw: Draw, kind: str) -> Setup:
    virtual = kind in (CLUSTER, VIRTUAL_LOCAL)
    world = draw.choice([2, 3, 4]) if virtual else 2
    fields = dict(draw.choice(_METHODS), density=draw.choice([0.02, 0.1, 0.3]), dense_below=0)
    if kind == CLUSTER:
        fields.pop("watch", None)
        fields.pop("dense", None)
    else:
        fields["bundle_mb"] = draw.choice([0.0003, 0.0006, 1.0])
    local: dict[str, Any] = {}
    if kind in (LOCAL, VIRTUAL_LOCAL):
        # The default, int4, does not go with every method.
        fields.setdefault("values", "fp32")
        local = {
            "every": draw.choice([1, 2, 3]),
            "outer": draw.choice(["nesterov", "average"]),
            "keep_unsent": draw.random() < 0.3,
        }
        local["keep_unsent"] &= local["outer"] == "average"
    return Setup(
        kind,
        world,
        fields,
        dtype=draw.choice(["float32", "float32", "float32", "bfloat16"]),
        scaler=kind in (DDP, FSDP) and draw.random() < 0.5,
        unused=kind == DDP and draw.random() < 0.5,
        views=kind == DDP and draw.random() < 0.25,
        local=local,
    )


def _data(draw: Draw) -> dict[str, Any]:
    return {"data": draw.randrange(10**6)}


def _draw_step(draw: Draw, setup: Setup) -> dict[str, Any]:
    args = _data(draw)
    if setup.unused and draw.random() < 0.4:
        args["without"] = draw.choice([[0], [1], list(range(MOST))])
    elif setup.kind == FSDP and draw.random() < 0.15:
        args["without"] = list(range(MOST))
    return args


def _draw_save(draw: Draw, setup: Setup) -> dict[str, Any]:
    return {"rank": draw.randrange(2)}


def _draw_damage(draw: Draw, setup: Setup) -> dict[str, Any]:
    how = draw.choice(["flip", "truncate", "missing", "manifest", "empty", "foreign"])
    return {"how": how, "place": draw.random()}


def _draw_attach(draw: Draw, setup: Setup) -> dict[str, Any]:
    differ = ["again", "density", "scaler"]
    if setup.kind == DDP:
        differ.append("unused")
    return {"differ": draw.choice(differ), "rank": draw.randrange(2)}


def _draw_one_sided(draw: Draw, setup: Setup) -> dict[str, Any]:
    calls = ["flush", "save", "load"]
    calls += ["exchange"] if setup.local else ["skip_step", "follow_lr", "detach"]
    return {"call": draw.choice(calls), "rank": draw.randrange(2)} | _data(draw)


def _draw_exception(draw: Draw, setup: Setup) -> dict[str, Any]:
    where = draw.choice(["forward", "forward", "backward"])
    kind = draw.choice(["ValueError", "KeyboardInterrupt"])
    return {"where": where, "rank": draw.choice([None, 0, 1]), "kind": kind} | _data(draw)


def _draw_format(draw: Draw, setup: Setup) -> dict[str, Any]:
    rank = draw.randrange(2) if setup.kind == DDP and draw.random() < 0.1 else None
    return {"format": draw.choice(["channels_last", "contiguous_format"]), "rank": rank}


def _draw_dtype(draw: Draw, setup: Setup) -> dict[str, Any]:
    return {"dtype": draw.choice(["float32", "bfloat16", "float64"])}


def _draw_model_dtype(draw: Draw, setup: Setup) -> dict[str, Any]:
    return {"dtype": draw.choice(["float32", "bfloat16"])}


def _draw_scaler(draw: Draw, setup: Setup) -> dict[str, Any]:
    return _data(draw) | {"new_scale": draw.choice([16.0, 256.0, 4096.0])}


def _draw_wrong(draw: Draw, setup: Setup) -> dict[str, Any]:
    return {"what": draw.choice(["count", "shape", "dtype", "world"])} | _data(draw)


_DRAWS: dict[str, Callable[[Draw, Setup], dict[str, Any]]] = {
    "step": _draw_step,
    "no_sync": lambda draw, setup: _data(draw) | {"how": draw.choice(["sync", "all-reduce"])},
    "skip_step": lambda draw, setup: _data(draw) | {"bare": draw.random() < 0.3},
    "poison": lambda draw, setup: _data(draw) | {"rank": draw.randrange(2)},
    "follow_lr": lambda draw, setup: {"rate": draw.choice(RATES)},
    "resize": lambda draw, setup: {"world": draw.choice([1, 2, 3])},
    "failed save": _draw_save,
    "damage": _draw_damage,
    "attach": _draw_attach,
    "one-sided": _draw_one_sided,
    "exception": _draw_exception,
    "memory_format": _draw_format,
    "default dtype": _draw_dtype,
    "model dtype": _draw_model_dtype,
    "scaler": _draw_scaler,
    "wrong": _draw_wrong,
    "close": lambda draw, setup: _data(draw),
    "exchange": lambda draw, setup: _data(draw),
}


def _draw_operation(draw: Draw, name: str, setup: Setup) -> Operation:
    return Operation(name, _DRAWS[name](draw, setup) if name in _DRAWS else {})


_SHARED = {"step": 35, "flush": 6, "save": 6, "load": 6, "default dtype": 4, "poison": 4}
_FAULTS = {"failed save": 3, "damage": 4, "one-sided": 4, "resize": 3, "close": 3}
_GRADIENTS = {
    "no_sync": 7, "skip_step": 6, "scaler": 5, "detach": 4, "attach": 5, "follow_lr": 4,
    "exception": 4,
}  # fmt: skip
_WEIGHTS: dict[str, dict[str, float]] = {
    DDP: _SHARED | _FAULTS | _GRADIENTS | {"memory_format": 6, "model dtype": 4},
    FSDP: _SHARED | _FAULTS | _GRADIENTS,
    LOCAL: _SHARED | _FAULTS | {"exchange": 5, "attach": 4, "memory_format": 4, "exception": 4},
    CLUSTER: _SHARED | {"skip_step": 6, "follow_lr": 5, "damage": 4, "wrong": 8},
    VIRTUAL_LOCAL: _SHARED
    | {"exchange": 6, "memory_format": 4, "model dtype": 3, "damage": 4, "exception": 3},
}  # fmt: skip
"""By kind, how often each operation is drawn."""

OPERATIONS = sorted({name for weights in _WEIGHTS.values() for name in weights} | {"kill"})
