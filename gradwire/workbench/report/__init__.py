"""Write the report of a training run: one self-contained HTML page."""

import os
from pathlib import Path

from gradwire.errors import GradwireError
from gradwire.workbench.report.outcome import headline
from gradwire.workbench.report.read import Run, read_runs
from gradwire.workbench.train.folder import REPORT


class ReportError(GradwireError, RuntimeError):
    """Error of a report that cannot be drawn, because a package is missing."""


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html from the files of the run, and return its path."""
    from gradwire.workbench.report.page import render_run

    runs = read_runs(folder)
    try:
        content = render_run(runs)
    except ModuleNotFoundError as error:
        raise ReportError(
            f"the report needs {error.name}, which is not installed: pip install {error.name}, "
            f"then gradwire report {folder}"
        ) from error
    scratch = folder / (REPORT + ".tmp")
    scratch.write_text(content, encoding="utf-8", errors="xmlcharrefreplace")
    os.replace(scratch, folder / REPORT)
    return folder / REPORT


__all__ = ["ReportError", "Run", "headline", "read_runs", "write_report"]
