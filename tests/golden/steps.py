"""Fifty steps on made gradients, with every way of exchanging, on virtual and on real ranks.

Where gradwire itself takes a mean or a norm, the inputs keep its order from mattering: squares of
gradients add up exactly in fp64 (clip), and no entry lies within a rounding of a fit's threshold.
Clipping is with momentum only: without it torch.add(alpha=) may fuse.
`sign` is left out: its scale is an fp32 mean of residuals, which torch adds in an order of its own.
"""

import numpy as np
import torch

import gradwire
from tests.golden.cases import digest, gradient, numbers

STEPS, EVERY = 50, 10
RATE = np.float32(2.0**-4)
SHAPES = {"a": (37, 41), "b": (41,), "c": (13, 3, 5), "d": (2000,), "e": ()}
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())

CASES = {
    "topk/allgather fp32 int32": {
        "method": "topk/allgather",
        "density": 0.02,
        "dense_steps": 3,
        "flush at": 40,
        "skip at": 20,
    },
    "topk/union bf16 packed": {
        "method": "topk/union",
        "density": 0.01,
        "values": "bf16",
        "indices": "packed",
        "warmup": (0.25, 0.0625),
        "warmup_steps": 5,
        "follow_lr": True,
        "broken at": 30,
    },
    "gaussiank/allgather int8 packed": {
        "method": "gaussiank/allgather",
        "density": 0.02,
        "values": "int8",
        "indices": "packed",
    },
    "gaussiank exact int8 packed": {
        "method": "gaussiank",
        "density": 0.02,
        "values": "int8",
        "indices": "packed",
        "options": {"exact": True},
    },
    "dgc/allgather momentum clip masking": {
        "method": "dgc/allgather",
        "density": 0.02,
        "momentum": 0.9,
        "clip": 160.0,
        "values": "fp16",
        "indices": "local16",
    },
    "topk/allgather nesterov without masking": {
        "method": "topk/allgather",
        "density": 0.02,
        "momentum": 0.9,
        "nesterov": True,
        "masking": False,
        "indices": "bitmap",
    },
    "randk": {"method": "randk", "density": 0.05, "options": {"seed": 7, "shared": True}},
    "randk own seeds int4 stochastic": {
        "method": "randk",
        "density": 0.05,
        "values": "int4",
        "rounding": "stochastic",
        "indices": "auto",
        "options": {"shared": False},
    },
    "topk/gtopk bf16 stochastic": {
        "method": "topk/gtopk",
        "density": 0.02,
        "values": "bf16",
        "rounding": "stochastic",
    },
    "topk/gs-sgd": {"method": "topk/gs-sgd", "density": 0.02, "options": {"ratio": 2.0, "rows": 3}},
    "topk/sketched bf16": {
        "method": "topk/sketched",
        "density": 0.02,
        "values": "bf16",
        "options": {"ratio": 2.0, "rows": 3},
    },
    "topk/oktopk int4": {
        "method": "topk/oktopk",
        "density": 0.02,
        "values": "int4",
        "indices": "auto",
        "options": {"refresh": 8},
    },
    "topk/hierarchical int8": {
        "method": "topk/hierarchical",
        "density": 0.02,
        "values": "int8",
        "options": {"local": 2},
    },
}
IN_BUNDLES = {"dense_below": 500, "bundle_mb": 0.0062}
"""Added to the first two cases on real ranks: several bundles, some sent whole for being small."""
IN_SEVERAL = tuple(CASES)[:2]
THREE = ("topk/union bf16 packed", "topk/gtopk bf16 stochastic", "topk/gs-sgd", "topk/oktopk int4")
"""Run with three virtual workers too: their number is no power of two."""


def fields_of(name, **more):
    """The fields of Config, and what happens at which step."""
    fields = {**CASES[name], "dense_below": 0, **more}
    events = {what: fields.pop(what, None) for what in ("flush at", "skip at", "broken at")}
    return fields, events | {"follow_lr": fields.pop("follow_lr", False)}


def rate(step, events):
    """The learning rate, a power of two, so that p - rate x g rounds once."""
    return RATE / 2 if events["follow_lr"] and step >= 25 else RATE


def given(rank, step, events):
    """The gradient of a rank; in one step of some cases rank 1 has one that is not finite."""
    found = gradient(rank, step, SIZE)
    if step == events["broken at"] and rank == 1:
        found[11] = np.inf
    return found


def start():
    """The parameters at the start."""
    return numbers(77, SIZE, -500, 500).astype(np.float32) * np.float32(2.0**-9)


class Run:
    """Fifty steps of whatever averages: `average(step)` gives the update."""

    def __init__(self, name, handle, average, **more):
        _, events = fields_of(name, **more)
        self.parameters, self.updates = start(), []
        for step in range(STEPS):
            lr = rate(step, events)
            if events["follow_lr"]:
                handle.follow_lr(float(lr))
            if step == events["flush at"]:
                handle.flush()
            update = average(step, events)
            if step == events["skip at"]:
                handle.skip_step()
            elif np.isfinite(update).all():
                self.parameters -= lr * update
            if (step + 1) % EVERY == 0:
                self.updates.append(digest(update))


def virtual(name, world):
    """What to record of `world` virtual workers."""
    fields, _ = fields_of(name)
    cluster = gradwire.VirtualCluster(world, **fields)

    def average(step, events):
        made = [torch.from_numpy(given(rank, step, events)) for rank in range(world)]
        return cluster.average(made).numpy().copy()

    run = Run(name, cluster, average)
    return {
        "parameters": digest(run.parameters),
        "residuals": digest(*(cluster.residual(rank) for rank in range(world))),
        "updates": run.updates,
        "bytes_sent": [cluster.stats(rank).bytes_sent for rank in range(world)],
        "sent whole": cluster.stats().dense,
    }


def named(flat):
    """The parts of a flat vector, by parameter."""
    out, at = {}, 0
    for name, shape in SHAPES.items():
        size = int(np.prod(shape))
        out[name] = torch.from_numpy(flat[at : at + size].reshape(shape).copy())
        at += size
    return out


def joined(tensors):
    return np.concatenate([tensors[name].numpy().reshape(-1) for name in SHAPES])


def real(rank, names):
    """What to record of this rank of a process group, for each of the cases."""
    out = {}
    for name in names:
        more = IN_BUNDLES if name in IN_SEVERAL else {}
        fields, _ = fields_of(name, **more)
        state = gradwire.State(**fields)

        def average(step, events, state=state):
            tensors = named(given(rank, step, events))
            gradwire.average(tensors, state)
            return joined(tensors)

        run = Run(name, state, average, **more)
        out[name] = {
            "parameters": digest(run.parameters),
            "residual": digest(joined({name: state.residual(name) for name in SHAPES})),
            "updates": run.updates,
            "bytes_sent": state.stats().bytes_sent,
            "sent whole": state.stats().dense,
        }
        state.close()
    return out


def record(ranks):
    """All that is compared; `ranks` is a pool of at least two real ones."""
    return {
        "inputs": digest(start(), *(gradient(rank, 49, SIZE) for rank in range(4))),
        "virtual": {name: virtual(name, 4) for name in CASES},
        "virtual3": {name: virtual(name, 3) for name in THREE},
        "real": ranks.run(2, real, list(CASES)),
    }
