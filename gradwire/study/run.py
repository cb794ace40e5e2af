"""From a name to rows and pictures."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gradwire.data import DataError
from gradwire.errors import ConfigError, unknown
from gradwire.report import ReportError
from gradwire.report.chart import png, svg
from gradwire.study.folder import Folder
from gradwire.study.study import Cell, Page, Settings, Study

Say = Callable[[str], None]


def run_study(
    study: Study, settings: Settings, out: Path, command: str, say: Say, only: Sequence[str] = ()
) -> Page:
    """Measures what is not measured yet, draws, and returns the page.

    A cell whose data are missing is left out; the error comes when all others are measured.
    """
    if study.files and not settings.small and not settings.data_dir:
        raise ConfigError(
            f"study {study.name} reads {', '.join(study.files)}: name their folder with "
            "--data-dir, or use --small."
        )
    cells = chosen(study, settings, only)
    folder = Folder(out, study.name)
    folder.open(settings, command)
    done, missing = folder.done(), []
    for number, cell in enumerate(cells, start=1):
        if cell in done:
            continue
        begin, words = time.perf_counter(), f"{study.name}  {number}/{len(cells)}  {_words(cell)}"
        try:
            folder.add(cell, study.measure(settings, cell))
        except DataError as error:
            missing.append(error)
            say(f"{words}  left out: {error}")
            continue
        say(f"{words}  {time.perf_counter() - begin:.1f} s")
    rows = folder.rows()
    if not rows:
        raise missing[0]
    with folder.rows_of(study):
        page = study.page(rows)
        _draw(page, folder)
    if missing:
        raise DataError(
            f"{len(missing)} of {len(cells)} runs of study {study.name} were left out: "
            f"{missing[0]} The same command measures them when the files are there."
        )
    return page


def chosen(study: Study, settings: Settings, only: Sequence[str]) -> list[Cell]:
    """The cells that have, for each of `only`, one of its values ("a,b") in them."""
    cells = study.cells(settings)
    for text in only:
        wanted = [part.strip() for part in text.split(",")]
        known = dict.fromkeys(str(value) for cell in cells for value in cell.values())
        for part in wanted:
            if part not in known:
                raise unknown(f"part of study {study.name}", part, known)
        cells = [cell for cell in cells if any(str(v) in wanted for v in cell.values())]
    return cells


def _words(cell: Cell) -> str:
    return ", ".join(f"{v:,}" if isinstance(v, int) else str(v) for v in cell.values())


def _draw(page: Page, folder: Folder) -> None:
    try:
        for chart in page.charts:
            folder.write(f"{chart.name}.png", png(chart))
            folder.write(f"{chart.name}.svg", svg(chart).encode())
    except ModuleNotFoundError as error:
        raise ReportError(
            f"the rows are measured; pictures need {error.name}: pip install {error.name}"
        ) from error
