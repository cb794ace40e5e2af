"""A rank for a launcher to start: `python -m faults.worker FOLDER`.

The last line that it prints is its result or its error, as JSON. Under torchrun only the first
attempt is struck. The attempt that the agent starts again runs to the end.
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
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=job.STEPS)
    parser.add_argument("--timeout", type=float, default=job.TIMEOUT)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait in every step")
    parser.add_argument("--strike", default="", help="RANK,MOMENT,NTH")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=crew.LIMIT / 3))
    rank = dist.get_rank()
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    install(rank, _strike(options.strike) if first and options.strike else None)
    _slow_down(options.pace)
    answer: dict[str, Any] = {"rank": rank}
    try:
        fields = job.COMMON | {"timeout": options.timeout}
        answer["start"], answer["digest"] = elastic.train(
            options.folder, options.steps, job.EVERY, **fields
        )
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(answer | {"at": time.monotonic()}), flush=True)
    sys.stderr.flush()
    # Process groups whose ranks are dead cannot be destroyed in order.
    os._exit("error" in answer)


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
    """Return each rank's last answer in the output of a launcher."""
    last_answers = {}
    for match in re.finditer('{"rank":', output):  # a line may hold the answers of two ranks
        answer, _ = json.JSONDecoder().raw_decode(output[match.start() :])
        last_answers[answer["rank"]] = answer
    return last_answers


if __name__ == "__main__":
    main()
