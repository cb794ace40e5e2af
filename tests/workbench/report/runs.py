"""Run folders without a run."""

import json

from gradwire.workbench.train.folder import METRICS, RESULT, compare_folder, write_config
from gradwire.workbench.train.options import resolve


def write_run(folder, epochs=3, accuracy=0.96, done=None, **given):
    """A folder as a run of `epochs` epochs leaves it after `done` of them."""
    options = resolve({"epochs": epochs, "workers": 4, "density": 0.01} | given)
    _write(folder, options, accuracy, epochs if done is None else done)
    for name in options.compare:
        _write(compare_folder(folder, name), options.with_method(name), accuracy + 0.003, epochs)
    return folder


def _write(folder, options, accuracy, done):
    write_config(folder, options, "gradwire train --note '<b>&'")
    lines = []
    for step in range(1, 10 * done + 6):
        ended = step % 10 == 0
        sent = step * (1_000_000 if options.method == "dense" else 40_000)
        lines.append(
            {
                "step": step,
                "epoch": step // 10,
                "loss": 2 / step,
                "test_accuracy": accuracy - 0.2 / step if ended else None,
                "bytes_sent": sent,
                "bytes_dense": step * 1_000_000,
                "achieved_density": 0.01,
                "residual_norm": 1.5,
                "lr": 0.1,
                "seconds": step / 10,
            }
        )
        if ended and step == 10 * done:
            break
    (folder / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / RESULT).write_text(json.dumps({"replicas_identical": True}))
