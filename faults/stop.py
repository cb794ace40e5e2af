"""Fault: SIGTERM to `gradwire train`, which must save, exit with 130 and resume bit-equal."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from faults import crew
from faults.row import Row

GIVEN = "--model lenet5 --batch 8 --workers 2 --density 0.05 --device cpu --log-every 5"
STEPS = ("--max-steps", "40")
STOPPED, TIMES = 130, 3


def row() -> Row:
    """Return a row of a few tries, each with a later stop."""
    row = Row("SIGTERM during gradwire train", came_of_it="saved, exit code 130, bit-equal")
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        start(whole).wait(crew.LIMIT)
        for number in range(TIMES):
            row.count(stop(Path(folder) / str(number), 1 + 2 * number, whole))
    return row


def stop(folder: Path, lines: int, whole: Path) -> str:
    """Stop a run after `lines` of metrics, resume it, and return a description of the loss."""
    process = start(folder)
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + crew.LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= lines:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(crew.LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"after {lines} lines: hangs"
    if code != STOPPED or not result(folder)["stopped"]:
        return f"after {lines} lines: exit code {code}"
    code = command("--resume", str(folder)).wait(crew.LIMIT)
    digest, wanted = (result(f)["parameters_sha256"] for f in (folder, whole))
    return "" if (code, digest) == (0, wanted) else f"after {lines} lines: {code}, {digest}"


def start(folder: Path) -> "subprocess.Popen[bytes]":
    """Start a new run."""
    return command("--out", str(folder), *GIVEN.split())


def command(*args: str) -> "subprocess.Popen[bytes]":
    """Start `gradwire train` with these arguments."""
    program = [sys.executable, "-m", "gradwire", "train", *args, *STEPS]
    return subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def result(folder: Path) -> dict[str, object]:
    """Return the result that the run has written."""
    return json.loads((folder / "result.json").read_text())
