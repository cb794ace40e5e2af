"""The run folder: config.json, metrics.jsonl, checkpoint/, gradients/, result.json, report.html.

saved.json keeps the step of the last checkpoint, even after that checkpoint is lost. The file
`lock` is there while a run writes.
"""

import json
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from gradwire.errors import ConfigError, StateError, one_line
from gradwire.version import __version__
from gradwire.workbench.train.options import Options
from gradwire.workbench.train.saved import options_from_dict

CONFIG, METRICS, RESULT = "config.json", "metrics.jsonl", "result.json"
REPORT, CHECKPOINT, TENSORBOARD = "report.html", "checkpoint", "tensorboard"
GRADIENTS, SAVED, LOCK = "gradients", "saved.json", "lock"
_FILES = (CONFIG, METRICS, RESULT, REPORT, SAVED)
_FOLDERS = (CHECKPOINT, TENSORBOARD, GRADIENTS)
_TRACES = (METRICS, RESULT, SAVED)
"""The files that only a run that has begun leaves."""


def write_json(path: Path, content: Any) -> None:
    """Replace `path` in one go: a reader sees the old content or the new, never half of it."""
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def read_json(path: Path) -> Any:
    """Return the content of a JSON file in a run folder."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StateError(f"{path} cannot be read: {one_line(error)}.") from error


def make_run_folder(folder: Path) -> None:
    """Make the folder of a run."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder} cannot be made: {error.strerror}.") from error


def open_new(folder: Path, overwrite: bool = False) -> None:
    """Prepare the folder of a new run. A run that is already in it is refused, or removed."""
    if overwrite:
        _remove_run(folder)
    if any((folder / name).exists() for name in _TRACES):
        raise ConfigError(
            f"{folder} already holds a run. Continue it with --resume {folder}, replace it with "
            "--overwrite, or choose another --out."
        )


def _remove_run(folder: Path) -> None:
    """Remove the files that a run wrote; anything else in the folder stays."""
    if not (folder / CONFIG).is_file():
        return
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    for part in [*(folder / name for name in _FOLDERS), *folder.glob("compare-*")]:
        shutil.rmtree(part, ignore_errors=True)


def discard_unused(folder: Path) -> None:
    """Empty the folder of a run that failed before its first step.

    The end of the lock then removes the empty folder.
    """
    if {path.name for path in folder.iterdir()} == {CONFIG, LOCK}:
        (folder / CONFIG).unlink()


def write_config(folder: Path, options: Options, command: str = "") -> None:
    """Write the options of the run, the command line, and the machine."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "options": options.asdict(),
        "command": command,
        "machine": describe_machine(options.device),
    }
    write_json(folder / CONFIG, content)


def read_config(folder: Path) -> Options:
    """Return the options of the run in `folder`."""
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no {CONFIG}.")
    content = read_json(folder / CONFIG)
    if not isinstance(content, dict) or not isinstance(content.get("options"), dict):
        raise StateError(f"{folder / CONFIG} holds no options.")
    try:
        return options_from_dict(content["options"])
    except ConfigError as error:
        raise ConfigError(f"{folder / CONFIG}: {error}") from error


def read_command(folder: Path) -> str:
    """Return the command lines of the run in `folder`, one per line."""
    content = read_json(folder / CONFIG)
    return str(content.get("command", "")) if isinstance(content, dict) else ""


def read_machine(folder: Path) -> dict[str, str]:
    """Return the description of the machine on which the run in `folder` began."""
    content = read_json(folder / CONFIG)
    machine = content.get("machine") if isinstance(content, dict) else None
    return {k: str(v) for k, v in machine.items()} if isinstance(machine, dict) else {}


def read_result(folder: Path) -> dict[str, Any] | None:
    """Return the result of the run in `folder`; None before the run has ended."""
    if not (folder / RESULT).is_file():
        return None
    result = read_json(folder / RESULT)
    if not isinstance(result, dict):
        raise StateError(f"{folder / RESULT} holds no result of a run.")
    return result


def compare_folder(folder: Path, name: str) -> Path:
    """Return the folder of the run that `--compare name` adds."""
    return folder / f"compare-{name.replace('/', '-')}"


def lock_folder(folder: Path) -> Path:
    """Return the folder of the lock of the run in `folder`.

    A run that --compare has added shares the lock of the run that it is compared with.
    """
    parent = folder.absolute().parent
    compared = folder.absolute().name.startswith("compare-") and (parent / CONFIG).is_file()
    return parent if compared else folder


def describe_machine(device: str) -> dict[str, str]:
    """Return the versions and the hardware of this machine, in words."""
    cores = f"{os.cpu_count()} cores"
    hardware = torch.cuda.get_device_name() if device == "cuda" else f"{_cpu_name()}, {cores}"
    return {
        "gradwire": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "hardware": hardware,
    }


def package_version(name: str) -> str:
    """Return the installed version of a package, or "not installed"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
