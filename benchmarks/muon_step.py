"""Time a training step of a GPT with AdamW, with torch's Muon beside AdamW, and with gradwire's.

    python benchmarks/muon_step.py

On CUDA: 12 layers of 768, a vocabulary of 50,304, 16 windows of 1024 tokens, bf16 autocast. On the
CPU a tiny one, only to see that it runs. The three take turns, so that a busy machine slows all.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from gradwire.optim import muon

TARGET = 1.15
"""The most that a step may take, over one with AdamW."""


class Block(nn.Module):
    """Attention with separate q, k and v, and a perceptron, each after its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what attention and the perceptron add."""
        h = self.norm(x)
        q, k, v = (
            part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Decoder whose head is its embedding: 124 million parameters at 12 x 768."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, window: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(window, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from those before it."""
        x = self.table(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits, tokens[:, 1:].flatten())


def make_adamw(model: nn.Module) -> list[Optimizer]:
    """Return torch's fused AdamW for everything."""
    return [torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)]


def make_torchs(model: Gpt) -> list[Optimizer]:
    """Return torch's Muon for the hidden matrices, and its fused AdamW for the rest."""
    hidden = [p for p in model.blocks.parameters() if p.dim() == 2]
    known = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(hidden, lr=1e-4, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1e-4, betas=(0.9, 0.95), fused=True),
    ]


def make_ours(model: nn.Module) -> list[Optimizer]:
    """Return the optimiser of `gradwire.optim.muon`."""
    return [muon(model, lr=1e-4)]


MAKERS: dict[str, Callable[..., list[Optimizer]]] = {
    "adamw": make_adamw,
    "torch muon": make_torchs,
    "gradwire muon": make_ours,
}


def time_steps(args: argparse.Namespace, device: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return by optimiser the milliseconds of each step, and of the optimiser in it."""
    tokens = torch.randint(args.vocabulary, (args.batch, args.window + 1), device=device)
    runs = {}
    for name, make in MAKERS.items():
        torch.manual_seed(0)
        model = Gpt(args.vocabulary, args.width, args.layers, args.heads, args.window).to(device)
        runs[name] = torch.compile(model) if args.compile else model, make(model)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in MAKERS}
    for step in range(args.warmup + args.steps):
        for name, (model, optimizers) in runs.items():
            wait()
            start = time.perf_counter()
            with torch.autocast(device, torch.bfloat16):
                loss = model(tokens)
            loss.backward()
            if args.split:
                wait()
            middle = time.perf_counter()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            wait()
            end = time.perf_counter()
            if step >= args.warmup:
                times[name][0].append(1e3 * (end - start))
                times[name][1].append(1e3 * (end - middle))
    return times


def main() -> None:
    """Print a line per optimiser: medians, quintiles, and the ratio to AdamW."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    small = device == "cpu"
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, large, tiny in (
        ("vocabulary", 50304, 256), ("width", 768, 64), ("layers", 12, 2), ("heads", 12, 4),
        ("window", 1024, 64), ("batch", 16, 2), ("steps", 30, 3), ("warmup", 10, 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=tiny if small else large)
    parser.add_argument("--compile", action="store_true", help="compile the model")
    parser.add_argument(
        "--split", action="store_true", help="wait before the optimiser, to time it"
    )
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    times = time_steps(args, device)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU, too small to tell"
    print(f"{where}, torch {torch.__version__}, {args.batch * args.window:,} tokens a step")
    dense = statistics.median(times["adamw"][0])
    for name, (whole, last) in times.items():
        low, *_, high = statistics.quantiles(whole, n=5)
        median = statistics.median(whole)
        part = f", optimiser {statistics.median(last):.2f}" if args.split else ""
        print(
            f"{name:14} {median:8.2f} ms (p20 {low:.2f}, p80 {high:.2f}){part}, "
            f"{median / dense:.3f} x adamw"
        )
    if device == "cuda":
        ratio = statistics.median(times["gradwire muon"][0]) / dense
        print(f"target {TARGET} x: {'reached' if ratio <= TARGET else 'missed'} at {ratio:.3f} x")


if __name__ == "__main__":
    main()
