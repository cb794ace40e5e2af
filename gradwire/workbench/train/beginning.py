"""The beginning of a resumed run: its checkpoint, or step 0 if it never had one."""

from pathlib import Path

from gradwire.errors import StateError
from gradwire.workbench.train import checkpoint
from gradwire.workbench.train import folder as folders
from gradwire.workbench.train.metrics import read_records


def beginning_note(folder: Path, main: Path) -> str:
    """Return a note for the user if the run in `folder` starts again at step 0, otherwise "".

    Raise StateError if the run has saved a checkpoint that is gone. `main` is the folder that the
    user named; `folder` differs from it for a run that --compare has added.
    """
    if checkpoint.exists(folder) or not (folder / folders.CONFIG).is_file():
        return ""
    if step := saved_step(folder):
        saved = folder / folders.CHECKPOINT
        missing = saved / checkpoint.TRAINER if saved.is_dir() else saved
        again = f"start again with --out {folder} --overwrite"
        if folder != main:
            again = f"remove {folder} to start it again"
        raise StateError(
            f"{missing} is missing, but the run has saved a checkpoint at step {step}. "
            f"Put it back, or {again}."
        )
    return f"{folder} is not known to have saved a checkpoint: it starts again at step 0."


def saved_step(folder: Path) -> int:
    """Return the last step at which the run is known to have saved; 0 without such a step."""
    steps = [
        _read_step(folder / folders.SAVED, "step"),
        _read_step(folder / folders.RESULT, "steps"),
    ]
    # A step after the end of an epoch is only taken once that epoch's checkpoint is written.
    ended = [0]
    for record in read_records(folder / folders.METRICS):
        steps.append(ended[-1])
        if any(value is not None for name, value in record.items() if name.startswith("test_")):
            ended.append(record["step"])
    return max(steps)


def _read_step(path: Path, name: str) -> int:
    """Return the step under `name` in a JSON file; 0 without the file."""
    if not path.is_file():
        return 0
    content = folders.read_json(path)
    step = content.get(name) if isinstance(content, dict) else None
    if not isinstance(step, int):
        raise StateError(f"{path}: {name} is {step!r:.40}, not a number of steps.")
    return step
