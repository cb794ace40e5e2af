"""Compare ranks for `gradwire doctor --ranks`: their versions, settings and links."""

import os
import platform
import socket
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from gradwire.config import Config
from gradwire.errors import ConfigError, ExchangeError, GradwireError, one_line
from gradwire.plan.rate import show_rate
from gradwire.ranks.distributed import DistributedGroup
from gradwire.ranks.together import gather_words
from gradwire.registry import parse_options
from gradwire.version import __version__
from gradwire.workbench.cli.say import say
from gradwire.workbench.lab.links import (
    CPU,
    Links,
    RankFigures,
    measure_links,
    rank_figures,
    slow_pairs,
    slow_ranks,
)
from gradwire.workbench.train.folder import package_version
from gradwire.workbench.train.launch import launch
from gradwire.workbench.train.worker import Worker, leave, under_torchrun

_COMMAND = "torchrun --nproc-per-node 4 -m gradwire doctor --ranks"
_TRIES = 3
_ENVIRONMENT = ("NCCL_", "GLOO_", "TORCH_", "TRITON_", "OMP_", "MKL_", "CUBLAS_", "GRADWIRE_")
_MAY_DIFFER = ("NCCL_HOSTID", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that ranks may set differently."""

_RankFacts = dict[str, dict[str, str]]


def check_ranks(timeout: float, method: str, density: float, options: Sequence[str]) -> bool:
    """Compare the ranks of torchrun, and print a table on the first; return True if all is well."""
    if not under_torchrun():
        raise ConfigError(f"--ranks looks at the ranks that torchrun starts: {_COMMAND}")
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise ConfigError(f"--ranks compares at least 2 ranks, got 1: {_COMMAND}")
    try:
        return launch(_compare, (method, density, tuple(options)), workers=0, timeout=timeout)
    except GradwireError:
        raise
    except RuntimeError as error:
        leave()
        raise ExchangeError(
            f"the ranks do not reach each other within {timeout:g} s "
            f"({one_line(error).rstrip('.')}). Start all of them, and let them reach MASTER_ADDR "
            f"and MASTER_PORT."
        ) from error


def _compare(worker: Worker, settings: tuple[str, float, tuple[str, ...]]) -> bool:
    """Compare this rank with the others; return the same answer on each (collective)."""
    control = DistributedGroup(worker.control, CPU)
    everyone = gather_words(control, _rank_facts(*settings), CPU)
    hosts = [facts["place"]["host"] for facts in everyone]
    group = _fast_group(worker) or control
    links = measure_links(group, control)
    for _ in range(_TRIES - 1):
        if not slow_link_lines(links, hosts):
            break
        links = links.best(measure_links(group, control))
    wrong = differences(everyone) + slow_link_lines(links, hosts)
    if worker.first:
        backend = "nccl" if group.on_stream else "gloo"
        _print_table(everyone, rank_figures(links, hosts), wrong, backend)
    worker.barrier()  # torchrun ends the other ranks as soon as one has failed.
    return not wrong


def _rank_facts(method: str, density: float, options: Sequence[str]) -> _RankFacts:
    """Return host, GPUs, versions, settings and environment of this rank."""
    try:
        config = Config(method=method, density=density, options=parse_options(options, method))
        settings = {k: str(v) for k, v in config.asdict().items()}
    except ConfigError as error:
        settings = {"refused": str(error)}
    versions = {"gradwire": __version__, "torch": torch.__version__}
    versions |= {"python": platform.python_version()}
    versions |= {name: package_version(name) for name in ("numpy", "triton")}
    versions |= {"CUDA": str(torch.version.cuda)}
    gpus = torch.cuda.device_count()
    return {
        "place": {"host": socket.gethostname(), "gpus": str(gpus)},
        "versions": versions,
        "settings": settings,
        "environment": {
            k: v
            for k, v in sorted(os.environ.items())
            if k.startswith(_ENVIRONMENT) and k not in _MAY_DIFFER
        },
    }


def _fast_group(worker: Worker) -> DistributedGroup | None:
    """Return an NCCL group if every rank has its own GPU, otherwise None (collective)."""
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", worker.world))
    enough_gpus = torch.cuda.device_count() >= local_world
    if not all(gather_words(DistributedGroup(worker.control, CPU), enough_gpus, CPU)):
        return None
    device = torch.device("cuda", worker.local_rank)
    torch.cuda.set_device(device)
    timeout = timedelta(seconds=60)
    return DistributedGroup(dist.new_group(backend="nccl", timeout=timeout), device, timeout)


def differences(everyone: Sequence[_RankFacts]) -> list[str]:
    """Return a line for each difference from the usual value.

    The usual value is the most common one; among equally common values that of the lowest rank.
    """
    lines = [
        f"rank {rank}: {facts['settings']['refused']}"
        for rank, facts in enumerate(everyone)
        if "refused" in facts["settings"]
    ]
    kinds = {
        "versions": "Install the same everywhere.",
        "settings": "Give all the same.",
        "environment": "Set it alike everywhere.",
    }
    for kind, fix in kinds.items():
        known = dict.fromkeys(k for facts in everyone for k in facts[kind] if k != "refused")
        for name in known:
            values = [facts[kind].get(name, "not set") for facts in everyone]
            refused = ["refused" in facts[kind] for facts in everyone]
            usual = Counter(values).most_common(1)[0][0]
            for rank, value in enumerate(values):
                if value != usual and not refused[rank]:
                    lines.append(
                        f"rank {rank}: {name} is {value}, rank {values.index(usual)} has {usual}. "
                        f"{fix}"
                    )
    return lines


def slow_link_lines(links: Links, hosts: Sequence[str]) -> list[str]:
    """Return a line for every rank and every pair that is slower than the others."""
    slow = slow_ranks(rank_figures(links, hosts))
    lines = []
    for rank, figure, value, usual in slow:
        if figure == "latency":
            text = f"latency is {1e3 * value:.2f} ms, that of the others {1e3 * usual:.2f} ms"
        else:
            text = f"{figure} {show_rate(value)}, the others {show_rate(usual)}"
        lines.append(f"rank {rank}: {text}. Look at its link.")
    for a, b, rate in slow_pairs(links, hosts, {rank for rank, *_ in slow}):
        lines.append(f"ranks {a} to {b}: {show_rate(rate)}, less than half of other pairs.")
    return lines


def _print_table(
    everyone: Sequence[_RankFacts],
    figures: Sequence[RankFigures],
    wrong: Sequence[str],
    backend: str,
) -> None:
    names = ("rank", "host", "GPUs", "gradwire", "torch", "python", "sends", "receives", "latency")
    rows = [[*names, ""]]
    for rank, (facts, measured) in enumerate(zip(everyone, figures, strict=True)):
        is_wrong = any(line.startswith(f"rank {rank}:") for line in wrong)
        rows.append(
            [
                str(rank), facts["place"]["host"], facts["place"]["gpus"],
                *(facts["versions"][name] for name in ("gradwire", "torch", "python")),
                show_rate(measured.sends), show_rate(measured.receives),
                f"{1e3 * measured.latency:.2f} ms",
                "see below" if is_wrong else "",
            ]
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    say(f"{len(everyone)} ranks, {backend}", style="bold")
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        say("  ".join(cells).rstrip(), style="red" if row[-1] else "")
    for line in wrong:
        say(f"wrong  {line}", style="red")
    if not wrong:
        say("all ranks are alike, and no link is slow beside the others")
