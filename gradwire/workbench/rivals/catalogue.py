"""The rivals as recipes of `gradwire study language`, and the learning rates tried for them."""

from typing import Any

from gradwire.workbench.rivals.codes import ChunkBins, FourBitFloats, RowBins
from gradwire.workbench.rivals.every_round import EveryRound
from gradwire.workbench.rivals.every_step import EveryStep
from gradwire.workbench.simulate.language_run import LanguageRecipe

BY_BEST: dict[str, Any] = {"decay": 0.995, "subtract": 0.2, "rate_inside": False}
"""The best momentum of DeMo's paper, and the best share that is taken away."""


def _demo(words: str, optimizer: str, **options: Any) -> LanguageRecipe:
    gradients = {"exchange": "demo"} | options
    return LanguageRecipe(
        f"DeMo (2411.19870), {words}", optimizer, gradients=gradients, part=EveryStep
    )


def _rounds(words: str, optimizer: str, **options: Any) -> LanguageRecipe:
    return LanguageRecipe(words, optimizer, rounds={"every": 30} | options, part=EveryRound)


def _powersgd(rank: int, optimizer: str, name: str) -> LanguageRecipe:
    return LanguageRecipe(
        f"PowerSGD (1905.13727) of rank {rank}, then {name}",
        optimizer,
        gradients={"exchange": "powersgd", "rank": rank, "clip": "mean"},
        part=EveryStep,
    )


def _scape(words: str, optimizer: str, **options: Any) -> LanguageRecipe:
    return LanguageRecipe(
        f"like SCAPE (2607.01678), a reconstruction: {words}",
        optimizer,
        gradients={"exchange": "shared-masks"} | options,
        part=EveryStep,
    )


RIVALS: dict[str, LanguageRecipe] = {
    "demo": _demo("as released: 32 of 4096 cosines, sign", "sign"),
    "demo-8": _demo("8 of 4096 cosines, sign", "sign", keep=8),
    "demo-paper": _demo("32 of 4096 cosines, the paper's best momentum, sign", "sign", **BY_BEST),
    "demo-muon": _demo(
        "32 of 4096 cosines, the paper's best momentum, Muon", "muon-step", **BY_BEST
    ),
    "sparseloco": _rounds(
        "SparseLoCo (2508.15706): AdamW inside rounds of 30, 64 of 4096 entries in 2 bits",
        "adamw",
        code=ChunkBins(64, 2),
        decay=0.95,
        mean="senders",
        outer=(1.0, 0.0),
    ),
    "muloco-2": _rounds(
        "MuLoCo (2505.23725): Muon inside rounds of 30, all entries in 2 bits",
        "muon",
        code=RowBins(2),
        decay=0.9,
        twice=True,
        outer="muloco",
    ),
    "muloco-4": _rounds(
        "MuLoCo (2505.23725): Muon inside rounds of 30, all entries in 4 bits",
        "muon",
        code=RowBins(4),
        decay=0.9,
        twice=True,
        outer="muloco",
    ),
    "streaming-diloco": _rounds(
        "Streaming DiLoCo (2501.18512): AdamW inside, three fragments in turn as 4-bit floats",
        "adamw",
        code=FourBitFloats(),
        decay=0.0,
        fragments=3,
        delay=5,
        mixing=0.5,
        outer=(0.4, 0.9),
    ),
    "scape-1": _scape("1 % by shared masks, AdamS", "adams", density=0.01),
    "scape-10": _scape("10 % by shared masks, AdamS", "adams", density=0.1),
} | {
    f"powersgd-{rank}-{optimizer}": _powersgd(rank, optimizer, name)
    for optimizer, name in (("adamw", "AdamW"), ("muon", "Muon"))
    for rank in (1, 2, 4)
}
"""All rivals by name. DiLoCo itself is the study's recipe `diloco`, through `local_steps`."""

RIVAL_RATES = {
    "sign": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "muon-step": (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
    "adams": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
    "adams-holds": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3),
}
"""Learning rates by the optimiser, beside those of AdamW and Muon; `--lr` takes any others."""
