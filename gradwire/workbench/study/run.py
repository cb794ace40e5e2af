"""Measure a study: run the missing cells, store their rows, draw the pictures."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
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
    queue = _Queue(study, settings, folder, cells, only)
    missing: list[Missing] = []
    begin = time.perf_counter()
    for cell, rows in _measure_cells(study, settings, queue, jobs):
        progress = f"{study.name}  {queue.done}/{queue.total}  {_cell_text(cell)}"
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
    return _finish(study, folder, missing)


class _Queue:
    """The cells to measure: those without rows, and what the rows so far ask for.

    done, total: cells that are measured and all that are known, for a line of progress.
    """

    def __init__(
        self,
        study: Study,
        settings: Settings,
        folder: StudyFolder,
        cells: Sequence[Cell],
        only: Sequence[str],
    ) -> None:
        self._study, self._settings, self._folder, self._only = study, settings, folder, only
        measured = folder.done()
        self._waiting = [cell for cell in cells if cell not in measured]
        self._open: list[Cell] = []
        self._left_out: list[Cell] = []
        self.total, self.done = len(cells), len(cells) - len(self._waiting)
        self._ask()

    def take(self) -> Cell | None:
        """Return the next cell to begin; None if there is none at present."""
        if not self._waiting:
            return None
        self._open.append(self._waiting.pop(0))
        return self._open[-1]

    def end(self, cell: Cell) -> None:
        """Note that a cell has ended."""
        self._open.remove(cell)
        self.done += 1

    def settle(self, cell: Cell) -> None:
        """Take note of the rows of a cell that has ended, and ask which cells come next."""
        if cell not in self._folder.done():
            # It is not asked for again, though its rows are missing.
            self._left_out.append(cell)
        self._ask()

    def clear(self) -> None:
        """Forget the cells that have not begun."""
        self._waiting = []

    def _ask(self) -> None:
        """Add the cells that the rows so far ask for."""
        if self._study.more is None:
            return
        pending = [*self._waiting, *self._open]
        known = [*self._folder.done(), *pending, *self._left_out]
        more = self._study.more(self._settings, self._folder.rows(), pending)
        more = [cell for cell in select_from(more, self._only) if cell not in known]
        self._waiting += more
        self.total += len(more)


def _measure_cells(
    study: Study, settings: Settings, queue: _Queue, jobs: int
) -> Iterator[Measured]:
    """Yield each cell with its rows or its error, in the order in which cells are ready."""
    if jobs == 1:
        while (cell := queue.take()) is not None:
            rows = _measure_cell(study.measure, settings, cell)
            queue.end(cell)
            yield cell, rows
            queue.settle(cell)
        return
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawning, _end_with_parent, (os.getpid(),)) as pool:
        try:
            yield from _measure_side_by_side(study, settings, queue, jobs, pool)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _end_with_parent(parent: int) -> None:
    """End this process when its parent has ended, which would otherwise leave it on the GPU."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _measure_side_by_side(
    study: Study, settings: Settings, queue: _Queue, jobs: int, pool: ProcessPoolExecutor
) -> Iterator[Measured]:
    """Yield cells as they become ready; processes are kept for the cells that come later.

    After a cell has failed no further cell begins. Its error is raised when the others have ended.
    """
    running: dict[Future[list[StudyRow] | Missing], Cell] = {}
    failed: Exception | None = None
    while True:
        while len(running) < jobs and (cell := queue.take()) is not None:
            running[pool.submit(_measure_cell, study.measure, settings, cell)] = cell
        if not running:
            break
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            cell = running.pop(future)
            queue.end(cell)
            try:
                rows = future.result()
            except Exception as error:
                failed = failed or error
                queue.clear()
                continue
            yield cell, rows
            if not failed:
                queue.settle(cell)
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
