"""A run folder as one self-contained HTML page."""

import os
from pathlib import Path

from gradwire.errors import GradwireError
from gradwire.workbench.report.outcome import headline
from gradwire.workbench.report.read import Run, read_runs
from gradwire.workbench.train.folder import REPORT


class ReportError(GradwireError, RuntimeError):
    """A report that cannot be drawn here."""


def write_report(folder: Path) -> Path:
    """Writes `folder`/report.html from the run's files, and returns its path."""
    from gradwire.workbench.report.page import page

    runs = read_runs(folder)
    try:
        content = page(runs)
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
