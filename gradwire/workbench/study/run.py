"""Measure a study: run the missing cells, store their rows, draw the pictures."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from gradwire.errors import ConfigError, LabError, unknown
from gradwire.workbench.data import DataError
from gradwire.workbench.report import ReportError
from gradwire.workbench.report.chart import render_png, render_svg
from gradwire.workbench.study.folder import UNFINISHED, StudyFolder
from gradwire.workbench.study.study import Cell, Page, Settings, Study, StudyRow
from gradwire.workbench.study.unfinished import remove_unfinished

Say = Callable[[str], None]
Missing = DataError | LabError
MISSING = (DataError, LabError)
"""Errors that concern one cell: its data set or the lab is missing."""
Measured = tuple[Cell, list[StudyRow] | Missing]
"""A cell, and its rows or its error."""


def run_study(
    study: Study,
    settings: Settings,
    out: Path,
    command: str,
    say: Say,
    only: Sequence[str] = (),
    jobs: int = 1,
) -> Page:
    """Measure the cells that are not measured yet, draw the charts, and return the page.

    only: see `select_cells`. jobs: the number of cells to measure at the same time. A cell whose
    data set or lab is missing is left out. Its error is raised after all other cells are measured.
    """
    if study.files and not settings.small and not settings.data_dir:
        raise ConfigError(
            f"study {study.name} reads {', '.join(study.files)}: name their folder with "
            "--data-dir, or use --small."
        )
    for name in settings.choices:
        if name not in study.choices:
            raise ConfigError(f"study {study.name} has no --{name}: leave it out.")
    if jobs > 1 and study.timed:
        raise ConfigError(
            f"study {study.name} measures times, which {jobs} jobs would make longer: leave --jobs "
            "out."
        )
    cells = select_cells(study, settings, only)
    folder = StudyFolder(out, study.name)
    folder.open(settings, command, study.in_cells)
    settings = replace(settings, unfinished=str(folder.path / UNFINISHED))
    missing = _measure_missing(study, settings, folder, cells, jobs, say)
    while study.more and not missing:
        done = folder.done()
        more = [cell for cell in study.more(settings, folder.rows()) if cell not in done]
        if not (more := select_from(more, only)):
            break
        missing = _measure_missing(study, settings, folder, more, jobs, say)
    return _finish(study, folder, missing)


def _measure_missing(
    study: Study,
    settings: Settings,
    folder: StudyFolder,
    cells: Sequence[Cell],
    jobs: int,
    say: Say,
) -> list[Missing]:
    """Measure the cells that are not in the folder; return the errors of those left out."""
    done = folder.done()
    todo = [cell for cell in cells if cell not in done]
    missing: list[Missing] = []
    begin = time.perf_counter()
    for number, (cell, rows) in enumerate(_measure_cells(study, settings, todo, jobs), start=1):
        progress = (
            f"{study.name}  {len(cells) - len(todo) + number}/{len(cells)}  {_cell_text(cell)}"
        )
        if isinstance(rows, MISSING):
            # Hundreds of cells may lack the same file.
            if str(rows) not in map(str, missing):
                say(f"{progress}  left out: {rows}")
            missing.append(rows)
            continue
        folder.add(cell, rows)
        remove_unfinished(settings, cell)
        say(f"{progress}  {time.perf_counter() - begin:.1f} s")
        begin = time.perf_counter()
    return missing


def _measure_cells(
    study: Study, settings: Settings, cells: Sequence[Cell], jobs: int
) -> Iterator[Measured]:
    """Yield each cell with its rows or its error, in the order in which cells are ready."""
    if jobs == 1:
        yield from ((cell, _measure_cell(study.measure, settings, cell)) for cell in cells)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {
            pool.submit(_measure_cell, study.measure, settings, cell): cell for cell in cells
        }
        try:
            yield from _as_ready(running)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _as_ready(running: dict[Future[list[StudyRow] | Missing], Cell]) -> Iterator[Measured]:
    """Yield cells as they become ready.

    After a cell has failed no further cell begins. Its error is raised when the others have ended.
    """
    failed: Exception | None = None
    for future in as_completed(running):
        try:
            yield running[future], future.result()
        except CancelledError:
            continue
        except Exception as error:
            failed = failed or error
            for waiting in running:
                waiting.cancel()
    if failed:
        raise failed


def _measure_cell(
    measure: Callable[[Settings, Cell], list[StudyRow]], settings: Settings, cell: Cell
) -> list[StudyRow] | Missing:
    try:
        return measure(settings, cell)
    except MISSING as error:
        return error


def select_cells(study: Study, settings: Settings, only: Sequence[str]) -> list[Cell]:
    """Return the cells that contain one of the values of each text in `only`.

    A text is a list with commas, as in `--only "resnet20,fnn3"`.
    """
    cells = study.cells(settings)
    for text in only:
        wanted = [part.strip() for part in text.split(",")]
        known = dict.fromkeys(str(value) for cell in cells for value in cell.values())
        for part in wanted:
            if part not in known:
                raise unknown(f"part of study {study.name}", part, known)
        cells = select_from(cells, [text])
    return cells


def select_from(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Return the cells that contain one of the values of each text in `only`."""
    for text in only:
        wanted = [part.strip() for part in text.split(",")]
        cells = [cell for cell in cells if any(str(v) in wanted for v in cell.values())]
    return list(cells)


def _cell_text(cell: Cell) -> str:
    return ", ".join(f"{v:,}" if isinstance(v, int) else str(v) for v in cell.values())


def _finish(study: Study, folder: StudyFolder, missing: Sequence[Missing]) -> Page:
    """Draw the charts and return the page; raise the first error of a cell that was left out."""
    rows = folder.rows()
    if missing and not rows:
        raise missing[0]
    with folder.explain_row_errors(study):
        page = study.page(rows)
        _write_charts(page, folder)
    if missing:
        raise type(missing[0])(
            f"study {study.name} left out {len(missing)} of its runs: {missing[0]} "
            "The same command measures them when that is mended."
        )
    return page


def _write_charts(page: Page, folder: StudyFolder) -> None:
    try:
        for chart in page.charts:
            folder.write(f"{chart.name}.png", render_png(chart))
            folder.write(f"{chart.name}.svg", render_svg(chart).encode())
    except ModuleNotFoundError as error:
        raise ReportError(
            f"the rows are measured; pictures need {error.name}: pip install {error.name}"
        ) from error
