"""Fault: a worker is killed under torchrun, which restarts all. They must go on bit-equal."""

import os
import subprocess
import sys
import tempfile

from faults import crew, job
from faults.kills import WORLD, unbroken
from faults.row import Row
from faults.worker import answers

STRIKES = ("2,exchange,60", "0,write,2", "3,optimizer,5")


def row() -> Row:
    """Return a row with one try per strike."""
    row = Row("torchrun --max-restarts 1, a worker killed", came_of_it="restarted, bit-equal")
    digest = unbroken({}).digest
    for strike in STRIKES:
        row.count(restart(strike, digest))
    return row


def restart(strike: str, digest: str) -> str:
    """Return a description of the loss, "" for none."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    ranks = ["--nproc-per-node", str(WORLD), "-m", "faults.worker", "--strike", strike]
    # torch 2.13 keeps one store over restarts, where Gloo finds the addresses of the dead.
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launcher, *ranks, folder]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=2 * crew.LIMIT, env=environment
            )
        except subprocess.TimeoutExpired:
            return f"{strike}: torchrun hangs"
    answered = answers(done.stdout)
    if done.returncode or sorted(answered) != list(range(WORLD)):
        return f"{strike}: exit code {done.returncode}, {answered}, {done.stderr[-500:]}"
    starts = {answer.get("start") for answer in answered.values()}
    if starts not in ({0}, {job.EVERY}, {2 * job.EVERY}) or "exitcode: -9" not in done.stderr:
        return f"{strike}: nothing was restarted: {answered}"
    wrong = [answer for answer in answered.values() if answer.get("digest") != digest]
    return f"{strike}: {wrong[0]}, the unbroken run has {digest}" if wrong else ""
