"""Fuzzer of all loaders of files. A damaged file must give a one-line error or a valid answer.

Anything else fails: another exception, more than a gigabyte of memory, or ten seconds of processor
time. CI runs a few hundred inputs; `make fuzz`, or `python -m faults.fuzz_loaders`, many more.
"""

import argparse
import contextlib
import copy
import hashlib
import io
import json
import random
import resource
import signal
import tempfile
import time
import wave
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

import gradwire
from gradwire import State, VirtualCluster
from gradwire.config import Config
from gradwire.errors import GradwireError
from gradwire.plan.rate import parse_rate
from gradwire.registry import parse_options
from gradwire.state.saved import folder as checkpoint
from gradwire.state.saved.manifest import MANIFEST, seal
from gradwire.workbench.bench.data import read_gradient
from gradwire.workbench.data.an4 import load_an4
from gradwire.workbench.data.cifar10 import load_cifar10
from gradwire.workbench.data.mnist import load_mnist
from gradwire.workbench.data.text import load_text
from gradwire.workbench.report import headline, read_runs
from gradwire.workbench.report.page import render_run
from gradwire.workbench.report.studies import write_studies
from gradwire.workbench.study import STUDIES, Settings
from gradwire.workbench.study.folder import StudyFolder
from gradwire.workbench.train import checkpoint as trainer
from gradwire.workbench.train.options import resolve
from gradwire.workbench.train.run import finished_result
from gradwire.workbench.train.saved import options_from_dict
from tests.workbench.data import files as data_files
from tests.workbench.report.runs import write_run

ODD = [
    None, True, -1, 0, 1, 3, 2**31, 2**63, 10**400, -0.5, 1e308, float("nan"), float("inf"), "",
    "x", "\0", "../x", "\ud800", [], {}, [[]], [None], {"": 0}, [1, "a"], "9" * 5000,
]  # fmt: skip
PICTURES = ("run pictures", "study pictures")
ROOM, SECONDS = 1 << 30, 10.0


@dataclass(frozen=True)
class Loader:
    """One loader. `read` takes the folder of its files; `seal` makes damaged files look whole."""

    folder: Path
    files: dict[str, bytes]
    read: Callable[[Path], object]
    seal: Callable[[Path], None] = field(default=lambda folder: None)


def loaders(folder: Path) -> dict[str, Loader]:
    """Return every loader, with valid files made in `folder`."""
    data_files.write_mnist(folder / "mnist", train=3, test=2)
    data_files.write_mnist(folder / "packed", train=3, test=2, packed=True)
    data_files.write_cifar10(folder / "cifar10", count=2)
    for part in ("train", "test"):
        _write(folder / "ptb" / f"ptb.{part}.txt", b" the cat sat\n on the <unk>\n" * 4)
        _write(folder / "an4" / f"{part}.tsv", b"a.wav\tYES\na.wav\tNO\n")
    _write(folder / "an4" / "a.wav", _wav())
    _write(folder / "gradient" / "g.npy", _npy())
    write_run(folder / "run", epochs=1, compare=("dense",))
    (folder / "run" / "result.json").write_text(json.dumps(RESULT))
    _study(folder / "study")
    cluster = _cluster(folder / "checkpoint")
    _trainer(folder / "trainer" / "checkpoint" / "trainer.pt")
    readers = {
        "mnist": load_mnist,
        "packed": load_mnist,
        "cifar10": load_cifar10,
        "ptb": lambda path: load_text("ptb", path, 5),
        "an4": load_an4,
        "gradient": lambda path: read_gradient(path / "g.npy"),
        "run": _run,
        "run pictures": _run_pictures,
        "study": _read_study,
        "study pictures": write_studies,
        "checkpoint": lambda path: _unchanged(cluster, lambda state: gradwire.load(state, path)),
        "trainer": lambda path: trainer._read(path / "checkpoint" / "trainer.pt"),
    }
    seals = {"checkpoint": _seal_checkpoint, "trainer": _seal_trainer}
    out = {}
    for name, read in readers.items():
        place = folder / name.partition(" ")[0]
        paths = sorted(p for p in place.rglob("*") if p.is_file())
        files = {str(p.relative_to(place)): p.read_bytes() for p in paths}
        out[name] = Loader(place, files, read, *filter(None, [seals.get(name)]))
    return out


RESULT = {"title": "topk", "epochs": 1, "steps": 10, "complete": True, "replicas_identical": True}


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _wav() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(800))
    return out.getvalue()


def _npy() -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(20, dtype=np.float32))
    return out.getvalue()


def _study(out: Path) -> None:
    study, settings = STUDIES["bounds"], Settings(small=True)
    folder = StudyFolder(out, "bounds")
    folder.open(settings, "gradwire study bounds")
    folder.add({"u": "normal"}, study.measure(settings, {"u": "normal"}))


def _cluster(path: Path) -> gradwire.VirtualCluster:
    cluster = gradwire.VirtualCluster(1, density=0.1, momentum=0.9)
    for _ in range(2):
        cluster.average([torch.randn(100)])
    cluster._ranks.run(lambda rank: checkpoint.save(cluster._states[0], path))
    return cluster


def _trainer(path: Path) -> None:
    content = {"version": trainer.VERSION, "wire": "wire-00000001", "position": {"step": 1}}
    _write(path, b"")
    torch.save({**content, "model": {"w": torch.zeros(9)}, "optimizer": {}}, path)
    with path.open("r+b") as file:
        trainer._seal(file)


def _run(path: Path) -> None:
    runs = read_runs(path)
    headline(runs)
    finished_result(runs[0].options, path)


def _run_pictures(path: Path) -> None:
    render_run(read_runs(path)).encode(errors="xmlcharrefreplace")


def _read_study(path: Path) -> None:
    folder = StudyFolder(path, "bounds")
    _ = folder.head
    folder.rows()


def _unchanged(cluster: VirtualCluster, load: Callable[[], object]) -> None:
    """Load, and assert that a refused load leaves the state as it was."""
    state = cluster._states[0]
    before = _kept(state)
    try:
        cluster._ranks.run(lambda rank: load(state))
    except GradwireError:
        assert before == _kept(state), "a refused state changed something"
        raise


def _kept(state: State) -> tuple[object, ...]:
    bundle = state.bundles[0]
    return state.steps, bundle.buffer.tolist(), bundle.velocity.tolist(), dict(state._counts)


def _seal_checkpoint(folder: Path) -> None:
    """Write a manifest with the sha256 of the damaged parts, if the manifest is still readable."""
    path = folder / MANIFEST
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError, OSError):
        manifest = json.loads(path.read_bytes())
        for part in manifest["parts"]:
            content = (folder / part["file"]).read_bytes()
            part["sha256"] = hashlib.sha256(content).hexdigest()
        manifest["sha256"] = seal(manifest)
        path.write_text(json.dumps(manifest))


def _seal_trainer(folder: Path) -> None:
    with (folder / "checkpoint" / "trainer.pt").open("r+b") as file:
        trainer._seal(file)


def damage(content: bytes, rng: random.Random) -> bytes:
    """Return the bytes with a fault in them; a JSON file often becomes other JSON."""
    kind = rng.randrange(10)
    if kind < 4:
        with contextlib.suppress(ValueError):
            lines = content.decode().split("\n") if content.count(b"\n{") else [content.decode()]
            at = rng.randrange(len(lines))
            lines[at] = json.dumps(scramble(json.loads(lines[at]), rng))
            return "\n".join(lines).encode()
    buffer = bytearray(content)
    if kind == 4:
        return content[: rng.randrange(len(content) + 1)]
    if kind == 5:
        return content + rng.randbytes(rng.choice([1, 16, 4096]))
    if kind == 6 and rng.random() < 0.1:
        return rng.choice([b"", b"[" * 100_000, b"\0" * 1000, b"PK\x03\x04" + content])
    if kind == 7 and len(buffer) > 8:
        at = rng.randrange(min(64, len(buffer) - 4))
        buffer[at : at + 4] = rng.choice([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"])
    for _ in range(rng.randrange(1, 6)):
        if buffer:
            buffer[rng.randrange(len(buffer))] ^= 1 << rng.randrange(8)
    return bytes(buffer)


def scramble(value: object, rng: random.Random) -> object:
    """Return a plain value with one part of it exchanged, dropped or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        out = dict(value)
        if rng.random() < 0.15:
            del out[key]
        elif rng.random() < 0.1:
            out["odd"] = rng.choice(ODD)
        else:
            out[key] = scramble(value[key], rng)
        return out
    if isinstance(value, list) and value and rng.random() < 0.8:
        at, out = rng.randrange(len(value)), list(value)
        if rng.random() < 0.2:
            return out[:at] + out[at : at + 1] * 2 + out[at + 1 :]
        out[at] = scramble(value[at], rng)
        return out
    if isinstance(value, torch.Tensor) and rng.random() < 0.7:
        return _other_tensor(value, rng)
    return rng.choice(ODD)


def _other_tensor(value: torch.Tensor, rng: random.Random) -> torch.Tensor:
    kinds = [
        lambda: value.double(),
        lambda: value.int() * 1_000_000,
        lambda: torch.full_like(value, -1) if value.dtype != torch.bool else ~value,
        lambda: value.flatten()[:-1],
        lambda: value.reshape(1, *value.shape),
        lambda: torch.cat([value.flatten()] * 2),
        lambda: value.flatten().to_sparse(),
        lambda: torch.empty(0),
    ]
    return rng.choice(kinds)()


def check(call: Callable[[], object]) -> str:
    """Return "valid" or "refused"; raise anything else."""
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    text = None
    try:
        call()
    except GradwireError as error:
        text = str(error)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if text is None:
        return "valid"
    assert "\n" not in text, f"more than one line: {text}"
    return "refused"


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Limit memory in this context, and the time of each call of `check`."""

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS:g} s")

    usual = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGVTALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, usual)
        signal.signal(signal.SIGVTALRM, handler)


TEXTS = [
    "100mbit", "2.5gbit", "1e3kbit", "9" * 400 + "gbit", "\u0663mbit", "-1mbit", "chunk=64", "=",
    "shared=false", "seed=1", "capacity=nan", "value=inf", "rows=" + "9" * 5000, "local=-1",
    "variant=paper", "merge=x", "ratio=1e400", "rows=0", "columns=99999999999999999",
]  # fmt: skip
NAMES = [
    "topk", "randk", "threshold/allgather", "gaussiank", "chunked", "topk/gs-sgd", "topk/gtopk",
    "sidco/union", "topk/hierarchical", "x", "/", "topk/", "",
]  # fmt: skip


def words(rng: random.Random) -> Callable[[], object]:
    """Return a call of the parser of links or of options with a damaged text."""
    letters = list(rng.choice(TEXTS))
    for _ in range(rng.randrange(3)):
        insert = rng.choice("0123456789.-+e=_kmgbit \0\n\u0663\ud800")
        at = rng.randrange(len(letters) + 1)
        letters[at : at + rng.randrange(2)] = insert
    text = "".join(letters)
    if rng.random() < 0.4:
        return lambda: parse_rate(text)
    name = rng.choice(NAMES)
    return lambda: Config(method=name, options=parse_options([text], name))


def values(cluster: VirtualCluster, rng: random.Random) -> Callable[[], object]:
    """Return a load of a scrambled state, or of the scrambled options of a run."""
    if rng.random() < 0.3:
        options = scramble(resolve({"device": "cpu", "dense": ["a*"]}).asdict(), rng)
        return lambda: options_from_dict(options if isinstance(options, dict) else {})
    saved = scramble(copy.deepcopy(cluster.state_dict()), rng)
    if rng.random() < 0.2:
        saved = scramble(saved, rng)
    states = saved.get("workers") if isinstance(saved, dict) else saved
    state = states[0] if isinstance(states, list) and states else states
    return lambda: _unchanged(cluster, lambda own: own.load_state_dict(state))


def fuzz(count: int, seed: int = 0) -> dict[str, Counter[str]]:
    """Return, by loader, the numbers of valid and refused inputs among `count` damaged ones."""
    rng = random.Random(seed)
    outcomes: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        known = loaders(folder)
        cluster = _cluster(folder / "other")
        quick = [*(name for name in known if "pictures" not in name), "words", "values"]
        with limits():
            for n in range(count):
                # Pictures take a second each.
                name = quick[n % len(quick)] if n % 200 else rng.choice(PICTURES)
                try:
                    outcome = _one(known.get(name), name, cluster, rng)
                except Exception as error:
                    raise AssertionError(f"input {n} of seed {seed}, {name}") from error
                outcomes.setdefault(name, Counter())[outcome] += 1
                if n % 10_000 == 9_999:
                    print(f"{n + 1:,} inputs", flush=True)
    return outcomes


def _one(loader: Loader | None, name: str, cluster: VirtualCluster, rng: random.Random) -> str:
    if loader is None:
        return check(words(rng) if name == "words" else values(cluster, rng))
    file = rng.choice(sorted(loader.files))
    if rng.random() < 0.02:
        (loader.folder / file).unlink()
    else:
        (loader.folder / file).write_bytes(damage(loader.files[file], rng))
        if rng.random() < 0.5:
            loader.seal(loader.folder)
    try:
        return check(lambda: loader.read(loader.folder))
    finally:
        for other, content in loader.files.items():
            (loader.folder / other).write_bytes(content)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    outcomes = fuzz(options.count, options.seed)
    for name, counts in outcomes.items():
        print(f"{name:<16} {counts['refused']:>8,} refused {counts['valid']:>8,} valid")
    print(f"{options.count:,} inputs, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
