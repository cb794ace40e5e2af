"""From a name to rows and pictures."""

import time
from collections.abc import Callable
from pathlib import Path

from gradwire.errors import ConfigError
from gradwire.report import ReportError
from gradwire.report.chart import png, svg
from gradwire.study.folder import Folder
from gradwire.study.study import Page, Settings, Study

Say = Callable[[str], None]


def run_study(study: Study, settings: Settings, out: Path, command: str, say: Say) -> Page:
    """Measures what is not measured yet, draws, and returns the page."""
    if study.files and not settings.small and not settings.data_dir:
        raise ConfigError(
            f"study {study.name} reads {', '.join(study.files)}: name their folder with "
            "--data-dir, or use --small."
        )
    folder = Folder(out, study.name)
    folder.open(settings, command)
    done, cells = folder.done(), study.cells(settings)
    for number, cell in enumerate(cells, start=1):
        if cell in done:
            continue
        begin = time.perf_counter()
        rows = study.measure(settings, cell)
        folder.add(cell, rows)
        words = ", ".join(f"{v:,}" if isinstance(v, int) else str(v) for v in cell.values())
        say(f"{study.name}  {number}/{len(cells)}  {words}  {time.perf_counter() - begin:.1f} s")
    page = study.page(folder.rows())
    _draw(page, folder)
    return page


def _draw(page: Page, folder: Folder) -> None:
    try:
        for chart in page.charts:
            folder.write(f"{chart.name}.png", png(chart))
            folder.write(f"{chart.name}.svg", svg(chart).encode())
    except ModuleNotFoundError as error:
        raise ReportError(
            f"the rows are measured; pictures need {error.name}: pip install {error.name}"
        ) from error
