"""plain-union and its controls on a small network: two minutes a run on a CPU core.

    python benchmarks/small_network.py DATA rows.jsonl --seeds 1,2,3,4   # goes on where it stopped
    python benchmarks/small_network.py DATA rows.jsonl --ways dense-2-2,plain-union-2-2
    python benchmarks/small_network.py DATA rows.jsonl --table

192-128-128-10 with batch norm on CIFAR-10 (DATA/cifar-10-batches-py) at 8 x 8 pixels, 16 virtual
workers x batch 32, 4,000 steps, learning rate warmed up over a tenth of them, then a cosine.
"""

import argparse
import json
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradwire import VirtualCluster
from gradwire.recipes import RECIPES
from gradwire.workbench.data.cifar10 import load_cifar10
from gradwire.workbench.train.options import cosine_factor

WORKERS, BATCH, STEPS = 16, 32, 4000
LR, MOMENTUM, DECAY = 0.4, 0.9, 1e-4
WIDTHS = (192, 128, 128, 10)
UNION = RECIPES["plain-union"]


@dataclass(frozen=True)
class Way:
    """Fields of gradwire's, and SGD's numbers; rate and decay as multiples of dense's."""

    fields: dict[str, Any] = field(default_factory=lambda: {"method": "dense"})
    rate: float = 1.0
    decay: float = 1.0
    momentum: float = MOMENTUM


PLAIN: dict[str, Any] = {
    "rate": UNION.lr_factor(MOMENTUM),
    "decay": UNION.decay_scale,
    "momentum": 0.0,
}
FRONT = {"density": 0.00155, "warmup": (0.006,), "warmup_steps": STEPS // 10}
WAYS = {
    "dense": Way(),
    "dense-1.5-3": Way(rate=UNION.lr_scale, decay=UNION.decay_scale),
    "dense-plain": Way(**PLAIN),
    "plain-union": Way({"recipe": "plain-union"}, **PLAIN),
    "plain-front": Way(FRONT, **PLAIN),
}
"""plain-front: an all-gather, three times the entries in the first tenth of the run, as many in
all."""
FEW = ",".join(WAYS)
for rate, decay in ((1.0, 5.0), (2.0, 2.0), (2.0, 4.0)):
    name = f"{rate:g}-{decay:g}"
    WAYS[f"dense-{name}"] = Way(rate=rate, decay=decay)
    plain = {"rate": rate / (1 - MOMENTUM), "decay": decay, "momentum": 0.0}
    WAYS[f"plain-union-{name}"] = Way(WAYS["plain-union"].fields, **plain)


def images(folder: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test images, flat, each channel of mean 0 and variance 1, with labels."""
    data = load_cifar10(folder)
    pixels = torch.cat([data.train, data.test]).float() / 255
    pixels = F.avg_pool2d(pixels, 4)
    over = (0, 2, 3)
    pixels = (pixels - pixels.mean(over, keepdim=True)) / pixels.std(over, keepdim=True)
    train, test = pixels.flatten(1).split([len(data.train), len(data.test)])
    return (train, data.train_labels), (test, data.test_labels)


def weights() -> list[Tensor]:
    """Of each layer the matrix, then scale and shift, the last one's a bias alone."""
    made = []
    for inputs, outputs in pairwise(WIDTHS):
        made += [torch.randn(inputs, outputs) * (2 / inputs) ** 0.5, torch.ones(outputs)]
        made.append(torch.zeros(outputs))
    del made[-2]
    return made


def forward(layers: list[Tensor], x: Tensor) -> Tensor:
    """Logits [worker, example, class]; every layer and x have a worker in front."""
    for matrix, scale, shift in (layers[:3], layers[3:6]):
        x = torch.bmm(x, matrix)
        x = (x - x.mean(1, True)) * torch.rsqrt(x.var(1, correction=0, keepdim=True) + 1e-5)
        x = torch.relu(x * scale[:, None] + shift[:, None])
    return torch.baddbmm(layers[7][:, None], x, layers[6])


def run(way: Way, seed: int, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> dict:
    """Trains; the mean loss of the last 97 steps, accuracy in per cent, entries in per cent."""
    torch.manual_seed(seed)
    start = weights()
    shapes, sizes = [w.shape for w in start], [w.numel() for w in start]
    flat = torch.cat([w.flatten() for w in start])
    views = [v.view(s) for v, s in zip(flat.split(sizes), shapes, strict=True)]
    leaves = [v.expand(WORKERS, *v.shape).requires_grad_() for v in views]
    sgd = torch.optim.SGD([flat], LR, way.momentum, weight_decay=way.decay * DECAY)
    cluster = VirtualCluster(WORKERS, **way.fields)
    order, losses, sent = torch.Generator().manual_seed(seed + 1000), [], 0.0
    batches: list[Tensor] = []
    for step in range(STEPS):
        if not batches:
            drawn = torch.randperm(len(train[0]), generator=order).split(WORKERS * BATCH)
            batches = [batch for batch in drawn if len(batch) == WORKERS * BATCH]
        x, y = (part[batches[0]] for part in train)
        del batches[0]
        loss = F.cross_entropy(forward(leaves, x.view(WORKERS, BATCH, -1)).flatten(0, 1), y)
        parts = torch.autograd.grad(loss * WORKERS, leaves)
        gradients = torch.cat([g.flatten(1) for g in parts], 1)
        lr = way.rate * LR * cosine_factor(step / STEPS)
        sgd.param_groups[0]["lr"] = lr
        flat.grad = cluster.average(list(gradients))
        sgd.step()
        losses.append(float(loss.detach()))
        sent += (
            1.0 if cluster.config.method == "dense" else cluster.config.schedule.density_at(step)
        )
    with torch.no_grad():
        guess = forward([v[None] for v in views], test[0][None])[0].argmax(1)
    score = 100 * float((guess == test[1]).float().mean())
    return {"loss": mean(losses[-97:]), "score": score, "entries": 100 * sent / STEPS}


def table(rows: list[dict]) -> str:
    """Means, and differences of equal seeds with their standard deviation, as Markdown."""
    there = [name for name in WAYS if any(r["way"] == name for r in rows)]
    scores = {name: {r["seed"]: r["score"] for r in rows if r["way"] == name} for name in there}
    against = ("dense", "dense-1.5-3", "dense-plain")
    lines = [f"| | seeds | test accuracy, % | {' | '.join(against)} | training loss | entries |"]
    lines.append("| --- |" + " --: |" * (len(against) + 4))
    for name, own in scores.items():
        cells = [name, str(len(own)), f"{mean(own.values()):.2f}"]
        for other in against:
            base = scores.get(other, {})
            pairs = [own[seed] - base[seed] for seed in own if seed in base]
            told = other != name and len(pairs) > 1
            cells.append(f"{mean(pairs):+.2f} +- {stdev(pairs):.2f}" if told else "")
        mine = [r for r in rows if r["way"] == name]
        cells += [f"{mean(r['loss'] for r in mine):.3f}", f"{mine[0]['entries']:.3g} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="folder of cifar-10-batches-py")
    parser.add_argument("rows", type=Path, help="a line a run is appended here")
    parser.add_argument("--seeds", default="1,2,3,4,5,6,7,8", help="with commas between")
    parser.add_argument("--ways", default=FEW, help=f"of {', '.join(WAYS)}, with commas between")
    parser.add_argument("--table", action="store_true", help="show what was measured")
    given = parser.parse_args()
    ways, seeds = given.ways.split(","), [int(seed) for seed in given.seeds.split(",")]
    if strange := [name for name in ways if name not in WAYS]:
        parser.error(f"no way {strange[0]!r}: use {', '.join(WAYS)}")
    text = given.rows.read_text() if given.rows.is_file() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    if not given.table:
        torch.set_num_threads(1)
        train, test = images(given.data)
        done = {(row["way"], row["seed"]) for row in rows}
        todo = [(n, s) for s in seeds for n in ways if (n, s) not in done]
        for number, (name, seed) in enumerate(todo, start=1):
            row = {"way": name, "seed": seed} | run(WAYS[name], seed, train, test)
            rows.append(row)
            with given.rows.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(f"{number}/{len(todo)}  {name}, seed {seed}: {row['score']:.2f} %", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
