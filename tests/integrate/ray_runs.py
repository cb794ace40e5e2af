"""Ray's example for two epochs; the last metrics go to FOLDER/metrics.json.

python -m tests.integrate.ray_runs FOLDER
"""

import json
import sys
from pathlib import Path

import ray

from tests.integrate import trainers


def runs(folder):
    main = trainers.example("ray_train")["main"]
    # As many CPUs as workers, however few there are, and the smallest store: /dev/shm may be small.
    ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)
    try:
        return main(2, folder / "run")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "metrics.json").write_text(json.dumps(runs(folder)))
