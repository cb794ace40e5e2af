"""A rank that a launcher starts, `python -m faults.worker FOLDER`; its last line says how it ended.

Under torchrun only the first attempt is struck: what the agent starts again runs to the end.
"""

import argparse
import json
import os
import re
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples import elastic
from faults import crew, job
from faults.inject import Strike, install


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=job.STEPS)
    parser.add_argument("--timeout", type=float, default=job.TIMEOUT)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in every step")
    parser.add_argument("--strike", default="", help="RANK,MOMENT,NTH")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=crew.LIMIT / 3))
    rank = dist.get_rank()
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    install(rank, _strike(given.strike) if first and given.strike else None)
    _slow_down(given.pace)
    said: dict[str, Any] = {"rank": rank}
    try:
        fields = job.COMMON | {"timeout": given.timeout}
        said["start"], said["digest"] = elastic.train(
            given.folder, given.steps, job.EVERY, **fields
        )
    except Exception as error:
        said["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(said | {"at": time.monotonic()}), flush=True)
    sys.stderr.flush()
    # Groups of ranks that are gone cannot be ended in order.
    os._exit("error" in said)


def _strike(text: str) -> Strike:
    rank, moment, nth = text.split(",")
    return Strike(int(rank), moment, int(nth))


def _slow_down(pace: float) -> None:
    step = torch.optim.SGD.step

    def slowly(*args: Any) -> Any:
        time.sleep(pace)
        return step(*args)

    torch.optim.SGD.step = slowly


def answers(output: str) -> dict[int, dict[str, Any]]:
    """What each rank said last, of all that a launcher printed."""
    found = {}
    for match in re.finditer('{"rank":', output):  # two ranks may share a line
        said, _ = json.JSONDecoder().raw_decode(output[match.start() :])
        found[said["rank"]] = said
    return found


if __name__ == "__main__":
    main()
