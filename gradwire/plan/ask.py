"""plan: the public function. The planner itself is loaded when it is asked."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradwire.plan.network import INNER_RATE, LATENCY

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from gradwire.plan.machine import Machine
    from gradwire.plan.planner import ExchangePlan


def plan(
    model: "str | Path | nn.Module" = "",
    *,
    workers: int,
    link: str | float = "10gbit",
    nodes: int | None = None,
    latency: str | float = LATENCY,
    inner_link: str | float = INNER_RATE,
    gpu: "str | Machine" = "",
    optimizer: str = "",
    recipe: str = "",
    params: int | None = None,
    step_seconds: float | None = None,
    batch: int | None = None,
    methods: Sequence[str] = (),
    density: float | Sequence[float] = (),
    min_density: float = 0.001,
    bundle_mb: float | None = None,
) -> "ExchangePlan":
    """Predict the seconds of a step for every way of exchanging, and recommend one.

        plan = gradwire.plan("resnet50", workers=16, link="1gbit", gpu="v100")
        print(plan.recommendation.reason)

    The ways are PyTorch's own, method x exchange x encoding x density, and recipes.

    model: a name ("resnet50", "gpt2", "7B", ...), a torch.nn.Module, or a .pt of shapes.
    params: a number of parameters, in place of the model.
    step_seconds: one worker's step without any exchange. All models but a name need it. For a name
    it is better than the guess from FLOP.
    nodes: the nodes, of one link each; as many as workers by default.
    link, inner_link: a node's link, and that of each GPU inside its node: "10gbit", "nvlink4".
    gpu: a name, or "" to measure this machine's device.
    optimizer: "sgd", "adamw" or "muon"; by default the usual one of such a network. Top-k is never
    recommended in front of Adam.
    recipe: the only recipe that may be recommended, whatever the optimiser.
    density: the only densities that are tried.
    min_density: the lowest density that may be recommended.
    """
    from gradwire.plan.given import find_device, find_network, find_workload
    from gradwire.plan.planner import Question, plan_for
    from gradwire.plan.ways import recipe_ways, torch_ways
    from gradwire.recipes import LOCAL_RECIPES, RECIPES

    device = find_device(gpu)
    load = find_workload(model, device, params, step_seconds, batch, optimizer)
    network = find_network(workers, nodes, link, latency, inner_link)
    question = Question(methods, density, min_density, bundle_mb)
    recipes = [recipe] if recipe else [*RECIPES, *LOCAL_RECIPES] if question.is_open else []
    others = [*torch_ways(load, network, methods), *recipe_ways(recipes)]
    return plan_for(load, device, network, question, others, recipe)
