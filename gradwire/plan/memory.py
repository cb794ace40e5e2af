"""Memory of an exchange: the bytes per parameter that a rank keeps from step to step.

They come on top of the parameters, the gradients and the optimiser's state. What a step needs only
for a moment is not counted.
"""

from gradwire.exchange import EXCHANGES
from gradwire.plan.network import Network
from gradwire.plan.outside import find_outside
from gradwire.plan.predict import Way
from gradwire.recipes import LOCAL_RECIPES, RECIPES

_WORD = 4.0
"""Residuals, momentum and x are fp32."""


def memory_bytes(way: Way, network: Network) -> float:
    """Return the bytes per parameter that a rank keeps; models in bf16 need 4 more for residuals.

    A residual takes 4, momentum correction 4, x of local steps 4 and their outer momentum 4. The
    owner of a part keeps the rounding of its mean.
    """
    outside = find_outside(way.method)
    if outside is not None:
        return outside.memory
    if way.method == "dense" and EXCHANGES[way.exchange].whole == "fp32":
        return 0.0
    kept = _WORD
    if way.exchange == "owner":
        kept += _WORD / network.workers
    if way.recipe in LOCAL_RECIPES:
        has_momentum = bool(LOCAL_RECIPES[way.recipe].fields.get("outer_momentum"))
        kept += _WORD * (1 + has_momentum)
    elif way.recipe and RECIPES[way.recipe].fields.get("momentum"):
        kept += _WORD
    return kept
