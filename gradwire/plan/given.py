"""Device, workload and network out of what the user gave."""

from pathlib import Path

from torch import nn

from gradwire.errors import ConfigError
from gradwire.plan.accuracy import with_optimizer
from gradwire.plan.language import by_language_model
from gradwire.plan.machine import Machine, find_machine
from gradwire.plan.network import Network, link_rate
from gradwire.plan.rate import parse_time
from gradwire.plan.workload import Workload, by_count, by_file, by_module


def find_device(gpu: str | Machine) -> Machine:
    """Return the device of that name; this machine's own for ""."""
    if isinstance(gpu, Machine):
        return gpu
    if gpu:
        return find_machine(gpu)
    from gradwire.plan.measure import measure_machine

    return measure_machine()


def find_workload(
    model: str | Path | nn.Module,
    device: Machine,
    params: int | None,
    seconds: float | None,
    batch: int | None,
    optimizer: str = "",
) -> Workload:
    """Return the workload of a model in any form, or of a number of parameters."""
    return with_optimizer(_workload_of(model, device, params, seconds, batch), optimizer)


def find_network(
    workers: int,
    nodes: int | None,
    link: str | float,
    latency: str | float,
    inner_link: str | float,
) -> Network:
    """Return the network; without `nodes` every worker is a node."""
    return Network(
        workers,
        workers if nodes is None else nodes,
        link_rate(link),
        parse_time(latency),
        link_rate(inner_link),
    )


def _workload_of(
    model: str | Path | nn.Module,
    device: Machine,
    params: int | None,
    seconds: float | None,
    batch: int | None,
) -> Workload:
    if bool(str(model)) == (params is not None):
        raise ConfigError(
            "give a model (a name, an nn.Module or a .pt of shapes) or params, one of the two"
        )
    if params is not None:
        return by_count(params, seconds)
    if isinstance(model, nn.Module):
        return by_module(model, seconds)
    if isinstance(model, Path) or str(model).endswith(".pt"):
        return by_file(Path(model), seconds)
    # Sizes that are only planned with, and never trained here.
    known = by_language_model(str(model), device, batch, seconds)
    if known is not None:
        return known
    # The only place where the library asks the workbench, and only for a network's name.
    from gradwire.workbench.models.workload import workload_by_name

    return workload_by_name(str(model), device, batch, seconds)
