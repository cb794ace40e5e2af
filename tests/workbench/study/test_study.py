import errno
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from gradwire.errors import ConfigError, LabError, StateError
from gradwire.workbench.data import DataError
from gradwire.workbench.report import ReportError
from gradwire.workbench.report.chart import Chart, Line, _draw, render_png, render_svg, shades
from gradwire.workbench.report.studies import write_studies
from gradwire.workbench.study import STUDIES, bounds
from gradwire.workbench.study.folder import StudyFolder, studies_in
from gradwire.workbench.study.run import run_study, select_cells
from gradwire.workbench.study.study import Page, Settings, Study, StudyTable, join_names

SMALL = Settings(small=True)


def made(measured, cells=3, name="bounds"):
    """A study that notes which cells it was asked for."""

    def measure(settings, cell):
        measured.append(cell["n"])
        return [{"n": cell["n"], "square": cell["n"] ** 2}]

    def page(rows):
        xs, ys = [r["n"] for r in rows], [r["square"] for r in rows]
        chart = Chart("squares", "Squares <1>", "n", "n^2", [Line("a & b", xs, ys)])
        return Page(
            f"{len(rows)} rows", [StudyTable("All", ["n"], [[str(x)] for x in xs])], [chart]
        )

    return Study(name, "T", "F", lambda s: [{"n": n} for n in range(cells)], measure, page)


def run(study, out, settings=SMALL):
    said = []
    page = run_study(study, settings, out, "gradwire study <x>", said.append)
    return page, said


def test_a_study_writes_rows_and_pictures(tmp_path):
    page, said = run(made([]), tmp_path)
    assert page.summary == "3 rows"
    assert len(said) == 3
    assert said[0].startswith("bounds  1/3  0  ")
    folder = tmp_path / "bounds"
    assert (folder / "squares.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "squares.svg").read_text()
    assert [r["square"] for r in StudyFolder(tmp_path, "bounds").rows()] == [0, 1, 4]


def test_what_is_measured_is_not_measured_again(tmp_path):
    measured = []
    run(made(measured, cells=2), tmp_path)
    page, _ = run(made(measured, cells=4), tmp_path)
    assert measured == [0, 1, 2, 3]
    assert page.summary == "4 rows"


def test_a_cell_that_was_cut_off_is_measured_again(tmp_path):
    measured = []
    run(made(measured), tmp_path)
    path = tmp_path / "bounds" / "rows.jsonl"
    path.write_text(path.read_text()[:-5])
    run(made(measured), tmp_path)
    assert measured == [0, 1, 2, 2]
    assert [json.loads(line)["cell"]["n"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_another_question_needs_another_folder(tmp_path):
    run(made([]), tmp_path)
    with pytest.raises(ConfigError, match=r"begun with seed = 0, now 1 is asked for: .*--out"):
        run(made([]), tmp_path, Settings(small=True, seed=1))


def test_a_folder_of_another_version_is_refused(tmp_path):
    run(made([]), tmp_path)
    head = tmp_path / "bounds" / "study.json"
    head.write_text(head.read_text().replace('"gradwire": "', '"gradwire": "9'))
    with pytest.raises(ConfigError, match=r"was made by gradwire 9.*choose another --out"):
        run(made([]), tmp_path)


def test_a_disk_that_takes_nothing_is_one_line(tmp_path):
    (tmp_path / "bounds").write_text("a file where the folder should be")
    with pytest.raises(StateError, match=r"cannot be written: .* The same command goes on"):
        run(made([]), tmp_path)


def test_a_full_disk_is_one_line_and_the_study_goes_on_from_there(tmp_path):
    measured = []
    run(made(measured, cells=1), tmp_path)
    rows = tmp_path / "bounds" / "rows.jsonl"
    kept = rows.read_bytes()
    rows.unlink()
    rows.symlink_to("/dev/full")
    with pytest.raises(StateError, match=r"rows.jsonl cannot be written: No space left on device"):
        run(made([]), tmp_path)
    rows.unlink()
    rows.write_bytes(kept)
    run(made(measured), tmp_path)
    assert measured == [0, 1, 2]


@pytest.mark.parametrize("name", ["squares.png", "report.html"])
def test_pictures_and_report_say_so_too_when_the_disk_is_full(tmp_path, monkeypatch, name):
    monkeypatch.setitem(STUDIES, "bounds", made([]))
    run(STUDIES["bounds"], tmp_path)
    write_studies(tmp_path)
    before = (tmp_path / "report.html").read_bytes()

    def full(*args, **kw):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("gradwire.workbench.report.studies.replace_file", full)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StateError, match=rf"{name} cannot be written: No space left on device"):
        write_studies(tmp_path) if name == "report.html" else run(STUDIES["bounds"], tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before


def lacking(measured, who=(1,), error=DataError):
    """A study whose data are not all there."""
    study = made(measured)

    def measure(settings, cell):
        if cell["n"] in who:
            raise error("no train.tsv in data. AN4 is the lists.")
        return study.measure(settings, cell)

    return replace(study, measure=measure)


@pytest.mark.parametrize("error", [DataError, LabError])
def test_missing_data_stop_only_the_runs_that_need_them(tmp_path, error):
    measured, said = [], []
    study = lacking(measured, error=error)
    with pytest.raises(error, match=r"left out 1 of its runs: no train.tsv in data. AN4 .* same"):
        run_study(study, SMALL, tmp_path, "", said.append)
    assert measured == [0, 2]
    assert "2/3  1  left out: no train.tsv in data" in said[1]
    assert (tmp_path / "bounds" / "squares.png").is_file()
    page, _ = run(made(measured), tmp_path)
    assert measured == [0, 2, 1]
    assert page.summary == "3 rows"


@pytest.mark.parametrize(
    ("only", "there", "words"),
    [
        ("fnn3", "train-images-idx3-ubyte", r"no train-labels-idx1-ubyte or .*four files"),
        ("resnet20", "cifar-10-batches-py/test_batch", r"no data_batch_1 in .*data_batch_1 \.\."),
        ("lstm-an4", "an4/train.tsv", r"train.tsv is empty. AN4 is the lists train.tsv and test"),
    ],
)
def test_part_of_a_data_set_is_named_with_its_layout(tmp_path, only, there, words):
    """The files that are there are of no use either, so that nothing is trained here."""
    file = tmp_path / "data" / there
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    settings = Settings(data_dir=str(tmp_path / "data"))
    with pytest.raises(DataError, match=words) as caught:
        run_study(STUDIES["distributions"], settings, tmp_path, "", print, [only, "topk"])
    assert "\n" not in str(caught.value)


def test_without_any_data_there_is_nothing_but_the_reason(tmp_path):
    said = []
    with pytest.raises(DataError, match=r"^no train.tsv in data. AN4 is the lists.$"):
        run_study(lacking([], (0, 1, 2)), SMALL, tmp_path, "", said.append)
    assert len(said) == 1


def test_only_some_of_a_study(tmp_path):
    measured = []
    run_study(made(measured, cells=5), SMALL, tmp_path, "", print, only=["1, 2,4", "2,4"])
    assert measured == [2, 4]
    with pytest.raises(ConfigError, match=r"unknown part of study bounds '7'.*Known: 0, 1, 2$"):
        run_study(made([]), SMALL, tmp_path, "", print, only=["0,7"])
    with pytest.raises(ConfigError, match=r"unknown part of study distributions 'resnet50'"):
        select_cells(STUDIES["distributions"], SMALL, ["resnet50"])


def test_rows_that_a_page_cannot_read_name_the_version_that_made_them(tmp_path, monkeypatch):
    monkeypatch.setitem(STUDIES, "bounds", made([]))
    run(STUDIES["bounds"], tmp_path)
    path = tmp_path / "bounds" / "rows.jsonl"
    path.write_text(path.read_text().replace("square", "cube"))
    words = r"rows that are not those of study bounds: KeyError: 'square'\.{} Measure again"
    with pytest.raises(StateError, match=words.format("")):
        write_studies(tmp_path)
    with pytest.raises(StateError, match=words.format("")):
        run(STUDIES["bounds"], tmp_path)
    head = tmp_path / "bounds" / "study.json"
    head.write_text(head.read_text().replace('"gradwire": "', '"gradwire": "9'))
    with pytest.raises(StateError, match=words.format(r" They are of gradwire 9.*, this is .*")):
        write_studies(tmp_path)


def test_a_full_study_says_which_files_it_reads(tmp_path):
    files = "mnist, cifar10, ptb, an4"
    with pytest.raises(ConfigError, match=rf"study bounds reads {files}: .*--small"):
        run(bounds.STUDY, tmp_path, Settings())


def test_without_matplotlib_the_rows_are_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ReportError, match="the rows are measured; pictures need matplotlib"):
        run(made([]), tmp_path)
    assert len(StudyFolder(tmp_path, "bounds").rows()) == 3


def test_the_report_has_every_study_and_needs_nothing_from_outside(tmp_path, monkeypatch):
    for name in ("bounds", "distributions"):
        monkeypatch.setitem(STUDIES, name, made([], name=name))
        run(STUDIES[name], tmp_path)
    assert [folder.name for folder in studies_in(tmp_path)] == ["bounds", "distributions"]
    text = write_studies(tmp_path).read_text()
    assert text.count("<section") == text.count("<svg") == 2
    assert text.index('id="distributions"') < text.index('id="bounds"')
    assert "a &amp; b" in text
    assert "Squares &lt;1&gt;" in text
    assert "gradwire study &lt;x&gt;" in text
    assert "<script" not in text
    assert not re.search(r'(src|href)="(?!#)', text)


def test_a_report_of_an_unknown_study_names_it(tmp_path):
    run(made([], name="bonds"), tmp_path)
    with pytest.raises(ConfigError, match=r"unknown study in .* 'bonds'. Did you mean 'bounds'"):
        write_studies(tmp_path)


def test_a_report_of_nothing_says_how_to_begin(tmp_path):
    with pytest.raises(ConfigError, match="no study with rows yet"):
        write_studies(tmp_path)


def test_the_same_rows_give_the_same_pictures():
    chart = Chart("a", "b", "x", "y", [Line("l", [1, 2], [3, 4], "dashes")], log_x=True, log_y=True)
    assert render_png(chart) == render_png(chart)
    assert render_svg(chart) == render_svg(chart)
    assert "currentColor" in render_svg(chart)


def test_the_legend_of_many_lines_stands_beside_them():
    def width(count):
        lines = [Line(f"line {i}", [1, 2], [i, i]) for i in range(count)]
        figure = _draw(Chart("a", "b", "x", "y", lines), "black", "grey")
        figure.draw_without_rendering()
        return figure.axes[0].get_position().width

    assert width(7) < 0.9 * width(6)


def test_many_lines_look_different():
    lines = [Line(f"line {i}", [1, 2], [i, i]) for i in range(14)]
    figure = _draw(Chart("a", "b", "x", "y", lines), "black", "grey")
    looks = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
    assert len(looks) == 14


def test_shades_go_from_light_to_dark():
    colours = [int(c[1:3], 16) for c in shades(5)]
    assert colours == sorted(colours, reverse=True)
    assert len(set(colours)) == 5


def test_names_in_a_row():
    assert [join_names(x) for x in ([], ["a"], ["a", "b"], "abc")] == [
        "none",
        "a",
        "a and b",
        "a, b and c",
    ]


@pytest.mark.parametrize("name", ["operators", "scaling"])
def test_times_are_not_measured_side_by_side(tmp_path, name):
    with pytest.raises(ConfigError, match=rf"study {name} measures times, which 2 jobs .*--jobs"):
        run_study(STUDIES[name], SMALL, tmp_path, "a command", print, jobs=2)
    assert not list(tmp_path.iterdir())


def test_only_a_study_that_takes_seeds_can_be_asked_for_them(tmp_path):
    with pytest.raises(ConfigError, match=r"study bounds has no --seeds: leave it out"):
        run(made([]), tmp_path, Settings(small=True, seeds=3))


def test_more_seeds_go_on_in_the_same_folder(tmp_path):
    study = replace(made([]), choices=("seeds", "epochs"))
    run(study, tmp_path, Settings(small=True, seeds=1))
    run(study, tmp_path, Settings(small=True, seeds=2, epochs=3))
    assert len(StudyFolder(tmp_path, "bounds").rows()) == 3


def halves(settings, cell):
    """Measured in another process, so it has to be found by name."""
    if "after" in cell:
        while not Path(cell["after"]).is_file():
            time.sleep(0.05)
        raise ConfigError("nine is too many")
    return [{"n": cell["n"], "square": cell["n"] / 2}]


def test_jobs_measure_side_by_side_and_only_the_parent_writes(tmp_path):
    study = replace(made([]), measure=halves)
    said = []
    page = run_study(study, SMALL, tmp_path, "x", said.append, jobs=2)
    assert page.summary == "3 rows"
    assert sorted(row["square"] for row in StudyFolder(tmp_path, "bounds").rows()) == [0, 0.5, 1]
    assert [line.split()[1] for line in said] == ["1/3", "2/3", "3/3"]


def test_a_job_that_fails_keeps_what_others_measured(tmp_path):
    cells = [{"n": 1}, {"n": 9, "after": str(tmp_path / "bounds" / "rows.jsonl")}]
    study = replace(made([]), measure=halves, cells=lambda s: cells)
    with pytest.raises(ConfigError, match="nine is too many"):
        run_study(study, SMALL, tmp_path, "x", lambda words: None, jobs=2)
    assert StudyFolder(tmp_path, "bounds").done() == [{"n": 1}]


def endless(settings, cell):
    """Tells its process and goes on for a minute."""
    (Path(cell["out"]) / f"{os.getpid()}.pid").touch()
    time.sleep(60)
    return [{"n": 1, "square": 1}]


KILLED = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.workbench.study.test_study import SMALL, endless, made, run_study
if __name__ == "__main__":
    out = sys.argv[1]
    cells = [{"n": n, "out": out} for n in (1, 2)]
    study = replace(made([]), measure=endless, cells=lambda s: cells)
    run_study(study, SMALL, Path(out), "x", print, jobs=2)
"""


def test_jobs_end_with_a_study_that_is_killed(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(KILLED)
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen([sys.executable, program, tmp_path], env=environment) as process:
        wait_for(lambda: len([*tmp_path.glob("*.pid")]) == 2, seconds=100)
        process.kill()
    jobs = [int(path.stem) for path in tmp_path.glob("*.pid")]
    wait_for(lambda: not any(map(runs, jobs)), seconds=30)


def runs(pid):
    """Whether a process is alive and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(ready, seconds):
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.1)


def doubling(settings, rows, pending):
    """Asks for twice the largest n so far, up to 8, when nothing is on its way."""
    largest = max((row["n"] for row in rows), default=1)
    return [] if pending else [{"n": 2 * largest}] * (largest < 8)


@pytest.mark.parametrize("jobs", [1, 2])
def test_rows_ask_for_more_cells(tmp_path, jobs):
    study = replace(made([], cells=2), measure=halves, more=doubling)
    said = []
    run_study(study, SMALL, tmp_path, "x", said.append, jobs=jobs)
    assert sorted(cell["n"] for cell in StudyFolder(tmp_path, "bounds").done()) == [0, 1, 2, 4, 8]
    assert said[-1].startswith("bounds  5/5  8")
    # A study that was stopped asks again.
    run_study(replace(study, cells=lambda s: []), SMALL, tmp_path, "x", said.append, jobs=jobs)
    assert len(said) == 5


def test_a_cell_that_is_left_out_is_not_asked_for_again(tmp_path):
    measured = []

    def measure(settings, cell):
        measured.append(cell["n"])
        if cell["n"] == 2:
            raise DataError("two is missing")
        return [{"n": cell["n"], "square": 1}]

    study = replace(made([], cells=2), measure=measure, more=doubling)
    with pytest.raises(DataError, match="two is missing"):
        run(study, tmp_path)
    assert measured == [0, 1, 2]


def test_settings_that_cells_hold_may_differ_in_one_folder(tmp_path):
    run(made([]), tmp_path, replace(SMALL, seed=1))
    with pytest.raises(ConfigError, match="was begun with seed = 1, now 2"):
        run(made([]), tmp_path, replace(SMALL, seed=2))
    run(replace(made([]), in_cells=("seed", "data_dir")), tmp_path / "free", replace(SMALL, seed=1))
    free = replace(made([], cells=4), in_cells=("seed", "data_dir"))
    page, _ = run(free, tmp_path / "free", replace(SMALL, seed=2, data_dir="other"))
    assert page.summary == "4 rows"


def test_names_of_points_stand_beside_them_and_apart():
    lines = [Line("one", [1.0], [2.0], "points"), Line("two", [1.0], [2.0], "points")]
    lines += [Line("far", [100.0], [1.0], "points")]
    chart = Chart("c", "C", "x", "y", lines, log_x=True, named_points=True)
    (axes,) = _draw(chart, "#000000", "#cccccc").axes
    places = {text.get_text(): text for text in axes.texts}
    assert set(places) == {"one", "two", "far"}
    assert axes.get_legend() is None
    # Points at one place have labels above each other; on the right they stand to the left.
    assert abs(places["one"].xyann[1] - places["two"].xyann[1]) > 8
    assert (places["one"].get_ha(), places["far"].get_ha()) == ("left", "right")
    assert "<svg" in render_svg(chart)
