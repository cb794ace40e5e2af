"""A checkpoint that is damaged, of another version or of another model: an error on every rank."""

import hashlib
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import ConfigError, StateError
from gradwire.integrate import handshake
from gradwire.state.saved import load_parts
from gradwire.state.saved.folder import MANIFEST
from gradwire.state.saved.manifest import seal
from tests.integrate import models


def saved(rank, folder, steps=3):
    ddp, wire = models.wrapped()
    models.train(ddp, rank, steps)
    gradwire.save(wire, folder)
    wire.close()


def refused(rank, folder, odd_rank=None, width=97):
    """What loading says, and whether it left the state as it was."""
    if odd_rank == rank:
        folder += "-other"
    ddp, wire = models.wrapped(net=models.model(width=width))
    models.train(ddp, rank, 2, start=50) if width == 97 else None
    said = attempt(wire, folder, kept(wire))
    wire.close()
    return said


def attempt(wire, folder, before):
    try:
        gradwire.load(wire, folder)
    except StateError as error:
        # Names of parts have the first digits of their content.
        return re.sub("(rank.)-[0-9a-f]{8}", r"\1", str(error)), before == kept(wire)
    return "loaded", None


def kept(wire):
    names = [slot.name for bundle in wire.bundles for slot in bundle.slots]
    return wire.steps, names, [wire.residual(name).numpy().tobytes() for name in names]


@pytest.fixture
def folder(ranks, tmp_path):
    path = tmp_path / "checkpoint"
    ranks.run(2, saved, str(path))
    return path


def part_of(folder, rank):
    manifest = json.loads((folder / MANIFEST).read_text())
    return folder / manifest["parts"][rank]["file"]


def flip(path, at=-100):
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(bytes(content))


def cut(path):
    path.write_bytes(path.read_bytes()[:1000])


def rewrite(folder, sealed=True, **fields):
    manifest = json.loads((folder / MANIFEST).read_text()) | fields
    if sealed:
        manifest["sha256"] = seal(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def replace_part(folder, content):
    """Another content for rank 1's part, under a manifest that vouches for it."""
    part = part_of(folder, 1)
    part.write_bytes(content)
    parts = json.loads((folder / MANIFEST).read_text())["parts"]
    parts[1]["sha256"] = hashlib.sha256(content).hexdigest()
    rewrite(folder, parts=parts)


DAMAGES = {
    "bit": (lambda f: flip(part_of(f, 1)), "rank1.pt is damaged: its sha256"),
    "cut": (lambda f: cut(part_of(f, 1)), "rank1.pt is damaged: its sha256"),
    "gone": (lambda f: part_of(f, 1).unlink(), "rank1.pt is missing: copy every rank's part"),
    "empty": (lambda f: [p.unlink() for p in f.iterdir()], "gradwire.json is not there"),
    "half": (lambda f: (f / MANIFEST).unlink(), "parts without it are of a save that was broken"),
    "json": (
        lambda f: cut(f / MANIFEST) or flip(f / MANIFEST, 0),
        "gradwire.json is damaged: JSON",
    ),
    "deep": (lambda f: (f / MANIFEST).write_text("[" * 100_000), "is damaged: RecursionError"),
    "steps": (lambda f: rewrite(f, sealed=False, steps=4), "gradwire.json is damaged: its sha256"),
    "old": (lambda f: rewrite(f, version=1), "has version 1, this gradwire reads version 2"),
    "escape": (lambda f: rewrite(f, parts=[{"file": "../x", "sha256": ""}] * 2), "is damaged"),
    "pickle": (lambda f: replace_part(f, b"\x80\x02cos\nsystem\n."), "rank1.pt is no state: "),
    "list": (lambda f: replace_part(f, _bytes_of([1])), "rank1.pt: state version is 'list'"),
}


def _bytes_of(value):
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def every_damage(rank, folder):
    """What loading says of each damage, and whether it left the state as it was."""
    ddp, wire = models.wrapped()
    models.train(ddp, rank, 2, start=50)
    before, said = kept(wire), {}
    for name, (damage, _) in DAMAGES.items():
        path = Path(f"{folder}-{name}")
        if rank == 0:
            shutil.copytree(folder, path)
            damage(path)
        dist.barrier()
        said[name] = attempt(wire, str(path), before)
    wire.close()
    return said


@pytest.fixture(scope="module")
def said(ranks, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("damage") / "checkpoint")
    ranks.run(2, saved, path)
    return ranks.run(2, every_damage, path)


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_one_line_on_every_rank_and_changes_nothing(said, name):
    for text, unchanged in (each[name] for each in said):
        assert DAMAGES[name][1] in text
        assert "\n" not in text
        assert unchanged


def test_damage_is_found_with_another_number_of_ranks(ranks, folder):
    """The parts before the damaged one are good; they must not be half taken over."""
    flip(part_of(folder, 1))
    for text, unchanged in ranks.run(3, refused, str(folder)):
        assert "rank1.pt is damaged" in text
        assert unchanged


def test_a_folder_that_one_rank_lacks_is_an_error_on_all(ranks, folder):
    texts = ranks.run(2, refused, str(folder), 1)
    assert "checkpoint-other holds no checkpoint" in texts[1][0]
    assert texts[0][0] == f"rank 1: {texts[1][0]}"
    ranks.run(2, saved, f"{folder}-other", 2)
    for text, unchanged in ranks.run(2, refused, str(folder), 1):
        assert text.endswith("rank 1 holds another checkpoint than rank 0. Copy one to all.")
        assert unchanged


def test_another_model_is_refused_with_the_file_and_the_parameter(ranks, folder):
    for text, unchanged in ranks.run(2, refused, str(folder), None, 64):
        assert ".pt: residual of 'c.weight' has shape (5, 97), the model's is (5, 64)" in text
        assert unchanged


def every_flip(rank, folder):
    """Where a flipped bit was not found, or no file named for it."""
    _, wire = models.wrapped()
    missed = []
    for path in sorted(Path(folder).iterdir()):
        content = path.read_bytes()
        step = 1 if path.name == MANIFEST else max(1, len(content) // 150)
        for at in range(0, len(content), step):
            bad = bytearray(content)
            bad[at] ^= 1 << at % 8
            path.write_bytes(bytes(bad))
            try:
                gradwire.load(wire, folder)
                words = "loaded"
            except StateError as error:
                words = str(error)
            if folder not in words:
                missed.append((path.name, at, words))
        path.write_bytes(content)
    gradwire.load(wire, folder)
    wire.close()
    return missed


def test_a_bit_that_flips_anywhere_is_found(ranks, tmp_path):
    ranks.run(1, saved, str(tmp_path))
    assert ranks.run(1, every_flip, str(tmp_path)) == [[]]


def too_early(rank, folder):
    state = gradwire.State(density=0.01)
    said = []
    for call in (gradwire.save, gradwire.load):
        try:
            call(state, folder)
        except StateError as error:
            said.append(str(error))
    return said


def test_before_the_first_step_there_is_nothing_to_save_or_load(ranks, tmp_path):
    save, load = ranks.run(1, too_early, str(tmp_path))[0]
    assert "nothing to save yet" in save
    assert "load after attach, or after a step" in load


def other_version(rank):
    usual = handshake.__version__
    handshake.__version__ = "0.0.9" if rank == 1 else usual
    try:
        # Another version may have other fields too; the version is what has to be said.
        gradwire.attach(DistributedDataParallel(nn.Linear(9, 9)), density=0.01 * (1 + rank)).close()
    except ConfigError as error:
        return str(error)
    finally:
        handshake.__version__ = usual
    return "attached"


def test_ranks_of_different_versions_are_an_error_on_every_rank(ranks):
    words = "ranks run different versions of gradwire: rank 1 has 0.0.9, rank 0 has "
    for text in ranks.run(3, other_version):
        assert words in text
        assert text.endswith("Install the same on all.")


def reads(rank, folder):
    """The parts that one load has read."""
    ddp, wire = models.wrapped()
    models.train(ddp, rank, 2, start=50)
    seen, read = [], load_parts._read_part

    def reading(path, part):
        seen.append(part["file"])
        return read(path, part)

    load_parts._read_part = reading
    try:
        gradwire.load(wire, folder)
    finally:
        load_parts._read_part = read
    wire.close()
    return sorted(seen)


def test_with_another_number_of_ranks_every_part_is_read_once(ranks, folder):
    files = sorted(part_of(folder, rank).name for rank in range(2))
    assert ranks.run(3, reads, str(folder)) == [files] * 3
