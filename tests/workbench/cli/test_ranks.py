"""`gradwire doctor --ranks`: ranks that are not alike, and slow links, are found and named."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("typer")

import torch
import torch.distributed as dist

from gradwire.errors import ConfigError
from gradwire.workbench.cli import ranks as command
from gradwire.workbench.lab.links import Links
from gradwire.workbench.train.worker import Worker

USUAL = ("topk", 0.01, ())


def compared(rank, odd):
    """Whether all is well, and what the first rank prints."""
    said, method = [], USUAL
    environment, version = dict(os.environ), command.__version__
    saved = command.say, command.slow_link_lines
    command.say = lambda text, style="": said.append(text)
    command.slow_link_lines = lambda links, hosts: []  # the machine may be busy
    try:
        if rank == 1 and odd == "version":
            command.__version__ = "0.0.9"
        if rank == 1 and odd == "environment":
            os.environ["NCCL_ALGO"] = "Tree"
        if rank == 1 and odd == "settings":
            method = ("topk/gtopk", 0.02, ())
        if rank == 1 and odd == "refused":
            method = ("topkk", 0.02, ())
        control = dist.new_group(backend="gloo")
        os.environ["GLOO_SOCKET_IFNAME"] = f"eth{rank}"  # may differ
        worker = Worker(rank, 3, rank, torch.device("cpu"), lambda: False, False, control)
        return command._compare(worker, method), said
    finally:
        command.say, command.slow_link_lines = saved
        command.__version__ = version
        os.environ.clear()
        os.environ.update(environment)


@pytest.mark.parametrize(
    ("odd", "lines"),
    [
        ("", []),
        ("version", ["rank 1: gradwire is 0.0.9, rank 0 has 0.1.0. Install the same everywhere."]),
        (
            "environment",
            ["rank 1: NCCL_ALGO is Tree, rank 0 has not set. Set it alike everywhere."],
        ),
        (
            "settings",
            [
                "rank 1: density is 0.02, rank 0 has 0.01. Give all the same.",
                "rank 1: exchange is gtopk, rank 0 has allgather. Give all the same.",
            ],
        ),
        ("refused", ["rank 1: unknown method 'topkk'. Did you mean 'topk'?"]),
    ],
)
def test_a_rank_that_differs_is_named_and_every_rank_knows(ranks, odd, lines):
    answers = ranks.run(3, compared, odd)
    assert [well for well, _ in answers] == [not lines] * 3
    said = answers[0][1]
    assert answers[1][1] == answers[2][1] == []
    assert said[0] == "3 ranks, gloo"
    assert [line.split()[0] for line in said[1:5]] == ["rank", "0", "1", "2"]
    assert said[3].endswith("see below") == bool(lines)
    found = [line.removeprefix("wrong  ") for line in said if line.startswith("wrong")]
    assert len(found) == len(lines)
    assert all(line.startswith(start) for line, start in zip(found, lines, strict=True))


def test_slow_links_are_named_with_their_figures_beside_the_others():
    fast, hosts = 95.7e6, ["a"] * 4
    links = Links([[fast] * 4 for _ in range(4)], [[1e-4] * 4 for _ in range(4)])
    assert command.slow_link_lines(links, hosts) == []
    links.rate[2][:] = [9.7e6] * 4
    links.latency[3][:] = [0.02] * 4
    assert command.slow_link_lines(links, hosts) == [
        "rank 2: sends 9.7 Mbit/s, the others 95.7 Mbit/s. Look at its link.",
        "rank 3: latency is 20.00 ms, that of the others 0.10 ms. Look at its link.",
    ]
    links.rate[2][:], links.latency[3][:] = [fast] * 4, [1e-4] * 4
    links.rate[0][1] = 1e6
    assert command.slow_link_lines(links, hosts) == [
        "ranks 0 to 1: 1 Mbit/s, less than half of other pairs."
    ]


ODD = """
import os, sys
os.environ["NCCL_ALGO"] = os.environ["RANK"]
from gradwire.workbench.cli import main
main()
"""


def test_under_torchrun_it_shows_a_table_and_fails(tmp_path):
    script = tmp_path / "odd.py"
    script.write_text(ODD)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    done = subprocess.run(
        [*torchrun, str(script), "doctor", "--ranks"],
        capture_output=True, text=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "2 ranks, gloo" in done.stdout, done.stderr
    assert "wrong  rank 1: NCCL_ALGO is 1, rank 0 has 0." in done.stdout
    assert "bit/s" in done.stdout


def test_without_torchrun_it_says_how_to_start_it(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        ConfigError, match=r"torchrun --nproc-per-node 4 -m gradwire doctor --ranks"
    ):
        command.check_ranks(5, *USUAL)


def test_ranks_that_do_not_come_are_one_line_within_the_time():
    worker = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    code = "from gradwire.workbench.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--ranks", "--timeout", "1"],
        capture_output=True, text=True, timeout=120,
        env=os.environ | worker | {"MASTER_PORT": "0"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "error: the ranks do not reach each other within 1 s (" in done.stderr
    assert "Traceback" not in done.stderr
