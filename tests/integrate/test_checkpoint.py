"""Stopped and resumed is bit-equal to never stopped; other bundles and worlds keep the law."""

import copy
import json
import re

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.errors import ConfigError, GradwireError, StateError
from gradwire.state.saved.check_bundles import check_bundles
from gradwire.types import Slot
from tests.integrate import models


def unbroken(rank, fields):
    dtype = fields.get("dtype", torch.float32)
    ddp, wire = models.wrapped(**fields)
    optimizer = models.train(ddp, rank, 4, dtype=dtype)
    models.train(ddp, rank, 4, start=4, optimizer=optimizer, dtype=dtype)
    stats = wire.stats()
    wire.close()
    return models.flat(ddp).numpy().tobytes(), stats.bytes_sent, stats.achieved_density


def resumed(rank, fields, folder, other):
    dtype = fields.get("dtype", torch.float32)
    ddp, wire = models.wrapped(**fields)
    optimizer = models.train(ddp, rank, 4, dtype=dtype)
    if rank == 0:
        torch.save([ddp.module.state_dict(), optimizer.state_dict()], f"{folder}/model.pt")
    gradwire.save(wire, folder)
    wire.close()
    del ddp, wire, optimizer
    dist.barrier()

    ddp, wire = models.wrapped(**{**fields, **other, "seed": 99})
    models.train(
        ddp, rank, 2, start=50, dtype=dtype
    )  # DDP has rebuilt its buckets, residuals are not empty
    weights, momentum = torch.load(f"{folder}/model.pt", weights_only=True)
    ddp.module.load_state_dict(weights)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(momentum)
    gradwire.load(wire, folder)
    models.train(ddp, rank, 4, start=4, optimizer=optimizer, dtype=dtype)
    stats = wire.stats()
    wire.close()
    return models.flat(ddp).numpy().tobytes(), stats.bytes_sent, stats.achieved_density


CASES = {
    "randk, own seeds, bf16 parameters": {
        "method": "randk",
        "options": {"shared": False},
        "density": 0.02,
        "dtype": torch.bfloat16,
    },
    "exdyna": {"method": "exdyna", "density": 0.05},
    "deft, momentum": {
        "method": "deft",
        "density": 0.05,
        "momentum": 0.9,
        "nesterov": True,
        "clip": 0.5,
    },
    "topk, bf16 values, warm-up": {
        "values": "bf16",
        "dense_steps": 2,
        "warmup": (0.1, 0.05),
        "warmup_steps": 2,
    },
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_resumed_is_bit_equal(ranks, tmp_path, fields):
    whole = ranks.run(2, unbroken, fields)
    parts = ranks.run(2, resumed, fields, str(tmp_path), {})
    assert [w[0] for w in whole] == [p[0] for p in parts]
    assert whole[0][1:] == parts[0][1:], "counters do not continue"
    assert len({w[0] for w in whole}) == 1


def test_other_bundles_and_buckets_after_loading(ranks, tmp_path):
    whole = ranks.run(2, unbroken, {})
    other = {"bundle_mb": 1.0, "ddp": {"bucket_cap_mb": 25}}
    parts = ranks.run(2, resumed, {}, str(tmp_path), other)
    assert [w[0] for w in whole] == [p[0] for p in parts]


def kept(wire):
    """Residual and momentum of every parameter."""
    skipped, out = wire.was_skipped(), {}
    for bundle in wire.bundles:
        for slot in bundle.slots:
            out[slot.name] = wire.residual(slot.name)
            if bundle.velocity is not None:
                out[f"m of {slot.name}"] = bundle.view(bundle.momentum(skipped), slot).clone()
    return out


def saved(rank, folder, **fields):
    ddp, wire = models.wrapped(**fields)
    models.train(ddp, rank, 3)
    gradwire.save(wire, folder)
    total = kept(wire)
    wire.close()
    return total


def saved_with_momentum(rank, folder):
    return saved(rank, folder, momentum=0.9)


def loaded(rank, folder, **fields):
    ddp, wire = models.wrapped(seed=5, **fields)
    gradwire.load(wire, folder)
    total = kept(wire)
    models.train(ddp, rank, 2)
    wire.close()
    return total, models.flat(ddp).numpy().tobytes()


def loaded_with_momentum(rank, folder):
    return loaded(rank, folder, momentum=0.9, bundle_mb=1.0)


def saved_in_parts(rank, folder):
    return saved(rank, folder, method="exdyna", density=0.05)


def loaded_in_parts(rank, folder):
    return loaded(rank, folder, method="exdyna", density=0.05)


@pytest.mark.parametrize(
    ("old", "new", "save", "load", "parts"),
    [
        (4, 2, saved, loaded, 6),
        (4, 2, saved_with_momentum, loaded_with_momentum, 12),
        (2, 3, saved_with_momentum, loaded_with_momentum, 12),
        (2, 3, saved_in_parts, loaded_in_parts, 6),
    ],
    ids=["residual", "momentum", "momentum to more", "exdyna"],
)
def test_another_world_size_keeps_the_mean(ranks, tmp_path, old, new, save, load, parts):
    before = ranks.run(old, save, str(tmp_path))
    after = ranks.run(new, load, str(tmp_path))
    assert len({p for _, p in after}) == 1
    assert len(before[0]) == parts
    for name in before[0]:
        then = torch.stack([part[name] for part in before]).double().mean(0)
        now = torch.stack([part[name] for part, _ in after]).double().mean(0)
        assert then.norm() > 0
        torch.testing.assert_close(now, then, rtol=1e-6, atol=1e-9)


def saved_after_skips(rank, folder):
    ddp, wire = models.wrapped()
    for step in range(3):
        ddp(models.data(rank, step)).square().mean().backward()
        if step:
            wire.skip_step()
    gradwire.save(wire, folder)
    skipped = wire.stats().skipped
    wire.close()
    return skipped


def skipped_before(rank, folder):
    ddp, wire = models.wrapped(seed=5)
    gradwire.load(wire, folder)
    skipped = wire.stats().skipped
    models.train(ddp, rank, 2)
    after = wire.stats().skipped
    wire.close()
    return skipped, after


@pytest.mark.parametrize("new", [2, 3])
def test_a_skip_before_loading_is_counted_once(ranks, tmp_path, new):
    assert ranks.run(2, saved_after_skips, str(tmp_path)) == [2, 2]
    assert ranks.run(new, skipped_before, str(tmp_path)) == [(2, 2)] * new


def test_momentum_is_not_dropped_on_loading():
    """A state with momentum needs a wire with momentum; the other way round it starts at rest."""
    g = [torch.randn(100) for _ in range(2)]
    plain, heavy = (gradwire.VirtualCluster(2, density=0.1, momentum=m) for m in (0.0, 0.9))
    for cluster in (plain, heavy):
        cluster.average(g)
    with pytest.raises(StateError, match=r"momentum=0: attach with momentum=0\.9"):
        plain.load_state_dict(heavy.state_dict())
    wrong = heavy.state_dict()["workers"][0]
    wrong["velocity"] = {"gradient": torch.zeros(99)}
    with pytest.raises(StateError, match=r"velocity of 'gradient' has shape \(99,\)"):
        heavy._states[0].load_state_dict(wrong)
    heavy.load_state_dict(plain.state_dict())
    assert float(heavy._states[0].bundles[0].velocity.norm()) == 0
    assert torch.equal(heavy.residual(0), plain.residual(0))


@pytest.fixture
def cluster():
    cluster = gradwire.VirtualCluster(2, density=0.1)
    cluster.average([torch.randn(100), torch.randn(100)])
    return cluster


def changed(saved, field, value):
    return saved | {"delivered": [saved["delivered"][0] | {field: value}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"version": 7}, "state version is 7, this gradwire reads version 1"),
        (lambda s: [], "state version is 'list'"),
        (lambda s: {k: v for k, v in s.items() if k != "residual"}, "no entry 'residual'"),
        (lambda s: {k: v for k, v in s.items() if k != "memory"}, "no entry 'memory'"),
        (lambda s: s | {"residual": {}}, r"misses 1 parameters of this model: \['gradient'\]"),
        (
            lambda s: s | {"residual": s["residual"] | {"x": torch.zeros(1)}},
            r"has 1 parameters this model has not: \['x'\]",
        ),
        (
            lambda s: s | {"residual": {"gradient": torch.zeros(99)}},
            r"residual of 'gradient' has shape \(99,\), the model's is \(100,\)",
        ),
        (lambda s: s | {"bundles": [[]]}, "do not hold each parameter once"),
        (lambda s: s | {"world_size": 3}, "rank 0 of 3, this is rank 0 of 2"),
        (lambda s: s | {"steps": "3"}, "steps must be a whole number of at most .*, got '3'"),
        (lambda s: s | {"counts": {"sent": 1.5}}, "counts must be whole numbers by name"),
        (lambda s: s | {"scale": 2.0}, "scale must be one fp32 number above 0, got float"),
        (
            lambda s: s | {"memory": [{"a": 1}]},
            "memory of the bundle of .* must be tensors",
        ),
        (lambda s: s | {"memory": []}, "than of entries of 'memory'"),
        (
            lambda s: s | {"residual": {"gradient": torch.zeros(100).double()}},
            "residual of 'gradient' must be an fp32 tensor, got float64",
        ),
        (
            lambda s: s | {"residual": {"gradient": torch.tensor([0.0, float("nan")] * 50)}},
            "residual of 'gradient' holds 50 values that are not finite",
        ),
        (lambda s: changed(s, "indices", torch.tensor([-1])), "indices must be from 0 to 128"),
        (
            lambda s: changed(s, "values", torch.zeros(3)),
            "values must be 10 of fp32, got float32",
        ),
        (lambda s: changed(s, "loss", torch.zeros(3)), "loss must be 129 of fp32, got float32 of"),
        (
            lambda s: changed(s, "masked", torch.zeros(3)),
            "masked must be from 0 to 128, got",
        ),
        (lambda s: changed(s, "held", [[120, torch.zeros(9)]]), "where in 128 they begin"),
        (lambda s: changed(s, "ok", None), "does not say whether it was finite"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(cluster, change, message):
    state = cluster._states[0]
    before = state.residual("gradient")
    with pytest.raises(StateError, match=message):
        state.load_state_dict(change(state.state_dict()))
    assert torch.equal(before, state.residual("gradient"))


def test_a_cluster_is_loaded_whole_or_not_at_all(cluster):
    before = [cluster.residual(rank) for rank in range(2)]
    saved = copy.deepcopy(cluster.state_dict())
    saved["workers"][0]["residual"]["gradient"] += 1
    saved["workers"][1]["delivered"][0]["indices"][0] = 4000
    with pytest.raises(StateError, match="indices must be from 0 to 128, got int32 of shape"):
        cluster.load_state_dict(saved)
    assert all(torch.equal(before[rank], cluster.residual(rank)) for rank in range(2))
    with pytest.raises(StateError, match="'workers': "):
        cluster.load_state_dict({})


def test_bundles_that_mix_dense_parameters_and_others_are_refused():
    """The rule of a bundle's first parameter would quietly hold for all of it."""
    saved = {"bundles": [["a", "b"]], "memory": [{}], "delivered": [None], "world_size": 2}
    slots = {name: Slot(name, (4,), (1,), torch.float32, numel=4) for name in ("a", "b")}
    check_bundles(saved, slots, ())
    check_bundles(saved, slots, ("*",))
    with pytest.raises(StateError, match="attach with the dense patterns it was saved with"):
        check_bundles(saved, slots, ("b",))


def damaged(rank, folder):
    _, wire = models.wrapped()
    try:
        gradwire.load(wire, folder)
    except StateError as error:
        return str(error)
    finally:
        wire.close()
    return "loaded"


def test_a_damaged_folder_is_refused(ranks, tmp_path):
    assert "holds no checkpoint" in ranks.run(1, damaged, str(tmp_path))[0]
    ranks.run(1, saved, str(tmp_path))
    manifest = json.loads((tmp_path / "gradwire.json").read_text())
    part = tmp_path / manifest["parts"][0]["file"]
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(bytes(content))
    assert "sha256" in ranks.run(1, damaged, str(tmp_path))[0]
    part.unlink()
    assert "is missing" in ranks.run(1, damaged, str(tmp_path))[0]
    (tmp_path / "gradwire.json").write_text("{")
    assert "is damaged" in ranks.run(1, damaged, str(tmp_path))[0]


def test_saving_again_leaves_one_checkpoint(ranks, tmp_path):
    ranks.run(2, saved, str(tmp_path))
    ranks.run(2, unbroken_then_saved, str(tmp_path))
    names = sorted(p.name for p in tmp_path.iterdir())
    assert [re.sub("-[0-9a-f]{8}", "", name) for name in names] == [
        "gradwire-step5-rank0.pt",
        "gradwire-step5-rank1.pt",
        "gradwire.json",
    ]


def unbroken_then_saved(rank, folder):
    ddp, wire = models.wrapped()
    models.train(ddp, rank, 5)
    gradwire.save(wire, folder)
    wire.close()


def saved_twice(rank, folder, error):
    """The second save of the same step fails on rank 1: what both said, and whether it loads."""
    ddp, wire = models.wrapped()
    models.train(ddp, rank, 3)
    gradwire.save(wire, folder)
    before = kept(wire)
    wire.skip_step()

    def fails():
        raise error

    if rank == 1:
        wire.state_dict = fails
    try:
        gradwire.save(wire, folder)
    except GradwireError as refusal:
        said = str(refusal)
    gradwire.load(wire, folder)
    after = kept(wire)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    wire.close()
    return said


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("out of memory")], ids=str
)
def test_a_second_save_of_a_step_that_fails_leaves_the_first(ranks, tmp_path, error):
    others, own = ranks.run(2, saved_twice, str(tmp_path), error)
    assert others == "the checkpoint was not written: rank 1 failed"
    assert str(error.args[-1]) in own
    assert own.endswith("The last checkpoint is untouched")


class Sliced(torch.nn.Module):
    """A parameter that is a part of something larger."""

    def __init__(self):
        super().__init__()
        self.v = torch.nn.Parameter(torch.randn(31, 20))
        self.w = torch.nn.Parameter(torch.randn(20, 16)[:, :8])

    def forward(self, x):
        return x @ self.v @ self.w


def parts_of_something_larger(rank):
    torch.manual_seed(0)
    net = Sliced()
    x = models.data(rank, 0)
    own = dict(zip("vw", torch.autograd.grad(net(x).square().mean(), [net.v, net.w]), strict=True))
    ddp, wire = models.wrapped(net=net)
    ddp(x).square().mean().backward()
    wire.load_state_dict(wire.state_dict())
    off = sum(int(((wire.residual(n) - own[n]).abs() > 1e-6).sum()) for n in own)
    wire.close()
    return net.w.stride(), off


def test_a_parameter_with_gaps_is_kept_without_them(ranks):
    for stride, off in ranks.run(2, parts_of_something_larger):
        assert stride == (16, 1)
        assert off <= 2 * 7, "only what was sent, one in a hundred, differs from the gradient"


@pytest.mark.parametrize("call", [gradwire.save, gradwire.load])
def test_what_is_no_wire_is_named(call, tmp_path):
    with pytest.raises(ConfigError, match="takes the wire that attach returned, got Linear"):
        call(torch.nn.Linear(2, 2), tmp_path)
