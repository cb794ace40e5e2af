"""muon: torch's Muon and AdamW in one optimiser, with each parameter where it belongs."""

import copy
import math
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from gradwire.errors import ConfigError, StateError
from gradwire.optim import MuonAdamW, muon, newton_schulz


@pytest.fixture(autouse=True)
def one_thread():
    """Small products on several threads wait for each other where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


ROWS = 60
"""Of the embedding."""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        h = self.norm(x)
        x = x + functional.scaled_dot_product_attention(
            self.q(h), self.k(h), self.v(h), is_causal=True
        )
        return x + self.down(functional.gelu(self.up(x)))


class Gpt(nn.Module):
    def __init__(self, width=32, layers=2):
        super().__init__()
        self.table = nn.Embedding(ROWS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.out = nn.Linear(width, ROWS, bias=False)

    def forward(self, x):
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def gpt(**kw):
    torch.manual_seed(1)
    return Gpt(**kw)


def batch(step):
    """Tokens that a model can learn: each is the last one, plus 0, 1 or 2."""
    draw = torch.Generator().manual_seed(step)
    return torch.randint(3, (8, 17), generator=draw).cumsum(1) % ROWS


def loss_of(model, step):
    tokens = batch(step)
    logits = model(tokens[:, :-1]).float()
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(model, optimizers, steps, start=0):
    losses = []
    for step in range(start, start + steps):
        loss = loss_of(model, step)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def torchs(model, lr, decay=0.1, fused=None):
    """torch's two optimisers with the split that `muon` makes."""
    hidden = [p for b in model.blocks for p in b.parameters() if p.dim() == 2]
    known = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in known]
    groups = [
        {"params": [p for p in rest if p.dim() == 2], "weight_decay": decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(hidden, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused),
    ]


def where(optimizer):
    """Rule and kind by name."""
    return {
        name: (group["rule"], group["kind"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_is_torchs(dtype):
    """In every parameter, at steps 1 to 5, within 1e-2 of its size.

    A bf16 weight may be rounded to the other side, which is 2^-8 of the weight.
    """
    place = 0 if dtype == torch.float32 else 2**-8
    ours, theirs = gpt().to(dtype), gpt().to(dtype)
    # Only the fused AdamW rounds bf16 once per step.
    one, two = muon(ours, lr=0.02), torchs(theirs, lr=0.02, fused=dtype == torch.bfloat16)
    for step in range(5):
        before = [p.detach().clone() for p in ours.parameters()]
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            q.data.copy_(p)
        train(ours, [one], 1, step)
        train(theirs, two, 1, step)
        for b, p, q in zip(before, ours.parameters(), theirs.parameters(), strict=True):
            wanted, wrong = (q - b).detach().float(), (p - q).detach().float()
            assert wanted.norm() > 0
            wrong = (wrong.abs() - place * q.detach().float().abs()).clamp(min=0)
            assert wrong.norm() <= 1e-2 * wanted.norm()


def test_200_steps_end_at_torchs_loss():
    ours, theirs = gpt(), gpt()
    mine = train(ours, [muon(ours, lr=0.01)], 200)
    other = train(theirs, torchs(theirs, lr=0.01), 200)
    assert mine[-1] < 0.5 * mine[0]
    assert abs(sum(mine[-20:]) - sum(other[-20:])) / 20 <= 0.002


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (200, 16)])
def test_the_size_of_an_update_is_that_of_adamw(shape):
    """Root mean square 0.2 of the rate, for any shape."""
    torch.manual_seed(2)
    size = alone(torch.randn(shape)).square().mean().sqrt()
    assert 0.15 < size / 0.1 < 0.22


def test_batches_are_bounded_and_change_nothing(monkeypatch):
    whole, cut = gpt(), gpt()
    train(whole, [muon(whole, lr=0.01)], 2)
    asked = []
    one = newton_schulz.orthogonalise
    monkeypatch.setattr(newton_schulz, "MOST_ENTRIES", 2 * 32 * 32)
    monkeypatch.setattr(
        "gradwire.optim.muon_adamw.orthogonalise",
        lambda x: (asked.append(tuple(x.shape)), one(x))[1],
    )
    train(cut, [muon(cut, lr=0.01)], 2)
    assert asked == 2 * ([(2, 32, 32)] * 3 + [(1, 96, 32)] * 2 + [(1, 32, 96)] * 2)
    for p, q in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=0)


def test_parameters_go_where_they_belong():
    roles = where(muon(gpt(), lr=0.01))
    assert roles["table.weight"] == ("adamw", "embeddings")
    assert roles["out.weight"] == ("adamw", "head")
    assert (
        roles["blocks.1.norm.weight"] == roles["blocks.0.up.bias"] == ("adamw", "norms and biases")
    )
    assert (
        roles["blocks.0.q.weight"] == roles["blocks.1.down.weight"] == ("muon", "hidden matrices")
    )


def test_a_head_that_shares_the_embedding_is_an_embedding():
    model = gpt()
    model.out.weight = model.table.weight
    roles = where(muon(model, lr=0.01))
    assert roles["table.weight"] == ("adamw", "embeddings")
    assert "out.weight" not in roles
    # The last Linear of its own is hidden then.
    assert roles["blocks.1.down.weight"][0] == "muon"


def test_a_head_is_known_by_its_name_too():
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "lm_head": nn.Linear(8, 5)})
    assert where(muon(model, lr=0.01))["lm_head.weight"] == ("adamw", "head")


def test_convolutions_and_tables_are_not_matrices():
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "conv": nn.Conv1d(8, 8, 3)})
    model.pos_emb = nn.Parameter(torch.zeros(1, 5, 8))
    roles = where(muon(model, lr=0.01))
    assert roles["conv.weight"] == ("adamw", "convolutions")
    assert roles["pos_emb"] == ("adamw", "embeddings")


def test_patterns_win():
    model = gpt()
    roles = where(muon(model, lr=0.01, adamw=["blocks.0.*"], muon=["out.*"]))
    assert roles["blocks.0.q.weight"] == ("adamw", "named in adamw")
    assert roles["out.weight"] == ("muon", "named in muon")
    assert roles["blocks.1.q.weight"][0] == "muon"


def test_the_repr_shows_which_parameter_goes_where():
    lines = repr(muon(gpt(), lr=0.01)).splitlines()
    assert lines[0] == "MuonAdamW(lr=0.01)"
    place = lines.index("  Muon, hidden matrices:")
    assert lines[place + 1] == "    2 x blocks.*.q.weight [32, 32]"
    assert "  AdamW, norms and biases, no weight decay:" in lines
    assert "    1 x out.weight [60, 32]" in lines


class Conv1D(nn.Module):
    """transformers' Linear, whose outputs are columns."""

    def __init__(self, outputs, inputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = Conv1D(36, 12)
        self.qkv = nn.Linear(12, 36, bias=False)
        self.gate_up_proj = nn.Linear(12, 40, bias=False)
        self.experts = nn.Parameter(torch.randn(4, 12, 20))


def updates(model, optimizer):
    """Updates for the gradient that `model`'s weights themselves are."""
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = p.detach().clone()
    optimizer.step()
    return {n: before[n] - p.detach() for n, p in model.named_parameters()}


def alone(matrix):
    """The update of a matrix that is a weight of its own."""
    model = nn.Linear(*reversed(matrix.shape), bias=False)
    model.weight.data.copy_(matrix)
    return updates(model, muon(model, lr=0.1, weight_decay=0.0))["weight"]


def test_fused_weights_are_cut_into_their_matrices():
    """q, k and v, gate and up, and experts move as they would as weights of their own."""
    model = Fused()
    start = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = muon(model, lr=0.1, weight_decay=0.0)
    moved = updates(model, optimizer)
    for name, dim, parts in (
        ("c_attn.weight", 1, 3),
        ("qkv.weight", 0, 3),
        ("gate_up_proj.weight", 0, 2),
    ):
        pieces = start.get_parameter(name).detach().chunk(parts, dim)
        wanted = torch.cat([alone(piece) for piece in pieces], dim)
        torch.testing.assert_close(moved[name], wanted, atol=1e-3, rtol=0)
    wanted = torch.stack([alone(expert) for expert in start.experts.detach()])
    torch.testing.assert_close(moved["experts"], wanted, atol=1e-3, rtol=0)


def test_sizes_of_parts_are_taken():
    model = Fused()
    start = model.c_attn.weight.detach().clone()
    moved = updates(model, muon(model, 0.1, 0.0, split={"c_attn.*": (20, 8, 8), "qkv.*": 1}))
    wanted = torch.cat([alone(piece) for piece in start.split((20, 8, 8), 1)], 1)
    torch.testing.assert_close(moved["c_attn.weight"], wanted, atol=1e-3, rtol=0)


def test_fused_weights_that_are_left_whole_are_named():
    model = nn.ModuleDict({"query_key_value": nn.Linear(8, 24), "other": nn.Linear(8, 24)})
    with pytest.warns(UserWarning, match=r"^muon: query_key_value.weight may hold several") as seen:
        muon(model, lr=0.01)
    assert len(seen) == 1
    assert "\n" not in str(seen[0].message)


def test_stacks_of_fused_matrices_are_named_and_can_be_meant():
    model = nn.Module()
    model.gate_up_proj = nn.Parameter(torch.randn(3, 8, 6))
    words = r"one to Muon for each of the first dimension: give split={'gate_up_proj': 1} to leave"
    with pytest.warns(UserWarning, match=words):
        muon(model, lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        muon(model, lr=0.01, split={"gate_up_proj": 1})


def test_a_saved_optimizer_goes_on(tmp_path):
    whole, broken = gpt(), gpt()
    train(whole, [muon(whole, lr=0.01)], 6)
    optimizer = muon(broken, lr=0.01)
    train(broken, [optimizer], 3)
    torch.save(optimizer.state_dict(), tmp_path / "state")
    again = muon(broken, lr=0.5)
    again.load_state_dict(torch.load(tmp_path / "state"))
    train(broken, [again], 3, start=3)
    for p, q in zip(whole.parameters(), broken.parameters(), strict=True):
        assert torch.equal(p, q)
    assert repr(copy.deepcopy(again)) == repr(optimizer)


def test_the_state_of_another_model_is_refused_and_nothing_changes():
    model = gpt()
    optimizer = muon(model, lr=0.01)
    train(model, [optimizer], 1)
    good = optimizer.state_dict()
    before = copy.deepcopy(good)
    wide = copy.deepcopy(good)
    number = next(n for n, values in wide["state"].items() if "momentum_buffer" in values)
    wide["state"][number]["momentum_buffer"] = torch.zeros(3, 3)
    fewer = copy.deepcopy(good)
    fewer["param_groups"][0]["params"].pop()
    for state, words in (
        (wide, r"the saved momentum_buffer of \S+ has shape \(3, 3\), the parameter has"),
        (fewer, "it is of another model or optimiser"),
        (torch.optim.AdamW(model.parameters()).state_dict(), "the saved state has groups"),
    ):
        with pytest.raises(StateError, match=words):
            optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for n, values in before["state"].items():
        assert all(torch.equal(after["state"][n][key], values[key]) for key in values)


def test_parameters_that_come_later_are_refused():
    model = gpt()
    optimizer = muon(model, lr=0.01)
    with pytest.raises(ConfigError, match="make another one with the whole model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3, 3))]})
    train(model, [optimizer], 1)


def test_a_loaded_count_of_steps_is_where_the_fused_adamw_needs_it():
    """torch moves it to the parameter's device, and to fp32, only if the group says fused."""
    model = gpt()
    optimizer = muon(model, lr=0.01)
    train(model, [optimizer], 1)
    state = optimizer.state_dict()
    for values in state["state"].values():
        if "step" in values:
            values["step"] = values["step"].double()
    optimizer.load_state_dict(state)
    steps = [v["step"].dtype for v in optimizer.state.values() if "step" in v]
    assert set(steps) == {torch.float32}
    train(model, [optimizer], 1, start=1)


def test_a_scheduler_changes_every_group():
    model = gpt()
    optimizer = muon(model, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 2 else 0.0)
    train(model, [optimizer], 2)
    scheduler.step()
    scheduler.step()
    before = [p.detach().clone() for p in model.parameters()]
    train(model, [optimizer], 1)
    assert all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
    assert len({group["lr"] for group in optimizer.param_groups}) == 1


def test_a_scaler_skips_and_unscales():
    plain, scaled = gpt(), gpt()
    train(plain, [muon(plain, lr=0.01)], 2)
    optimizer, scaler = muon(scaled, lr=0.01), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, factor in ((0, 1.0), (1, math.inf), (1, 1.0)):
        before = scaled.table.weight.detach().clone()
        scaler.scale(loss_of(scaled, step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, scaled.table.weight) is (factor == math.inf)
    for p, q in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=2e-3, rtol=0)


def test_a_closure_is_called_and_parameters_without_a_gradient_stay():
    model = gpt()
    model.blocks[1].q.weight.requires_grad_(False)
    optimizer = muon(model, lr=0.01)
    assert "blocks.1.q.weight" not in where(optimizer)
    frozen = model.blocks[0].q.weight.detach().clone()

    def closure():
        loss = loss_of(model, 0)
        loss.backward()
        model.blocks[0].q.weight.grad = None
        return loss

    before = model.blocks[0].k.weight.detach().clone()
    assert optimizer.step(closure) > 0
    assert torch.equal(frozen, model.blocks[0].q.weight)
    assert not torch.equal(before, model.blocks[0].k.weight)


def test_names_are_plain_inside_a_compiled_model():
    model, wanted = gpt(), where(muon(gpt(), lr=0.01))
    model.blocks[0] = torch.compile(model.blocks[0])
    assert where(muon(torch.compile(model), lr=0.01)) == wanted


def wrapped(rank):
    ddp = nn.parallel.DistributedDataParallel(gpt())
    return where(muon(ddp, lr=0.01)) == where(muon(gpt(), lr=0.01))


def test_names_are_plain_inside_ddp(ranks):
    assert ranks.run(1, wrapped) == [True]


class Sharded(nn.Parameter):
    placements = ()


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        (3, {}, "needs a torch.nn.Module, got int"),
        (nn.Linear(3, 3), {"lr": -1}, r"lr must be in \[0, inf\), got -1"),
        (nn.Linear(3, 3), {"momentum": 1}, r"momentum must be in \[0, 1\), got 1"),
        (nn.Linear(3, 3), {"weight_decay": "no"}, "weight_decay must be in .* got 'no'"),
        (nn.Embedding(3, 3), {}, "no hidden matrix in this model: use torch.optim.AdamW"),
        (nn.Linear(3, 3), {"adamw": ["x*"]}, "adamw='x\\*' matches no parameter. Names look"),
        (nn.Linear(3, 3), {"muon": "weight"}, r"muon must be several patterns, such as \['weight'"),
        (
            nn.Linear(3, 3),
            {"muon": ["w*"], "adamw": ["*t"]},
            "weight is named by muon and by adamw",
        ),
        (nn.Linear(3, 3), {"muon": ["bias"]}, r"bias has shape \(3,\): muon takes matrices"),
        (nn.Linear(3, 3), {"split": {"weight": 2}}, "weight has 3 outputs, not 2 equal parts"),
        (nn.Linear(3, 3), {"split": {"weight": (2, 2)}}, r"weight has 3 outputs, not 2 \+ 2"),
        (Fused(), {"split": {"experts": 2}}, "experts has 3 dimensions"),
    ],
)
def test_bad_input_is_one_line(model, fields, words):
    with pytest.raises(ConfigError, match=words) as error:
        muon(model, **fields)
    assert "\n" not in str(error.value)


def test_sparse_gradients_are_refused():
    model = nn.ModuleDict({"table": nn.Embedding(5, 4, sparse=True), "body": nn.Linear(4, 4)})
    optimizer = muon(model, lr=0.01)
    model["body"](model["table"](torch.tensor([1]))).sum().backward()
    with pytest.raises(ConfigError, match="no sparse gradients"):
        optimizer.step()


def test_it_is_loaded_when_it_is_used():
    code = (
        "import sys\nfrom gradwire import *\nimport gradwire\n"
        "assert not [m for m in sys.modules if m.startswith('gradwire.optim')]\n"
        "print(gradwire.optim.muon.__name__, type(gradwire.optim.muon).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["muon", "function"]
    assert issubclass(MuonAdamW, torch.optim.Optimizer)
