"""Accuracy: what may stand in front of which optimiser, and the sentence that goes with it.

The planner predicts times. What a way does to the loss was measured for a few networks only, and
this module says for which.
"""

from dataclasses import replace

from gradwire.errors import unknown
from gradwire.plan.predict import Way
from gradwire.plan.workload import Workload
from gradwire.recipes import LOCAL_RECIPES

OPTIMIZERS = ("adamw", "sgd", "muon")
"""The optimisers that a plan tells apart."""
_ALIASES = {"adam": "adamw"}

ADAM = (
    "Top-k in front of AdamW is not recommended: at density 1 % a GPT of 10.7 million parameters "
    "ended 43 % above the loss of dense AdamW (docs/adam.md)"
)
_SAFE = 0.01
"""Below this density the papers and the README's tables show a loss of accuracy."""
_LOW = (
    "may cost accuracy: at 0.1 % the papers lose 0.6 to 0.8 points, we lost 5 in 50 epochs; "
    "min_density=0.01 is the safer bound"
)
_NORM = "plain-union"
"""The recipe that was measured with SGD and batch norm."""


def with_optimizer(load: Workload, name: str) -> Workload:
    """Return the workload with the optimiser given, the usual one of such a network, or sgd."""
    given = _ALIASES.get(name.strip().lower(), name.strip().lower())
    if given and given not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)
    chosen = given or load.optimizer or "sgd"
    return replace(load, optimizer=chosen, is_assumed=not given, is_typical=bool(load.optimizer))


def assumption(load: Workload) -> str:
    """Return the note on the optimiser that was assumed."""
    if load.is_typical:
        name = load.optimizer_name
        return f"{name} is assumed, the usual optimiser of such a network: give the optimizer"
    return (
        "SGD is assumed; top-k must not stand in front of Adam, and the answer is another then: "
        "give the optimizer"
    )


def is_recommendable(way: Way, load: Workload) -> bool:
    """Return True for a recipe that was measured with such a network and its optimiser."""
    if way.recipe in LOCAL_RECIPES:
        return load.is_transformer
    return way.recipe == _NORM and load.optimizer == "sgd" and load.has_batch_norm


def allows_topk(load: Workload) -> bool:
    """Return True if gradients may be compressed: any optimiser but Adam and Muon."""
    return load.optimizer not in ("adamw", "muon")


def loss_class(way: Way) -> int:
    """Return a rank that is small for ways that lose little, in what was measured.

    A recipe keeps dense accuracy with 0.2 %, where top-k alone does not. Rounds that are shorter
    lose less.
    """
    if way.every > 1:
        return way.every
    if way.recipe:
        return 1
    return 0 if way.density >= _SAFE else 2


def caveat(way: Way, load: Workload) -> str:
    """Return the sentence on the accuracy of a recommended way; "" if nothing is lost."""
    if way.every > 1:
        return (
            f"It replaces the optimiser by gradwire.optim.muon; docs/local-steps.md says what that "
            f"does to the loss. {ADAM}."
        )
    if way.recipe:
        return (
            "It changes SGD: no momentum, 15 times the learning rate, 3 times the weight decay. "
            "ResNet-20 then has dense accuracy (docs/recipes.md); other networks were not measured."
        )
    if way.sends_all:
        return "" if allows_topk(load) or load.optimizer == "muon" else f"{ADAM}."
    return f"Density {way.density:g} {_LOW}." if way.density < _SAFE else ""
