"""A sharded folder that is damaged or forged: refused by name on every rank, nothing changed."""

import io
import pickle
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

import gradwire
from gradwire.errors import ExchangeError, GradwireError, StateError
from gradwire.state.saved.dcp_reader import METADATA
from gradwire.state.saved.files import replace_file
from gradwire.state.saved.manifest import MANIFEST
from tests.integrate.fsdp import models
from tests.state.saved import forge

REST = "replica1.shard0"
VECTOR = "replica1.residual.first.weight"


def trained(steps=1, start=0, seed=0, **fields):
    """Two replicas of one shard, on two ranks."""
    net, wire = models.wrapped(models.mesh(replicas=2), seed=seed, **fields)
    models.train(net, steps, start=start)
    return net, wire


def everything(wire):
    """All that a load could change, as bytes."""
    (part,) = wire.state_dict().values()
    return [
        part[f"shard{wire.shard}"],
        {n: t.to_local().numpy().tobytes() for n, t in part["residual"].items()},
        [slot.name for bundle in wire.bundles for slot in bundle.slots],
        wire.identity,
    ]


def made(rank, folder):
    """A checkpoint, one of another step, one of another run, and one that the user saved."""
    net, wire = trained(2)
    gradwire.save(wire, f"{folder}/good")
    models.train(net, 1, start=2)
    gradwire.save(wire, f"{folder}/later")
    dcp.save({"wire": wire, "extra": torch.ones(3)}, checkpoint_id=f"{folder}/own")
    wire.close()
    _, wire = trained(2, start=7)
    gradwire.save(wire, f"{folder}/other")
    wire.close()


def _other(name, of=1):
    """One rank's file of another checkpoint in the place of its own."""

    def change(folder):
        theirs = forge.distcp_of(folder.parent / name, of)
        forge.distcp_of(folder, 1).write_bytes(theirs.read_bytes())

    return change


def _foreign(name, of=1):
    """The same, of which the manifest knows."""

    def change(folder):
        _other(name, of)(folder)
        forge.reseal(folder)

    return change


def _spoil(field, value):
    return lambda folder: forge.change_rest(folder, REST, lambda rest: rest.update({field: value}))


def _vector(change):
    def forged(folder):
        tensor = torch.load(io.BytesIO(forge.entry(folder, VECTOR)), weights_only=True)
        forge.replace_entry(folder, VECTOR, forge.bytes_of(change(tensor)))

    return forged


def _one(value):
    return _vector(lambda tensor: tensor.index_fill(0, torch.tensor([3]), value))


def _steps(folder):
    for ending in ("replica0.shard0", REST):
        forge.change_rest(folder, ending, lambda rest: rest.update(steps=2**62))
    forge.reseal(folder, steps=2**62)


def _turned(rest):
    rest["bundles"] = [names[::-1] for names in rest["bundles"]]


def _size(folder):
    key = forge.key_of(folder, VECTOR)

    def change(found):
        whole = torch.Size((2**40, 13))
        found.state_dict_metadata[key].size = whole
        found.state_dict_metadata[key].chunks[0].sizes = whole

    forge.change_metadata(folder, change)


def _path(path):
    def change(found):
        for place in found.storage_data.values():
            place.relative_path = path

    return lambda folder: forge.change_metadata(folder, change)


def _pipe(folder):
    import os

    forge.distcp_of(folder, 1).unlink()
    os.mkfifo(folder / next(n for n in forge.manifest_of(folder)["files"] if n.startswith("__1")))


def _bomb(where):
    def change(folder):
        bomb = forge.Bomb(folder / "ran")
        if where == "metadata":
            (folder / METADATA).write_bytes(pickle.dumps(bomb))
        elif where == "planner":
            forge.change_metadata(folder, lambda found: setattr(found, "planner_data", bomb))
        elif where == "rest":
            forge.replace_entry(folder, REST, forge.bytes_of(forge.bytes_of(bomb)))
        elif where == "raw":
            forge.replace_entry(folder, REST, pickle.dumps(bomb))
        else:
            forge.replace_entry(folder, where, forge.bytes_of(bomb))
        forge.reseal(folder)

    return change


def _version(folder):
    forge.write_manifest(folder, forge.manifest_of(folder) | {"version": 3})


def _plain(folder):
    part = {"file": "gradwire-step1-rank0.pt", "sha256": ""}
    forge.write_manifest(folder, {"version": 2, "world_size": 1, "parts": [part]})


BOMBS = {
    "bomb in place of the metadata": (_bomb("metadata"), "it asks for posix.system"),
    "bomb in the metadata": (_bomb("planner"), "it asks for posix.system"),
    "bomb in an entry of bytes": (_bomb(REST), "cannot be read"),
    "bomb in the bytes of an entry": (_bomb("rest"), "the state of one rank is damaged"),
    "bomb without a wrapping": (_bomb("raw"), "cannot be read"),
    "bomb in a tensor": (_bomb(VECTOR), "cannot be read"),
}
DAMAGED = {
    "bit": (lambda f: forge.flip(forge.distcp_of(f, 1)), "distcp is damaged: its sha256"),
    "bit in the metadata": (lambda f: forge.flip(f / METADATA), ".metadata is damaged: its sha256"),
    "part of another step": (_other("later"), "distcp is damaged: its sha256"),
    "metadata cut off": (lambda f: forge.cut(f / METADATA), ".metadata is damaged: its sha256"),
    "part cut off": (lambda f: forge.cut(forge.distcp_of(f, 1)), "distcp is damaged: its sha256"),
    "part missing": (lambda f: forge.distcp_of(f, 1).unlink(), "is missing: copy every file"),
    "metadata missing": (lambda f: (f / METADATA).unlink(), ".metadata is not there"),
    "manifest missing": (lambda f: (f / MANIFEST).unlink(), "gradwire.json is not there"),
    "manifest cut off": (lambda f: forge.cut(f / MANIFEST), "gradwire.json is damaged"),
    "manifest of another version": (_version, "has version 3, this gradwire reads version 2"),
    "manifest of another kind": (_plain, "is of a model that is not sharded"),
    "empty folder": (lambda f: [p.unlink() for p in f.iterdir()], "gradwire.json is not there"),
    "pipe": (_pipe, "is not a file"),
}
FORGED = {
    "part of another run": (_foreign("other"), "it is of another checkpoint"),
    "part of a later step": (_foreign("later"), "it is of another checkpoint"),
    "part of another rank": (_foreign("good", 0), "what should be of replica 1, shard 0"),
    "steps": (_steps, "the state's steps must be a whole number of at most 2**48"),
    "other steps": (_spoil("steps", 1), "it is of another checkpoint"),
    "run": (_spoil("run", "x"), "it is of another checkpoint"),
    "order": (lambda f: forge.change_rest(f, REST, _turned), "ranks hold different checkpoints"),
    "nan": (
        _one(float("nan")),
        "residual of 'first.weight' holds 13 values that are not finite",
    ),
    "infinite": (
        _one(float("inf")),
        "residual of 'first.weight' holds 13 values that are not finite",
    ),
    "too large": (_one(1e38), "residual of 'first.weight' holds values above 2**116"),
    "whole numbers": (
        _vector(lambda tensor: tensor.int()),
        "replica1.residual.first.weight' cannot be int32",
    ),
    "complex": (
        _vector(lambda tensor: tensor.cfloat()),
        "replica1.residual.first.weight' cannot be complex64",
    ),
    "counts": (_spoil("counts", {"sent": 2**62}), "the state's count 'sent' is 46"),
    "complex memory": (
        _spoil("memory", [{"a": torch.zeros(3).cfloat()}] * 3),
        "cannot be complex64 of shape (3,)",
    ),
    "list": (lambda f: forge.change_rest(f, REST, lambda r: [r]), "is a list, not a dictionary"),
    "stretched tensor": (
        _spoil("memory", [{"a": forge.stretched()}]),
        "of which it has not the values",
    ),
    "lists of lists": (_spoil("counts", {"a": forge.deep_list()}), "or lists 32 deep"),
    "version of lists": (_spoil("version", forge.deep_list()), "or lists 32 deep"),
    "huge size": (_size, "cannot be read: ValueError"),
    "path": (_path("../good/x.distcp"), "is in no file of the folder"),
    "absolute path": (_path("/etc/x.distcp"), "is in no file of the folder"),
    **BOMBS,
}
GUARDED = {**DAMAGED, **FORGED}


def outcomes(rank, folder, base, cases):
    """Return every case's error, True if all is as before, the seconds, and programs that ran."""
    _, wire = trained(1, start=50)
    out = {}
    for name in cases:
        path = Path(folder) / f"{base} {name}"
        if rank == 0:
            forge.copied(Path(folder) / base, path)
            cases[name][0](path)
        dist.barrier()
        began = time.monotonic()
        out[name] = (*attempt(wire, path), time.monotonic() - began)
        dist.barrier()
        ran = (path / "ran").exists()
        out[name] = (*out[name], ran)
    # The wire is as good as before, and so is the checkpoint.
    gradwire.load(wire, f"{folder}/{base}")
    out["good"] = wire.steps
    wire.close()
    return out


def attempt(wire, path):
    before = everything(wire)
    try:
        gradwire.load(wire, path)
    except StateError as error:
        return str(error), everything(wire) == before
    except BaseException as error:
        return f"{type(error).__name__} {error}", None
    return "loaded", None


def guarded(rank, folder):
    return outcomes(rank, folder, "good", GUARDED)


def own(rank, folder):
    """The folder is one of dcp.save, without a manifest."""
    return outcomes(rank, folder, "own", BOMBS)


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded")
    ranks.run(2, made, str(path))
    return path


@pytest.fixture(scope="module")
def said(ranks, folder):
    return ranks.run(2, guarded, str(folder))


@pytest.fixture(scope="module")
def said_of_own(ranks, folder):
    return ranks.run(2, own, str(folder))


def check(said, name, words):
    """Both ranks raise StateError in one line; one has the words, the other names it or has too."""
    for text, unchanged, seconds, ran in (each[name] for each in said):
        assert words in text
        assert "\n" not in text
        assert len(text) < 1000
        assert unchanged, "something has changed"
        assert seconds < 10
        assert not ran, "the bomb went off"


@pytest.mark.parametrize("name", GUARDED)
def test_damage_is_refused_on_every_rank_and_changes_nothing(said, name):
    check(said, name, GUARDED[name][1])


@pytest.mark.parametrize("name", BOMBS)
def test_a_folder_of_the_users_own_does_not_run_either(said_of_own, name):
    check(said_of_own, name, BOMBS[name][1])


def test_the_undamaged_are_loaded(said, said_of_own):
    assert [each["good"] for each in said] == [2, 2]
    assert [each["good"] for each in said_of_own] == [3, 3]


def apart(rank, folder):
    """A folder of its own on every rank, and what differs between them."""
    _, wire = trained(1, start=50)
    out = []
    mine = Path(folder) / f"rank{rank}"
    for name in ("no folder", "other checkpoint", "no manifest", "same"):
        source = "later" if (name, rank) == ("other checkpoint", 1) else "good"
        if (name, rank) != ("no folder", 1):
            forge.copied(Path(folder) / source, mine / name)
        if (name, rank) == ("no manifest", 1):
            (mine / name / MANIFEST).unlink()
        out.append(attempt(wire, mine / name))
    wire.close()
    return out


def test_ranks_with_folders_that_differ_are_told_so(ranks, folder):
    said = ranks.run(2, apart, str(folder))
    for texts in zip(*said, strict=True):
        assert len({text.partition("/")[0] for text, _ in texts}) <= 2
    for rank, (none, other, bare, same) in enumerate(said):
        assert "no folder holds no checkpoint: gradwire.json is not there" in none[0]
        assert none[0].startswith("rank 1: ") == (rank == 0)
        assert other[0].endswith("ranks hold different checkpoints. Copy one to all.")
        assert "no manifest holds no checkpoint: gradwire.json is not there" in bare[0]
        assert [none[1], other[1], bare[1]] == [True] * 3
        assert same[0] == "loaded"


def other_counts(rank, folder):
    """With another number of replicas all parts are read: a bad one must not be averaged in."""
    net, wire = models.wrapped(models.mesh(replicas=1))
    models.train(net, 1)
    out = {}
    for name in ("part of another run", "part of another rank", "nan", "part missing"):
        path = Path(folder) / f"counts {name}"
        if rank == 0:
            forge.copied(Path(folder) / "good", path)
            GUARDED[name][0](path)
        dist.barrier()
        out[name] = attempt(wire, path)
    gradwire.load(wire, f"{folder}/good")
    out["steps"] = wire.steps
    wire.close()
    return out


def test_with_other_numbers_of_replicas_every_part_is_checked(ranks, folder):
    words = {
        "part of another run": "it is of another checkpoint",
        "part of another rank": "what should be of replica 1, shard 0",
        "nan": "that are not finite",
        "part missing": "is missing",
    }
    for said in ranks.run(2, other_counts, str(folder)):
        assert said.pop("steps") == 2
        for name, (text, unchanged) in said.items():
            assert words[name] in text
            assert unchanged


def failing(rank, folder):
    """Saves that fail on rank 1, then on rank 0 at the manifest; then one that does not."""
    import gradwire.state.saved.sharded as sharded

    net, wire = trained(2)
    path = Path(folder) / "kept"
    gradwire.save(wire, path)
    before, kept, said = forge.tree(path), everything(wire), []
    usual = sharded.Writer.write_data, sharded.write_manifest

    def full(*args, **kw):
        raise OSError(28, "No space left on device")

    dist.barrier()
    for attempt_ in range(5):
        models.train(net, 1, start=10 + attempt_)
        if attempt_ < 3 and rank == 1:
            sharded.Writer.write_data = full
        if attempt_ >= 3:
            sharded.write_manifest = full
        try:
            gradwire.save(wire, path)
        except GradwireError as error:
            said.append([type(error).__name__, str(error)])
        finally:
            sharded.Writer.write_data, sharded.write_manifest = usual
        dist.barrier()
        said[-1].append(forge.tree(path) == before)
        dist.barrier()
    gradwire.load(wire, path)
    # Counters come back in another order.
    said.append(everything(wire)[1:] == kept[1:] and wire.steps == 2)
    models.train(net, 1, start=30)
    gradwire.save(wire, path)
    dist.barrier()
    files = sorted(p.name for p in path.iterdir())
    wire.close()
    return said, files


def test_a_save_that_fails_leaves_the_last_checkpoint_and_nothing_else(ranks, folder):
    for said, files in ranks.run(2, failing, str(folder)):
        for kind, text, unchanged in said[:5]:
            assert kind == "ExchangeError"
            assert re.search("rank [01] could not write .*: No space left on device", text)
            assert unchanged
        assert said[5]
        assert len(files) == 4, files


def first_fails(rank, folder):
    """The first save into a folder: nothing is left that looks like a checkpoint."""
    import gradwire.state.saved.sharded as sharded

    _, wire = trained(1)
    usual = sharded.write_manifest
    sharded.write_manifest = lambda *args: replace_file(Path("/nowhere/x"), print)
    try:
        gradwire.save(wire, folder)
    except ExchangeError as error:
        text = str(error)
    finally:
        sharded.write_manifest = usual
    dist.barrier()
    left = forge.tree(folder)
    wire.close()
    return text, left


def test_a_first_save_that_fails_leaves_nothing(ranks, tmp_path):
    for text, left in ranks.run(2, first_fails, str(tmp_path / "new")):
        assert "No such file" in text
        assert left == {}


def two_shards(rank, folder):
    """One replica of two shards: their bundles differ, and their parts are not exchanged."""
    net, wire = models.wrapped(models.mesh(replicas=1))
    models.train(net, 2)
    path = Path(folder) / "two"
    gradwire.save(wire, path)
    models.train(net, 1, start=5)
    if rank == 0:
        swapped = forge.copied(path, Path(folder) / "swapped")
        one, two = (forge.entry(swapped, f"shard{shard}") for shard in (0, 1))
        forge.replace_entry(swapped, "shard0", two)
        forge.replace_entry(swapped, "shard1", one)
    dist.barrier()
    said = attempt(wire, Path(folder) / "swapped")
    gradwire.load(wire, path)
    steps = wire.steps
    wire.close()
    return said, steps


def test_shards_that_changed_places_are_refused(ranks, tmp_path):
    for rank, ((text, unchanged), steps) in enumerate(ranks.run(2, two_shards, str(tmp_path))):
        assert f"what should be of replica 0, shard {rank} is of" in text
        assert unchanged
        assert steps == 2


def on_part_of_the_job(rank, folder):
    """What `save` says of a model that the third rank does not have."""
    alone = [dist.new_group([r]) for r in range(3)][rank]
    pair = dist.new_group([0, 1])
    if rank == 2:
        return None
    net = models.sharded(models.model(), DeviceMesh.from_group(alone, "cpu"))
    wire = gradwire.attach(net, replicate_group=pair, density=0.02, dense_below=0)
    models.train(net, 1)
    try:
        gradwire.save(wire, folder)
    except StateError as error:
        return str(error)
    finally:
        wire.close()


def test_a_rank_without_the_model_is_not_waited_for(ranks, tmp_path):
    for said in ranks.run(3, on_part_of_the_job, str(tmp_path / "new"))[:2]:
        assert "this model is on 2 of 3" in said
    assert not (tmp_path / "new").exists()
