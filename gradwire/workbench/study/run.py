"""From a name to rows and pictures."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from gradwire.errors import ConfigError, LabError, unknown
from gradwire.workbench.data import DataError
from gradwire.workbench.report import ReportError
from gradwire.workbench.report.chart import png, svg
from gradwire.workbench.study.folder import CHOICES, UNFINISHED, Folder
from gradwire.workbench.study.study import Cell, Page, Row, Settings, Study
from gradwire.workbench.study.unfinished import forget

Say = Callable[[str], None]
Missing = DataError | LabError
MISSING = (DataError, LabError)
"""What keeps one cell from being measured, and not the others."""
Measured = tuple[Cell, list[Row] | Missing]


def run_study(
    study: Study,
    settings: Settings,
    out: Path,
    command: str,
    say: Say,
    only: Sequence[str] = (),
    jobs: int = 1,
) -> Page:
    """Measures what is not measured yet, `jobs` cells side by side, draws, and returns the page.

    A cell whose data or lab is missing is left out; the error comes when all others are measured.
    """
    if study.files and not settings.small and not settings.data_dir:
        raise ConfigError(
            f"study {study.name} reads {', '.join(study.files)}: name their folder with "
            "--data-dir, or use --small."
        )
    given = [name for name in CHOICES if getattr(settings, name)]
    if given and not study.choosy:
        raise ConfigError(f"study {study.name} has no --{given[0]}: leave it out.")
    if jobs > 1 and study.timed:
        raise ConfigError(
            f"study {study.name} measures times, which {jobs} jobs would make longer: leave --jobs "
            "out."
        )
    cells = chosen(study, settings, only)
    folder = Folder(out, study.name)
    folder.open(settings, command)
    settings = replace(settings, unfinished=str(folder.path / UNFINISHED))
    done = folder.done()
    todo = [cell for cell in cells if cell not in done]
    missing: list[Missing] = []
    begin = time.perf_counter()
    for number, (cell, rows) in enumerate(_measured(study, settings, todo, jobs), start=1):
        words = f"{study.name}  {len(cells) - len(todo) + number}/{len(cells)}  {_words(cell)}"
        if isinstance(rows, MISSING):
            if str(rows) not in map(str, missing):  # hundreds of cells may lack the same file
                say(f"{words}  left out: {rows}")
            missing.append(rows)
            continue
        folder.add(cell, rows)
        forget(settings, cell)
        say(f"{words}  {time.perf_counter() - begin:.1f} s")
        begin = time.perf_counter()
    return _page(study, folder, missing)


def _measured(
    study: Study, settings: Settings, cells: Sequence[Cell], jobs: int
) -> Iterator[Measured]:
    """The cells with their rows, or what they lack, in the order in which they are ready."""
    if jobs == 1:
        yield from ((cell, _try(study.measure, settings, cell)) for cell in cells)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_try, study.measure, settings, cell): cell for cell in cells}
        try:
            yield from _ready(running)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _ready(running: dict[Future[list[Row] | Missing], Cell]) -> Iterator[Measured]:
    """As they come. After one has failed no more begin; those that run are waited for."""
    failed: Exception | None = None
    for ready in as_completed(running):
        try:
            yield running[ready], ready.result()
        except CancelledError:
            continue
        except Exception as error:
            failed = failed or error
            for other in running:
                other.cancel()
    if failed:
        raise failed


def _try(
    measure: Callable[[Settings, Cell], list[Row]], settings: Settings, cell: Cell
) -> list[Row] | Missing:
    try:
        return measure(settings, cell)
    except MISSING as error:
        return error


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


def _page(study: Study, folder: Folder, missing: Sequence[Missing]) -> Page:
    rows = folder.rows()
    if missing and not rows:
        raise missing[0]
    with folder.rows_of(study):
        page = study.page(rows)
        _draw(page, folder)
    if missing:
        raise type(missing[0])(
            f"study {study.name} left out {len(missing)} of its runs: {missing[0]} "
            "The same command measures them when that is mended."
        )
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
