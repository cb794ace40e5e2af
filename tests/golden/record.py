"""Writes anew what the golden tests expect: `python -m tests.golden.record [PART...]`.

Parts are messages, steps and folders; without one it is all three. Whoever runs this has changed
the wire format, the checkpoint format or the results of training. Such a change needs a line in
CHANGELOG.md that says what differs, and who has to do what. A refactoring never needs it.

The folders in data/old are of commit 9878616 and stay as they are. That commit wrote them so:

    git archive 9878616 | tar -x -C DIR
    cp -r tests/golden DIR/tests/
    cd DIR && python -m tests.golden.record folders old
    cp -r DIR/tests/golden/data/old tests/golden/data/
"""

import json
import shutil
import sys

import numpy as np

from tests.golden import folders, messages, steps
from tests.golden.cases import DATA
from tests.rank_pool import Ranks

PARTS = ("messages", "steps", "folders")


def write_json(name, content):
    """One line for each of the innermost values, so that a diff shows what changed."""
    (DATA / name).write_text(json.dumps(content, indent=1) + "\n")


def write_folders(pool, name):
    """The folders, and beside them what they hold."""
    target = DATA / name
    shutil.rmtree(target, ignore_errors=True)
    found = pool.run(2, folders.write, str(target))
    arrays, counts = {}, []
    for rank, kinds in enumerate(found):
        counts.append({kind: count for kind, (_, count) in kinds.items()})
        for kind, (kept, _) in kinds.items():
            arrays |= {f"{rank}/{kind}/{part}": array for part, array in kept.items()}
    np.savez_compressed(target / "expected.npz", **arrays)
    (target / "expected.json").write_text(json.dumps(counts, indent=1) + "\n")


def main(asked):
    parts = [part for part in PARTS if part in asked] or PARTS
    pool = Ranks(2)
    try:
        if "messages" in parts:
            write_json("messages.json", messages.record())
        if "steps" in parts:
            write_json("steps.json", steps.record(pool))
        if "folders" in parts:
            write_folders(pool, "old" if "old" in asked else "new")
    finally:
        pool.close()


if __name__ == "__main__":
    main(sys.argv[1:])
