"""What a run, a study or a benchmark is called can be hostile; a page shows it and runs nothing."""

import dataclasses
import json
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")

from gradwire.errors import StateError
from gradwire.workbench.bench.page import _render_page as bench_page
from gradwire.workbench.bench.row import Row
from gradwire.workbench.report import write_report
from gradwire.workbench.report.chart import Chart, Line, render_png, render_svg
from gradwire.workbench.report.page import render_run
from gradwire.workbench.report.read import Run, read_runs
from gradwire.workbench.report.studies import write_studies
from gradwire.workbench.study import STUDIES, Settings
from gradwire.workbench.study.folder import HEAD, ROWS, StudyFolder
from gradwire.workbench.study.study import Page, Study, StudyTable
from gradwire.workbench.train.folder import CONFIG
from tests.workbench.report.runs import write_run

BAD = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>&lt; $\\frac$ ]]>"


class Seen(HTMLParser):
    """The tags of a page, its attributes that could run something, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.risky, self.words = set(), [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.risky += [
            (name, value)
            for name, value in attrs
            if name.startswith("on") or "javascript:" in (value or "").lower()
        ]

    def handle_data(self, data):
        self.words.append(data)


def safe(text, times):
    """Nothing foreign is in the page, and the hostile words are shown `times` as they are."""
    seen = Seen(text)
    assert not seen.tags & {"script", "img", "iframe", "object"}
    assert seen.risky == []
    assert "".join(seen.words).count(BAD) == times


def test_a_run(tmp_path):
    folder = write_run(tmp_path / "run", dense=[BAD], data_dir=BAD, data="digits")
    content = json.loads((folder / CONFIG).read_text())
    content |= {"command": BAD, "machine": {BAD: BAD, "cores": 2, "odd": "\ud800"}}
    (folder / CONFIG).write_text(json.dumps(content))
    text = write_report(folder).read_text()
    # data_dir, dense, the command, the machine's key and value
    safe(text, 5)


def test_a_run_whose_every_word_is_hostile(tmp_path, monkeypatch):
    """Names of models and methods come from our own lists; if they did not, it would not matter."""
    runs = read_runs(write_run(tmp_path / "run", compare=("dense",)))
    monkeypatch.setattr(Run, "title", BAD)
    options = [dataclasses.replace(run.options) for run in runs]
    for each in options:
        for name in ("model", "data"):
            object.__setattr__(each, name, BAD)
    monkeypatch.setattr(type(options[0]), "task", runs[0].task)
    hostile = [dataclasses.replace(r, options=o) for r, o in zip(runs, options, strict=True)]
    # title of the page (model, data), the line above it (the same), the headline (2), legend (2),
    # numbers (2), settings (model, data)
    safe(render_run(hostile), 4 + 2 + 2 + 2 + 2)


def chart():
    lines = [Line(BAD, [1, 2], [3, 4]), Line("$x$", [1, 2], [1, 2])]
    return Chart("name", BAD, BAD, BAD, lines)


def test_a_chart_draws_hostile_labels_as_text():
    drawn = render_svg(chart())
    safe(drawn, 3)  # a label and both axes; the caption is the page's
    assert "$x$" in drawn
    assert render_png(chart()).startswith(b"\x89PNG")


def test_a_study(tmp_path, monkeypatch):
    table = StudyTable(BAD, [BAD], [[BAD]], BAD)
    study = Study(
        "bounds", BAD, BAD, lambda s: [], lambda s, c: [], lambda r: Page(BAD, [table], [chart()])
    )
    monkeypatch.setitem(STUDIES, "bounds", study)
    folder = StudyFolder(tmp_path, "bounds")
    folder.open(Settings(small=True), BAD)
    head = json.loads((folder.path / HEAD).read_text())
    (folder.path / HEAD).write_text(json.dumps(head | {"machine": {BAD: BAD}}))
    folder.add({"n": 1}, [{"n": 1}])
    # link, figures, title, says, caption, the chart's three, table 4, machine 2, command
    safe(write_studies(tmp_path).read_text(), 4 + 1 + 3 + 4 + 2 + 1)


def test_rows_of_another_study_are_one_line(tmp_path):
    folder = StudyFolder(tmp_path, "bounds")
    folder.open(Settings(small=True), "")
    folder.add({"n": 1}, [{"n": 1}])
    with pytest.raises(StateError, match=rf"{ROWS} has rows that are not those of study bounds: "):
        write_studies(tmp_path)


def test_a_benchmark():
    row = Row(
        BAD, 100, 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.01, BAD, BAD, BAD, 0.5, None, timed=1
    )
    # device and versions above, the legend, the table's method and data, and three charts of four
    safe(bench_page([row]), 2 + 1 + 2 + 3)
