"""Plain folders: forged parts, two wires in one folder, and saves that fail."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import ConfigError, GradwireError, StateError
from gradwire.state.saved import check_bundles
from gradwire.state.saved import save_parts as checkpoint
from gradwire.state.saved.manifest import MANIFEST
from tests.integrate.fsdp import models as sharded_models
from tests.integrate.models import train as _train
from tests.state.saved import forge


def wrapped(**fields):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(31, 7), nn.Linear(7, 5))
    fields = {"density": 0.1, "dense_below": 0, **fields}
    ddp = DistributedDataParallel(net)
    return ddp, gradwire.attach(ddp, **fields)


def trained(rank, steps, start=0, **fields):
    ddp, wire = wrapped(**fields)
    _train(ddp, rank, steps, start=start)
    return ddp, wire


def everything(wire):
    names = [slot.name for bundle in wire.bundles for slot in bundle.slots]
    kept = [wire.residual(name).numpy().tobytes() for name in names]
    return wire.steps, names, kept, wire.identity, wire.config


def attempt(wire, path):
    before, began = everything(wire), time.monotonic()
    try:
        gradwire.load(wire, path)
    except StateError as error:
        return str(error), everything(wire) == before, time.monotonic() - began
    except BaseException as error:
        return f"{type(error).__name__} {error}", None, 0
    return "loaded", None, 0


def saved(rank, folder):
    for name, start, steps in (("good", 0, 2), ("other", 7, 2), ("later", 0, 3)):
        _, wire = trained(rank, steps, start=start)
        gradwire.save(wire, f"{folder}/{name}")
        wire.close()


def _delivered(saved):
    saved["delivered"][0]["values"][0] = float("nan")


def _foreign(name):
    """Rank 1's part of another checkpoint, under a manifest that vouches for it."""

    def change(folder):
        theirs = forge.part_of(folder.parent / name, 1)
        forge.part_of(folder, 1).write_bytes(theirs.read_bytes())
        forge.reseal(folder)

    return change


def _no_run(name):
    """The same, and the manifest says of no run that it is."""

    def change(folder):
        _foreign(name)(folder)
        content = forge.manifest_of(folder)
        del content["run"]
        forge.write_manifest(folder, content)

    return change


def _part(change):
    return lambda folder: forge.change_part(folder, 1, change)


def _turned(saved):
    saved["bundles"] = [names[::-1] for names in saved["bundles"]]


def _both_ways(folder):
    """A manifest of both kinds, so that nobody looks at the names of the parts."""
    content = forge.manifest_of(folder)
    good = forge.part_of(folder, 1)
    good.rename(folder.parent / "outside.pt")
    content["parts"][1]["file"] = "../outside.pt"
    forge.write_manifest(folder, content | {"files": {}})


def _swapped(folder):
    one, two = (forge.part_of(folder, rank) for rank in range(2))
    a, b = one.read_bytes(), two.read_bytes()
    one.write_bytes(b)
    two.write_bytes(a)
    forge.reseal(folder)


def _pipe(folder):
    file = forge.part_of(folder, 1)
    file.unlink()
    os.mkfifo(file)


def _manifest_pipe(folder):
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)


def _steps(folder):
    for rank in range(2):
        forge.change_part(folder, rank, lambda saved: saved.update(steps=2**62))
    forge.reseal(folder, steps=2**62)


def _residual(change):
    def forged(saved):
        saved["residual"]["0.weight"] = change(saved["residual"]["0.weight"])

    return _part(forged)


def _one(value):
    return lambda tensor: tensor.index_fill(0, torch.tensor([0]), value)


def _transposed(saved):
    saved["strides"]["0.weight"] = [1, 7]


def _bomb(folder):
    forge.part_of(folder, 1).write_bytes(forge.bytes_of(forge.Bomb(folder / "ran")))
    forge.reseal(folder)


FORGED = {
    "nan delivered": (_part(_delivered), "values holds values that are not finite"),
    "part of another run": (_foreign("other"), "it is of another checkpoint"),
    "part of a later step": (_foreign("later"), "it is of another checkpoint"),
    "part of another run without a name": (_no_run("other"), "differ in their run"),
    "parts changed places": (_swapped, "this state belongs to rank"),
    "order of parameters": (_part(_turned), "differ in their order of parameters"),
    "other config": (_part(lambda s: s["config"].update(density=0.5)), "differ in their config"),
    "steps": (_steps, "steps must be a whole number of at most 2**48"),
    "steps of one": (_part(lambda s: s.update(steps=1)), "it is of another checkpoint"),
    "path outside": (_both_ways, "gradwire.json is damaged"),
    "pipe": (_pipe, "is not a file"),
    "manifest is a pipe": (_manifest_pipe, "gradwire.json is not a file"),
    "stretched memory": (
        _part(lambda s: s.update(memory=[{"a": forge.stretched()}])),
        "of which it has not the values",
    ),
    "stretched indices": (
        _part(lambda s: s["delivered"][0].update(indices=forge.stretched(torch.int32))),
        "of which it has not the values",
    ),
    "no values": (
        _part(lambda s: s.update(memory=[{"a": torch.zeros(2**40, device="meta")}])),
        "",
    ),
    "lists of lists": (
        _part(lambda s: s.update(version=forge.deep_list())),
        "or lists 32 deep",
    ),
    "bomb": (_bomb, "rank1"),
    "whole numbers": (_residual(lambda t: t.int()), "must be an fp32 tensor, got int32 of"),
    "complex": (_residual(lambda t: t.cfloat()), "must be an fp32 tensor, got complex64 of"),
    "infinite": (_residual(_one(float("inf"))), "residual of '0.weight' holds 31 values that are"),
    "too large": (_residual(_one(1e38)), "residual of '0.weight' holds values above 2**116"),
    "delivered too much": (
        _part(lambda s: s["delivered"][0].update(values=torch.full((26,), -1e38))),
        "values holds values above 2**116",
    ),
    "complex memory": (
        _part(lambda s: s["memory"][0].update(x=torch.zeros(3).cfloat())),
        "the memory 'x' of the bundle of '1.bias' cannot be complex64 of shape (3,)",
    ),
    "a whole number for a level": (
        _part(lambda s: s["memory"][0].update(threshold=torch.tensor(3))),
        "the memory 'threshold' of the bundle of '1.bias' cannot be int64 of shape ()",
    ),
    "a level below 0": (
        _part(lambda s: s["memory"][0].update(theta=torch.tensor(-3.0))),
        "the memory 'theta' of the bundle of '1.bias' must be from 0 to",
    ),
    "counts": (_part(lambda s: s["counts"].update(sent=2**62)), "the state's count 'sent' is 46"),
    "counts below 0": (
        _part(lambda s: s["counts"].update(sent=-1)),
        "counts must be whole numbers",
    ),
    "more skipped than steps": (
        _part(lambda s: s["counts"].update(skipped=3)),
        "the state's count 'skipped' is 3, more than 2",
    ),
    "skipped on one rank": (_part(lambda s: s.update(skipped=True)), "differ in their last step"),
    "delivered by one rank": (
        _part(lambda s: s.update(delivered=[None] * len(s["delivered"]))),
        "differ in their last step",
    ),
    "foreign memory order": (_part(_transposed), "differ in their order of parameters"),
}


def outcomes(rank, folder):
    _, wire = trained(rank, 1, start=50)
    out = {}
    for name, (change, _) in FORGED.items():
        path = Path(folder) / name / "folder"
        if rank == 0:
            for source in ("good", "other", "later"):
                forge.copied(Path(folder) / source, path.parent / source)
            (path.parent / "good").rename(path)
            change(path)
        dist.barrier()
        out[name] = (*attempt(wire, path), (path / "ran").exists())
        dist.barrier()
    gradwire.load(wire, f"{folder}/good")
    out["good"] = wire.steps
    wire.close()
    return out


@pytest.fixture(scope="module")
def said(ranks, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("plain"))
    ranks.run(2, saved, folder)
    return ranks.run(2, outcomes, folder)


@pytest.mark.parametrize("name", FORGED)
def test_a_checksum_made_anew_does_not_help(said, name):
    for text, unchanged, seconds, ran in (each[name] for each in said):
        assert FORGED[name][1] in text
        assert unchanged, text
        assert "\n" not in text
        assert seconds < 10
        assert not ran


def test_the_good_one_is_loaded(said):
    assert [each["good"] for each in said] == [2, 2]


def auto(rank, folder):
    """A choice that cannot be, for a wire that has still to choose."""
    _, wire = trained(rank, 2)
    gradwire.save(wire, folder)
    wire.close()
    _, wire = trained(rank, 1, method="auto")
    if rank == 0:
        change = {"reason": "it was best"}
        for part in range(2):
            forge.change_part(Path(folder), part, lambda saved: saved.update(change))
        forge.change_part(Path(folder), 1, lambda s: s["config"].update(density=-1.0))
    dist.barrier()
    said = attempt(wire, folder)
    wire.close()
    return said


def test_a_choice_that_cannot_be_is_refused_on_every_rank(ranks, tmp_path):
    for text, unchanged, _ in ranks.run(2, auto, str(tmp_path)):
        assert "the state's config cannot be: ConfigError: density must be in (0, 1]" in text
        assert unchanged


def attempt_save(wire, path):
    try:
        gradwire.save(wire, path)
    except GradwireError as error:
        return type(error).__name__, str(error)
    return "saved", ""


def shared(rank, folder):
    """Wires that save into one folder, of both kinds."""
    out = {}
    path = Path(folder) / "plain"
    first, second = trained(rank, 2)[1], trained(rank, 3, start=5)[1]
    gradwire.save(first, path)
    dist.barrier()
    before = forge.tree(path)
    dist.barrier()
    out["second"] = attempt_save(second, path)
    dist.barrier()
    out["unharmed"] = forge.tree(path) == before
    out["first again"] = attempt_save(first, path)
    gradwire.load(second, path)
    out["loaded"] = attempt_save(second, path)
    out["elsewhere"] = attempt_save(second, Path(folder) / "elsewhere")
    dist.barrier()
    out["two names"] = first.identity != second.identity
    third = trained(rank, 1)[1]
    out["one is still in use"] = attempt_save(third, path)
    first.close()
    gradwire.load(third, path)
    out["closed"] = attempt_save(third, path)
    out["taken over"] = attempt_save(second, path)
    second.close()
    third.close()

    one, two = (_sharded(seed) for seed in (0, 1))
    path = Path(folder) / "sharded"
    gradwire.save(one, path)
    dist.barrier()
    before = forge.tree(path)
    dist.barrier()
    out["second sharded"] = attempt_save(two, path)
    dist.barrier()
    out["unharmed sharded"] = forge.tree(path) == before
    dist.barrier()
    out["first sharded again"] = attempt_save(one, path)
    one.close()
    out["closed sharded"] = attempt_save(two, path)
    two.close()
    return out


def _sharded(seed):
    net, wire = sharded_models.wrapped(sharded_models.mesh(replicas=2), seed=seed)
    sharded_models.train(net, 1)
    return wire


def test_two_wires_in_one_folder_are_told_apart(ranks, tmp_path):
    words = "holds the checkpoint of another wire of this run"
    for out in ranks.run(2, shared, str(tmp_path)):
        for name in ("second", "loaded", "one is still in use", "taken over", "second sharded"):
            kind, text = out[name]
            assert kind == ConfigError.__name__, name
            assert words in text
            assert "give each wire a folder of its own" in text
        for name in ("first again", "elsewhere", "closed", "first sharded again"):
            assert out[name] == ("saved", ""), name
        assert out["two names"]
        assert out["closed sharded"] == ("saved", "")
        assert out["unharmed"]
        assert out["unharmed sharded"]


def _full(*args, **kw):
    raise OSError(28, "No space left on device")


def failing(rank, folder):
    """Saves that fail in several ways, each at another step; what was there stays, to the byte."""
    path, out = Path(folder), {}
    ddp, wire = trained(rank, 2)
    gradwire.save(wire, path)
    before, kept = forge.tree(path), everything(wire)
    usual = checkpoint.replace_file, os.replace, checkpoint.write_manifest
    dist.barrier()

    def directory(source, target):
        if str(source).endswith(".new"):
            raise IsADirectoryError(21, "Is a directory")
        usual[1](source, target)

    for turn, way in enumerate(("disk", "disk", "directory", "manifest", "manifest")):
        _train(ddp, rank, 1, start=20 + turn)
        if way == "disk" and rank == 1:
            checkpoint.replace_file = _full
        if way == "directory" and rank == 1:
            os.replace = directory
        if way == "manifest":
            checkpoint.write_manifest = _full
        said = attempt_save(wire, path)
        checkpoint.replace_file, os.replace, checkpoint.write_manifest = usual
        dist.barrier()
        out[f"{way} {turn}"] = (*said, forge.tree(path) == before)
        dist.barrier()
    gradwire.load(wire, path)
    out["loads"] = everything(wire) == kept
    _train(ddp, rank, 1, start=30)
    gradwire.save(wire, path)
    dist.barrier()
    out["files"] = len(forge.tree(path))
    wire.close()
    return out


def test_saves_that_fail_leave_no_parts_of_any_rank(ranks, tmp_path):
    for out in ranks.run(2, failing, str(tmp_path)):
        assert out.pop("loads")
        assert out.pop("files") == 3
        assert len(out) == 5
        for name, (kind, text, unchanged) in out.items():
            assert kind == "ExchangeError", name
            assert "rank" in text
            assert unchanged, name


def half(rank, folder):
    """One rank cannot write the manifest, the other has, and puts the old one back."""
    path = Path(folder)
    ddp, wire = trained(rank, 2)
    gradwire.save(wire, path)
    _train(ddp, rank, 1, start=20)
    usual = checkpoint.write_manifest
    if rank == 1:
        checkpoint.write_manifest = _full
    said = attempt_save(wire, path)
    checkpoint.write_manifest = usual
    dist.barrier()
    gradwire.load(wire, path)
    steps = wire.steps
    wire.close()
    return said[0], steps


def test_a_manifest_that_one_rank_has_written_is_put_back(ranks, tmp_path):
    assert ranks.run(2, half, str(tmp_path)) == [("ExchangeError", 2)] * 2


def nowhere(rank, folder):
    """A file stands where the folder should be, for one rank."""
    path = Path(folder) / f"rank{rank}"
    if rank == 1:
        path.write_text("a file")
    _, wire = trained(rank, 1)
    said = attempt_save(wire, path)
    left = forge.tree(path) if rank == 0 else {}
    wire.close()
    return said, left


def test_a_folder_that_cannot_be_made_is_said_on_every_rank(ranks, tmp_path):
    for (kind, _), left in ranks.run(2, nowhere, str(tmp_path)):
        assert kind == "ExchangeError"
        assert left == {}


REMEMBERS = [
    *({"method": name} for name in ("deft", "exdyna", "micro", "randk", "sidco", "threshold")),
    {"exchange": "oktopk"},
    {"exchange": "sketched", "rows": 1, "columns": 820},
    {"exchange": "owner"},
    {"values": "bf16", "rounding": "stochastic"},
]


@pytest.mark.parametrize("fields", REMEMBERS, ids=str)
def test_what_methods_and_exchanges_remember_has_the_form_that_is_checked(fields):
    """Every tensor in the memory is in the table, and is loaded again."""
    cluster, saved = remembering(fields)
    memory = saved["workers"][1]["memory"][0]
    assert memory
    assert memory.keys() <= check_bundles.MEMORIES.keys()
    cluster.load_state_dict(saved)
    for name, value in memory.items():
        kept, memory[name] = value, value.cfloat()
        with pytest.raises(StateError, match=f"the memory {name!r} of the bundle"):
            cluster.load_state_dict(saved)
        memory[name] = kept


def remembering(fields):
    cluster = gradwire.VirtualCluster(2, density=0.05, **fields)
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        cluster.average([torch.randn(4096, generator=draw) for _ in range(2)])
    return cluster, cluster.state_dict()


@pytest.mark.parametrize("fields", REMEMBERS, ids=str)
def test_what_ranks_remember_alike_is_compared(fields):
    """With other seeds, steps or parts they would send each other different entries."""
    cluster, saved = remembering(fields)
    before = cluster.residual(1)
    first, memory = (worker["memory"][0] for worker in saved["workers"])
    alike = {name for name, value in memory.items() if torch.equal(value, first[name])}
    assert alike - {"pace", "calls", "stages"} == set(check_bundles.ALIKE) & memory.keys()
    for name in set(check_bundles.ALIKE) & memory.keys():
        for forged in (memory[name] - 1, None):
            kept = memory.pop(name)
            if forged is not None:
                memory[name] = forged.clamp(0)
            words = "ranks 0 and 1 differ in their methods' memory"
            with pytest.raises(StateError, match=words):
                cluster.load_state_dict(saved)
            memory[name] = kept
    assert torch.equal(cluster.residual(1), before)


@pytest.mark.parametrize("name", ["counts", "starts", "oktopk.regions"])
def test_places_beyond_the_bundle_are_refused(name):
    fields = {"exchange": "oktopk"} if "." in name else {"method": "deft"}
    cluster, saved = remembering({"method": "exdyna"} if name == "starts" else fields)
    for worker in saved["workers"]:
        worker["memory"][0][name].view(-1)[-1] = 4097
    with pytest.raises(StateError, match=f"the memory '{name}' .* must be from 0 to 4096"):
        cluster.load_state_dict(saved)


def test_half_of_what_oktopk_remembers_is_none():
    cluster, saved = remembering({"exchange": "oktopk"})
    for worker in saved["workers"]:
        del worker["memory"][0]["oktopk.threshold"]
    cluster.load_state_dict(saved)
    assert cluster.average([torch.randn(4096) for _ in range(2)]).isfinite().all()
