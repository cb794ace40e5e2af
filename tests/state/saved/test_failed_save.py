"""A save that fails on one of three ranks: the folder holds exactly what it held before."""

import contextlib
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.state.saved import manifest
from tests.integrate import models
from tests.integrate.fsdp import models as sharded_models
from tests.state.saved import forge

KINDS = "plain", "sharded", "local steps"
WAYS = {
    "no room": "File too large",
    "room for a half": "File too large",
    "no name for a file": "Permission denied",
    "no name for the manifest": "Permission denied",
    "Ctrl-C": "KeyboardInterrupt",
}
ODD = 0, 2


def wire_of(kind, rank):
    """A wire on three ranks, and a function that takes another step."""
    if kind == "sharded":
        net, wire = sharded_models.wrapped(sharded_models.mesh(replicas=3))
        return wire, lambda step: sharded_models.train(net, 1, start=step)
    if kind == "plain":
        ddp, wire = models.wrapped()
        return wire, lambda step: models.train(ddp, rank, 1, start=step)
    net = models.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wire = gradwire.local_steps(net, optimizer, every=1, density=0.1)

    def step(number):
        net(models.data(rank, number)).square().mean().backward()
        optimizer.step()
        wire.step()

    return wire, step


def is_tried(kind, way, odd):
    # Only rank 0 of a sharded model gives names: to the records of torch, and to the manifest.
    return kind != "sharded" or "name" not in way or odd == 0


@contextlib.contextmanager
def broken(way):
    """Let the saves of this rank fail."""
    replace, rename, fsync = os.replace, Path.rename, os.fsync
    room, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def no_name(source, target, **more):
        is_manifest = Path(target).name == manifest.MANIFEST
        # What is put back has the ending of a copy.
        if not str(source).endswith(".old") and is_manifest == ("manifest" in way):
            raise OSError(13, "Permission denied")
        replace(source, target, **more)

    def interrupted(number):
        raise KeyboardInterrupt

    try:
        if "room" in way:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if "half" in way else 0, most))
        elif "name" in way:
            os.replace = Path.rename = no_name
        else:
            os.fsync = interrupted
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
        signal.signal(signal.SIGXFSZ, handler)
        os.replace, Path.rename, os.fsync = replace, rename, fsync


def tree(folder):
    """Every file with its content, and every folder."""
    return forge.tree(folder), sorted(str(p) for p in folder.rglob("*") if p.is_dir())


def failing(rank, folder, kind):
    """Return what was said and if the folder was as before, for saves into no and into a folder."""
    wire, step = wire_of(kind, rank)
    numbers, out = iter(range(100)), {}
    step(next(numbers))
    folder = Path(folder)
    path = folder / "new" / "checkpoint"
    for first in (True, False):
        if not first:
            gradwire.save(wire, path)
        for way in WAYS:
            for odd in ODD:
                if not is_tried(kind, way, odd):
                    continue
                step(next(numbers))
                dist.barrier()
                before = tree(folder)
                dist.barrier()
                said = ""
                with broken(way) if rank == odd else contextlib.nullcontext():
                    try:
                        gradwire.save(wire, path)
                    except BaseException as error:
                        said = f"{type(error).__name__}: {error}"
                dist.barrier()
                out[first, way, odd] = said, tree(folder) == before
                dist.barrier()
    # The wire goes on, and the folder holds one checkpoint.
    gradwire.load(wire, path)
    step(next(numbers))
    gradwire.save(wire, path)
    dist.barrier()
    files = len(forge.tree(folder))
    wire.close()
    return out, files


@pytest.mark.parametrize("kind", KINDS)
def test_the_folder_is_as_it_was_before_on_every_rank(ranks, tmp_path, kind):
    results = ranks.run(3, failing, str(tmp_path), kind)
    assert [files for _, files in results] == [5 if kind == "sharded" else 4] * 3
    for rank, (out, _) in enumerate(results):
        assert len(out) == (16 if kind == "sharded" else 20)
        for (first, way, odd), (said, unchanged) in out.items():
            assert unchanged, (first, way, odd)
            if way == "Ctrl-C" and rank == odd:
                assert said.startswith("KeyboardInterrupt")
                continue
            assert said.startswith("ExchangeError: "), said
            assert f"rank {odd}" in said
            assert rank != odd or WAYS[way] in said


def residual_of(wire):
    names = [slot.name for bundle in wire.bundles for slot in bundle.slots]
    return [wire.residual(name).numpy().tobytes() for name in names]


def killed(rank, folder):
    """A save of a sharded model that is killed after `.metadata` and before the manifest."""
    path, after = Path(folder) / "checkpoint", Path(folder) / "after"
    wire, step = wire_of("sharded", rank)
    step(0)
    gradwire.save(wire, path)
    dist.barrier()
    if rank == 0:
        shutil.copytree(path, after)
    dist.barrier()
    step(1)
    gradwire.save(wire, path)
    dist.barrier()
    if rank == 0:
        shutil.copy(after / ".metadata", after / ".metadata.0.old")
        for file in path.iterdir():
            if file.name != manifest.MANIFEST:
                shutil.copy(file, after)
    dist.barrier()
    steps = []
    gradwire.load(wire, after)
    steps.append(wire.steps)
    kept = residual_of(wire)
    if rank == 0:
        (after / ".metadata").unlink()
    dist.barrier()
    # Deleted altogether: the copy still is the one that the manifest names.
    gradwire.load(wire, after)
    steps.append(wire.steps == 1 and residual_of(wire) == kept)
    with broken("Ctrl-C") if rank == 2 else contextlib.nullcontext():
        try:
            gradwire.save(wire, after)
        except (KeyboardInterrupt, gradwire.errors.ExchangeError):
            steps.append("failed")
    gradwire.load(wire, after)
    steps.append(wire.steps)
    gradwire.save(wire, after)
    dist.barrier()
    wire.close()
    return steps, len(list(after.iterdir()))


def test_a_sharded_save_that_was_killed_leaves_the_last_checkpoint(ranks, tmp_path):
    assert ranks.run(3, killed, str(tmp_path)) == [([1, True, "failed", 1], 5)] * 3


def fewer(rank, folder):
    wire, step = wire_of("plain", rank)
    step(0)
    if dist.get_world_size() == 2:
        gradwire.load(wire, folder)
    gradwire.save(wire, folder)
    wire.close()


def test_a_run_with_fewer_ranks_deletes_the_parts_of_the_others(ranks, tmp_path):
    ranks.run(4, fewer, str(tmp_path))
    ranks.run(2, fewer, str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3
