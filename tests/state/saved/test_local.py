"""Local steps: what does not fit is refused on every rank, and nothing has changed on any."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import StateError
from gradwire.state.saved.check_optimizer import check_optimizer
from tests.integrate import models
from tests.state.saved import forge


class Net(nn.Module):
    """A causal mask is a buffer with infinities, a count one of whole numbers."""

    def __init__(self, more=False):
        super().__init__()
        self.a = nn.Linear(31, 7)
        self.b = nn.Linear(7, 5)
        self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1))
        self.register_buffer("count", torch.tensor(3))
        if more:
            self.register_buffer("more", torch.zeros(2))

    def forward(self, x):
        return self.b(torch.relu(self.a(x))) + self.mask[-1]


def groups_of(net, number):
    parameters = list(net.parameters())
    return [{"params": parameters[i::number]} for i in range(number)]


def made(rank, steps=0, *, kind=torch.optim.AdamW, number=1, more=False, fields=None):
    torch.manual_seed(rank)
    net = Net(more)
    optimizer = kind(groups_of(net, number), lr=0.01)
    fields = {"every": 2, "density": 0.2, "dense_below": 0, **(fields or {})}
    local = gradwire.local_steps(net, optimizer, **fields)
    for step in range(steps):
        optimizer.zero_grad()
        net(models.data(rank, step)).square().mean().backward()
        optimizer.step()
        local.step()
    return net, optimizer, local


def attached(rank):
    """The same model, on DDP."""
    ddp = DistributedDataParallel(Net())
    wire = gradwire.attach(ddp, density=0.2, dense_below=0)
    models.train(ddp, rank, 1)
    return ddp, wire


def everything(net, optimizer, local):
    """All that a load could change, as bytes."""
    state = local.state_dict()
    return [
        [t.numpy().tobytes() for t in net.state_dict().values()],
        forge.bytes_of(optimizer.state_dict()),
        {n: t.numpy().tobytes() for n, t in state["residual"].items()},
        {n: t.numpy().tobytes() for n, t in local.shared_weights().items()},
        [local.steps, local.inner_steps, state["bundles"], local.identity],
    ]


def saved(rank, folder):
    """Three steps are an exchange and a step after it: every rank has weights of its own."""
    for name, fields in (("good", {}), ("kept", {"keep_unsent": True})):
        _, _, local = made(rank, 3, fields=fields)
        gradwire.save(local, f"{folder}/{name}")
        local.close()
    _, wire = attached(rank)
    gradwire.save(wire, f"{folder}/attached")
    wire.close()


def _part(change, rank=1):
    return lambda folder: forge.change_part(folder, rank, change)


def _spoil(*path, value):
    def change(saved):
        for key in path[:-1]:
            saved = saved[key]
        saved[path[-1]] = value

    return _part(change)


def _nan(*path):
    def change(saved):
        for key in path:
            saved = saved[key]
        saved.view(-1)[0] = float("nan")

    return _part(change)


def _without(*path):
    def change(saved):
        for key in path[:-1]:
            saved = saved[key]
        del saved[path[-1]]

    return _part(change)


FORGED = {
    "nan in the weights": (_nan("weights", "a.weight"), "weights of 'a.weight' holds 1 values"),
    "nan in the reference": (
        _nan("local", "reference", "b.bias"),
        "reference of 'b.bias' holds 1 values",
    ),
    "nan in the velocity": (
        _nan("local", "velocity", "b.bias"),
        "velocity of 'b.bias' holds 1 values",
    ),
    "nan in a buffer": (_nan("local", "buffers", "mask"), "buffers of 'mask' holds 1 values"),
    "nan in a moment": (
        _nan("local", "optimizer", "state", 0, "exp_avg"),
        "'exp_avg' of the optimiser's parameter 0 holds values",
    ),
    "no weights": (_without("weights"), "the state has no entry 'weights'"),
    "no reference": (_without("local", "reference"), "has no entry 'reference'"),
    "one weight less": (_without("weights", "a.bias"), "differ in weights: ['a.bias']"),
    "no optimiser": (_without("local", "optimizer"), "optimiser must have 'state'"),
    "no parameters in a group": (
        _without("local", "optimizer", "param_groups", 0, "params"),
        "has parameter groups of [0], this one of [4]",
    ),
    "parameters that are lists": (
        _spoil("local", "optimizer", "param_groups", 0, "params", value=[[], [], [], []]),
        "the parameters of the state's optimiser must be whole numbers",
    ),
    "moment of another shape": (
        _spoil("local", "optimizer", "state", 0, "exp_avg", value=torch.zeros(3)),
        "'exp_avg' of the optimiser's parameter 0 has shape (3,)",
    ),
    "weights in half": (
        _spoil("weights", "a.bias", value=torch.zeros(7).half()),
        "weights of 'a.bias' must be an fp32 tensor, got float16",
    ),
    "velocity is a tensor": (
        _spoil("local", "velocity", value=torch.zeros(3)),
        ".pt: RuntimeError",
    ),
    "a rate that is no number": (
        _spoil("local", "optimizer", "param_groups", 0, "lr", value=float("nan")),
        "'lr' of the state's optimiser cannot be nan",
    ),
    "a rate that is a word": (
        _spoil("local", "optimizer", "param_groups", 0, "lr", value="much"),
        "'lr' of the state's optimiser cannot be 'much'",
    ),
    "no betas": (
        _without("local", "optimizer", "param_groups", 0, "betas"),
        "'betas' of the state's optimiser cannot be None",
    ),
    "a beta too many": (
        _spoil("local", "optimizer", "param_groups", 0, "betas", value=(0.9, 0.9, 0.9)),
        "'betas' of the state's optimiser cannot be (0.9, 0.9, 0.9)",
    ),
    "a moment of one parameter is gone": (
        _without("local", "optimizer", "state", 0, "exp_avg_sq"),
        "the optimiser's state has 'exp_avg_sq' for some parameters only",
    ),
    "a moment is a word": (
        _spoil("local", "optimizer", "state", 0, "exp_avg", value="much"),
        "'exp_avg' of the optimiser's parameter 0 must be a tensor, got str",
    ),
    "a moment is None": (
        _spoil("local", "optimizer", "state", 0, "exp_avg_sq", value=None),
        "'exp_avg_sq' of the optimiser's parameter 0 must be a tensor, got NoneType",
    ),
    "a flag that is a tensor": (
        _spoil("local", "optimizer", "param_groups", 0, "maximize", value=torch.zeros(2, 2)),
        "'maximize' of the state's optimiser cannot be tensor([[0., 0.], [0., 0.]])",
    ),
    "a rate of 1e300": (
        _spoil("local", "optimizer", "param_groups", 0, "lr", value=1e300),
        "'lr' of the state's optimiser cannot be 1e+300",
    ),
    "a rate that is true": (
        _spoil("local", "optimizer", "param_groups", 0, "lr", value=True),
        "'lr' of the state's optimiser cannot be True",
    ),
    "squares below zero": (
        _spoil("local", "optimizer", "state", 0, "exp_avg_sq", value=-torch.ones(7, 31)),
        "'exp_avg_sq' of the optimiser's parameter 0 holds values below 0",
    ),
    "steps of the optimiser are gone": (
        _spoil("local", "optimizer", "state", value={0: {"exp_avg": torch.zeros(7, 31)}}),
        "the optimiser does not take its state: KeyError: 'step'",
    ),
    "a rate below 0": (
        _spoil("local", "optimizer", "param_groups", 0, "lr", value=-0.1),
        "'lr' of the state's optimiser cannot be -0.1",
    ),
    "an average that forgets nothing": (
        _spoil("local", "optimizer", "param_groups", 0, "betas", value=(1.0, 0.9)),
        "'betas' of the state's optimiser cannot be (1.0, 0.9)",
    ),
    "a moment of whole numbers": (
        _spoil("local", "optimizer", "state", 0, "exp_avg", value=torch.ones(7, 31).int()),
        "'exp_avg' of the optimiser's parameter 0 cannot be int32 of shape (7, 31)",
    ),
    "a complex moment": (
        _spoil("local", "optimizer", "state", 0, "exp_avg_sq", value=torch.ones(7, 31).cfloat()),
        "'exp_avg_sq' of the optimiser's parameter 0 cannot be complex64 of shape (7, 31)",
    ),
    "steps of the optimiser": (
        _spoil("local", "optimizer", "state", 0, "step", value=torch.tensor(2**62)),
        "'step' of the optimiser's parameter 0 must be a number from 0 to 2**48",
    ),
    "weights of whole numbers": (
        _spoil("weights", "a.bias", value=torch.zeros(7).int()),
        "weights of 'a.bias' must be an fp32 tensor, got int32",
    ),
    "a complex reference": (
        _spoil("local", "reference", "a.bias", value=torch.zeros(7).cfloat()),
        "reference of 'a.bias' must be an fp32 tensor, got complex64",
    ),
    "a residual that is too large": (
        _spoil("residual", "a.bias", value=torch.full((7,), 1e38)),
        "residual of 'a.bias' holds values above 2**116",
    ),
    "an outer velocity that is too large": (
        _spoil("local", "velocity", "a.bias", value=torch.full((7,), 1e38)),
        "velocity of 'a.bias' holds values above 2**116",
    ),
    "counts": (_spoil("counts", "sent", value=2**62), "the state's count 'sent' is 46"),
    "inner steps": (_spoil("local", "inner_steps", value=2**62), "inner_steps must be a whole"),
    "steps": (_spoil("steps", value=2**62), "steps must be a whole number of at most 2**48"),
    "stretched moment": (
        _spoil("local", "optimizer", "state", 0, "odd", value=forge.stretched()),
        "of which it has not the values",
    ),
}
GOOD = ("good", {})
OTHERS = {
    "two groups of parameters": (
        GOOD,
        {"number": 2},
        "parameter groups of [4], this one of [2, 2]",
    ),
    "one more buffer": (GOOD, {"more": True}, "differ in buffers: ['more']"),
    "another optimiser": (GOOD, {"kind": torch.optim.SGD}, "is of the optimiser 'AdamW', this is"),
    "like optimiser": (
        GOOD,
        {"kind": torch.optim.Adam},
        "is of the optimiser 'AdamW', this is Adam",
    ),
    "keeps the unsent": (
        GOOD,
        {"fields": {"keep_unsent": True}},
        "saved with keep_unsent=False, this is keep_unsent=True",
    ),
    "kept the unsent": (
        ("kept", {}),
        {},
        "saved with keep_unsent=True, this is keep_unsent=False",
    ),
    "no outer momentum": (GOOD, {"fields": {"outer": "average"}}, "was saved with outer momentum"),
    "of attach": (
        ("attached", {}),
        {},
        "this state is not of local_steps: it has no entry 'local'",
    ),
}


def attempt(made, path):
    before = copy.deepcopy(everything(*made))
    try:
        gradwire.load(made[-1], path)
    except StateError as error:
        return str(error), everything(*made) == before
    except BaseException as error:
        return f"{type(error).__name__} {error}", None
    return "loaded", None


def outcomes(rank, folder):
    """Return every case's error, and True if model, optimiser and residuals are as before."""
    out = {}
    mine = made(rank, 4)
    for name, (change, _) in FORGED.items():
        path = Path(folder) / name
        if rank == 0:
            forge.copied(Path(folder) / "good", path)
            change(path)
        dist.barrier()
        out[name] = attempt(mine, path)
    mine[-1].close()
    for name, ((source, _), arguments, _) in OTHERS.items():
        other = made(rank, 4, **arguments)
        out[name] = attempt(other, f"{folder}/{source}")
        other[-1].close()
    ddp, wire = attached(rank)
    kept = [wire.residual(n).numpy().tobytes() for n, _ in ddp.module.named_parameters()]
    try:
        gradwire.load(wire, f"{folder}/good")
    except StateError as error:
        now = [wire.residual(n).numpy().tobytes() for n, _ in ddp.module.named_parameters()]
        out["into attach"] = str(error), now == kept
    wire.close()
    mine = made(rank, 4)
    gradwire.load(mine[-1], f"{folder}/good")
    out["good"] = mine[-1].inner_steps, bool(torch.isinf(mine[0].mask).any())
    mine[-1].close()
    return out


@pytest.fixture(scope="module")
def said(ranks, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("local"))
    ranks.run(2, saved, folder)
    return ranks.run(2, outcomes, folder)


WORDS = {
    **{name: words for name, (_, words) in FORGED.items()},
    **{name: words for name, (_, _, words) in OTHERS.items()},
    "into attach": "this state is of local_steps, whose residuals are of weights",
}


@pytest.mark.parametrize("name", WORDS)
def test_what_does_not_fit_changes_nothing_on_any_rank(said, name):
    for text, unchanged in (each[name] for each in said):
        assert WORDS[name] in text
        assert unchanged, text
        assert "\n" not in text
    assert name not in FORGED or said[0][name][0].startswith("rank 1: "), "its part is whole"


def test_a_mask_with_infinities_is_loaded(said):
    assert [each["good"] for each in said] == [(3, True)] * 2


def test_the_two_ways_of_attaching_are_told_apart():
    cluster = gradwire.VirtualCluster(1, density=0.1)
    cluster.average([torch.randn(9)])
    state = cluster.state_dict()["workers"][0]
    with pytest.raises(StateError, match="this state is of local_steps"):
        cluster._states[0].load_state_dict({**state, "local": {}})


APART = {
    "other shared weights": (_spoil("local", "reference", "b.bias", value=torch.ones(5)), "shared"),
    "another outer velocity": (
        _spoil("local", "velocity", "b.bias", value=torch.ones(5)),
        "shared",
    ),
    "another factor": (_spoil("worth", value=[0.0, 2.0]), "learning rate or flush"),
}


OTHER_MOMENTS = {
    "centred": (torch.optim.RMSprop, {"centered": True}, "grad_avg", torch.zeros(3)),
    "nadam": (torch.optim.NAdam, {}, "mu_product", torch.zeros(0)),
    "adadelta": (torch.optim.Adadelta, {}, "acc_delta", [1, 2]),
    "adamax": (torch.optim.Adamax, {}, "exp_inf", torch.full((2, 3), -1.0)),
}


@pytest.mark.parametrize("case", OTHER_MOMENTS)
def test_moments_of_other_optimisers_are_checked(case):
    kind, settings, key, forged = OTHER_MOMENTS[case]
    weight = nn.Parameter(torch.zeros(2, 3))
    optimizer = kind([weight], lr=0.1, **settings)
    weight.sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    check_optimizer(state, optimizer)
    state["state"][0][key] = forged
    with pytest.raises(StateError, match=f"'{key}' of the optimiser's parameter 0"):
        check_optimizer(state, optimizer)


def loaded_apart(rank, folder):
    saved(rank, folder)
    dist.barrier()
    out = {}
    for name, (change, _) in APART.items():
        bad = Path(folder) / name
        if rank == 0:
            change(forge.copied(Path(folder) / "good", bad))
            forge.reseal(bad)
        dist.barrier()
        out[name] = attempt(made(0), bad)
    return out


def test_parts_that_are_right_alone_and_not_together(ranks, tmp_path):
    for found in ranks.run(2, loaded_apart, str(tmp_path)):
        for name, (error, unchanged) in found.items():
            assert f"the parts of ranks 0 and 1 differ in their {APART[name][1]}" in error
            assert unchanged, name
