"""`gradwire doctor --ranks`: whether the ranks are alike, and which of them has a slow link."""

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
from gradwire.ranks.group import DistributedGroup
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

COMMAND = "torchrun --nproc-per-node 4 -m gradwire doctor --ranks"
TRIES = 3
ENVIRONMENT = ("NCCL_", "GLOO_", "TORCH_", "TRITON_", "OMP_", "MKL_", "CUBLAS_", "GRADWIRE_")
OWN = ("NCCL_HOSTID", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""What ranks may have each for itself."""

Facts = dict[str, dict[str, str]]


def check_ranks(timeout: float, method: str, density: float, options: Sequence[str]) -> bool:
    """Compares the ranks torchrun started; the first one shows a table. Whether all is well."""
    if not under_torchrun():
        raise ConfigError(f"--ranks looks at the ranks that torchrun starts: {COMMAND}")
    if int(os.environ["WORLD_SIZE"]) < 2:
        raise ConfigError(f"--ranks compares at least 2 ranks, got 1: {COMMAND}")
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


def _compare(worker: Worker, asked: tuple[str, float, tuple[str, ...]]) -> bool:
    """The work of a rank (collective); the same answer on each."""
    control = DistributedGroup(worker.control, CPU)
    everyone = gather_words(control, facts(*asked), CPU)
    hosts = [words["place"]["host"] for words in everyone]
    group = _fast_group(worker, everyone) or control
    links = measure_links(group, control)
    for _ in range(TRIES - 1):
        if not slow_words(links, hosts):
            break
        links = links.best(measure_links(group, control))
    wrong = differences(everyone) + slow_words(links, hosts)
    if worker.first:
        backend = "nccl" if group.on_stream else "gloo"
        _show(everyone, rank_figures(links, hosts), wrong, backend)
    worker.barrier()  # torchrun ends the others as soon as one has failed
    return not wrong


def facts(method: str, density: float, options: Sequence[str]) -> Facts:
    """What this rank runs, where, and how it was told to."""
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
            if k.startswith(ENVIRONMENT) and k not in OWN
        },
    }


def _fast_group(worker: Worker, everyone: Sequence[Facts]) -> DistributedGroup | None:
    """NCCL's, where every rank has a GPU to itself."""
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", worker.world))
    mine = torch.cuda.device_count() >= local_world
    if not all(gather_words(DistributedGroup(worker.control, CPU), mine, CPU)):
        return None
    device = torch.device("cuda", worker.local_rank)
    torch.cuda.set_device(device)
    timeout = timedelta(seconds=60)
    return DistributedGroup(dist.new_group(backend="nccl", timeout=timeout), device, timeout)


def differences(everyone: Sequence[Facts]) -> list[str]:
    """A line for everything in which ranks differ; the usual is what most have, or rank 0."""
    lines = [
        f"rank {rank}: {words['settings']['refused']}"
        for rank, words in enumerate(everyone)
        if "refused" in words["settings"]
    ]
    kinds = {
        "versions": "Install the same everywhere.",
        "settings": "Give all the same.",
        "environment": "Set it alike everywhere.",
    }
    for kind, fix in kinds.items():
        known = dict.fromkeys(k for words in everyone for k in words[kind] if k != "refused")
        for name in known:
            values = [words[kind].get(name, "not set") for words in everyone]
            refused = ["refused" in words[kind] for words in everyone]
            usual = Counter(values).most_common(1)[0][0]
            for rank, value in enumerate(values):
                if value != usual and not refused[rank]:
                    lines.append(
                        f"rank {rank}: {name} is {value}, rank {values.index(usual)} has {usual}. "
                        f"{fix}"
                    )
    return lines


def slow_words(links: Links, hosts: Sequence[str]) -> list[str]:
    """A line for every rank and every pair that is slow beside the others."""
    found = slow_ranks(rank_figures(links, hosts))
    lines = []
    for rank, what, own, usual in found:
        if what == "latency":
            figures_said = f"latency is {1e3 * own:.2f} ms, that of the others {1e3 * usual:.2f} ms"
        else:
            figures_said = f"{what} {show_rate(own)}, the others {show_rate(usual)}"
        lines.append(f"rank {rank}: {figures_said}. Look at its link.")
    for a, b, rate in slow_pairs(links, hosts, {rank for rank, *_ in found}):
        lines.append(f"ranks {a} to {b}: {show_rate(rate)}, less than half of other pairs.")
    return lines


def _show(
    everyone: Sequence[Facts], found: Sequence[RankFigures], wrong: Sequence[str], backend: str
) -> None:
    names = ("rank", "host", "GPUs", "gradwire", "torch", "python", "sends", "receives", "latency")
    rows = [[*names, ""]]
    for rank, (words, own) in enumerate(zip(everyone, found, strict=True)):
        odd = any(line.startswith(f"rank {rank}:") for line in wrong)
        rows.append(
            [
                str(rank), words["place"]["host"], words["place"]["gpus"],
                *(words["versions"][name] for name in ("gradwire", "torch", "python")),
                show_rate(own.sends), show_rate(own.receives), f"{1e3 * own.latency:.2f} ms",
                "see below" if odd else "",
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
