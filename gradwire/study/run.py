"""From a name to rows and pictures."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from gradwire.errors import ConfigError
from gradwire.report import ReportError
from gradwire.report.chart import png, svg
from gradwire.study.folder import CHOICES, Folder
from gradwire.study.study import Cell, Page, Row, Settings, Study

Say = Callable[[str], None]


def run_study(
    study: Study, settings: Settings, out: Path, command: str, say: Say, jobs: int = 1
) -> Page:
    """Measures what is not measured yet, `jobs` cells side by side, draws, and returns the page."""
    if study.files and not settings.small and not settings.data_dir:
        raise ConfigError(
            f"study {study.name} reads {', '.join(study.files)}: name their folder with "
            "--data-dir, or use --small."
        )
    chosen = [name for name in CHOICES if getattr(settings, name)]
    if chosen and not study.choosy:
        raise ConfigError(f"study {study.name} has no --{chosen[0]}: leave it out.")
    folder = Folder(out, study.name)
    folder.open(settings, command)
    done, cells = folder.done(), study.cells(settings)
    todo = [cell for cell in cells if cell not in done]
    begin = time.perf_counter()
    for number, (cell, rows) in enumerate(_measured(study, settings, todo, jobs), start=1):
        folder.add(cell, rows)
        words = ", ".join(f"{v:,}" if isinstance(v, int) else str(v) for v in cell.values())
        place = f"{len(cells) - len(todo) + number}/{len(cells)}"
        say(f"{study.name}  {place}  {words}  {time.perf_counter() - begin:.1f} s")
        begin = time.perf_counter()
    page = study.page(folder.rows())
    _draw(page, folder)
    return page


def _measured(
    study: Study, settings: Settings, cells: Sequence[Cell], jobs: int
) -> Iterator[tuple[Cell, list[Row]]]:
    """The cells with their rows, in the order in which they are ready."""
    if jobs == 1:
        yield from ((cell, study.measure(settings, cell)) for cell in cells)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(study.measure, settings, cell): cell for cell in cells}
        try:
            for ready in as_completed(running):
                yield running[ready], ready.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _draw(page: Page, folder: Folder) -> None:
    try:
        for chart in page.charts:
            folder.write(f"{chart.name}.png", png(chart))
            folder.write(f"{chart.name}.svg", svg(chart).encode())
    except ModuleNotFoundError as error:
        raise ReportError(
            f"the rows are measured; pictures need {error.name}: pip install {error.name}"
        ) from error
