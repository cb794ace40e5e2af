import json
import re
import sys
from html.parser import HTMLParser

import pytest

from gradwire.errors import ConfigError
from gradwire.workbench.report import ReportError, headline, read_runs, write_report
from gradwire.workbench.report.curves import DENSE, run_colours
from gradwire.workbench.report.outcome import compare_bytes, format_bytes
from gradwire.workbench.train.folder import METRICS, RESULT, compare_folder
from tests.workbench.report.runs import write_run

pytest.importorskip("matplotlib")


@pytest.fixture
def compared(tmp_path):
    return write_run(tmp_path / "a <i> & b", compare=("dense",))


def test_the_headline_sets_the_run_against_dense(compared):
    expected = "topk/allgather at 1 % reached 95.3 % test accuracy against 95.6 % dense, "
    assert headline(read_runs(compared)) == expected + "with 25x fewer bytes."


def test_the_headline_of_a_run_alone(tmp_path):
    said = headline(read_runs(write_run(tmp_path)))
    assert said.endswith("with 25x fewer bytes than a ring all-reduce would have sent.")


def test_the_headline_of_a_run_that_goes_on(tmp_path):
    folder = write_run(tmp_path, done=1, compare=("dense",))
    said = headline(read_runs(folder))
    assert "so far: topk/allgather at 1 % has done 1 of 3 epochs" in said
    assert "ring all-reduce" in said


def test_the_headline_before_the_first_evaluation(tmp_path):
    folder = write_run(tmp_path, done=0)
    assert "has trained for 5 steps; no epoch has ended" in headline(read_runs(folder))
    assert write_report(folder).is_file()
    # Metrics have a line every few steps only.
    for steps, shown in ((9, 9), (3, 5), ("9", 5)):
        (folder / RESULT).write_text(json.dumps({"steps": steps}))
        assert f"has trained for {shown} steps;" in headline(read_runs(folder))


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links, self.ids = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        self.links += [values[k] for k in ("src", "href", "xlink:href") if values.get(k)]
        self.ids += [values["id"]] if "id" in values else []


def read(path):
    page, text = Page(), path.read_text(encoding="utf-8")
    page.feed(text)
    return page, text


def test_the_page_needs_nothing_from_outside(compared):
    page, text = read(write_report(compared))
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"@import|url\((?!#)", text)


def test_the_page_has_four_charts_with_a_line_a_run(compared):
    page, text = read(write_report(compared))
    assert page.tags.count("svg") == 4
    for colour in run_colours(read_runs(compared)):
        assert text.count(f"stroke: {colour}") == 4
    assert "currentColor" in text


def test_a_worker_alone_sends_nothing_and_has_no_charts_of_it(tmp_path, recwarn):
    folder = write_run(tmp_path, workers=1)
    lines = (folder / METRICS).read_text()
    (folder / METRICS).write_text(re.sub(r'"bytes_(sent|dense)": \d+', r'"bytes_\1": 0', lines))
    page, _ = read(write_report(folder))
    assert page.tags.count("svg") == 2
    assert headline(read_runs(folder)).endswith("% test accuracy.")
    assert not recwarn


def test_ids_of_the_drawings_do_not_collide(compared):
    page, _ = read(write_report(compared))
    clips = [i for i in page.ids if re.fullmatch(r"p[0-9a-f]+", i)]
    assert len(clips) >= 4
    assert len(set(clips)) == len(clips)


def test_the_page_shows_numbers_settings_machine_and_command(compared):
    _, text = read(write_report(compared))
    for words in ("95.3 %", "1.2 MB", "30 MB", "identical", "weight decay", "hardware", "--note"):
        assert words in text


def test_everything_printed_is_escaped(compared):
    _, text = read(write_report(compared))
    assert "&lt;b&gt;&amp;" in text
    assert "<b>" not in text


def test_replicas_that_differ_stand_out(tmp_path):
    write_run(tmp_path)
    (tmp_path / RESULT).write_text('{"replicas_identical": false}')
    _, text = read(write_report(tmp_path))
    assert '<td class="bad">DIFFERENT</td>' in text


def test_the_same_run_gives_the_same_page(compared):
    first = write_report(compared).read_bytes()
    assert write_report(compared).read_bytes() == first


def test_a_comparison_that_has_not_begun_is_left_out(compared):
    dense = compare_folder(compared, "dense")
    for path in dense.iterdir():
        path.unlink()
    assert [run.title for run in read_runs(compared)] == ["topk/allgather at 1 %"]


def test_no_metrics_is_an_error_with_a_way_out(tmp_path):
    write_run(tmp_path)
    (tmp_path / METRICS).unlink()
    with pytest.raises(ConfigError, match="no metrics yet"):
        write_report(tmp_path)


def test_without_matplotlib_the_error_says_what_to_install(compared, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ReportError, match=r"needs matplotlib.*pip install matplotlib"):
        write_report(compared)


def test_dense_is_grey_and_the_others_differ(tmp_path):
    runs = read_runs(write_run(tmp_path, compare=("dense", "randk")))
    first, grey, third = run_colours(runs)
    assert grey == DENSE
    assert len({first, grey, third}) == 3


@pytest.mark.parametrize(
    ("ratio", "words"), [(25.04, "25x fewer"), (1.0, "as many"), (0.5, "2x more")]
)
def test_ratios_in_words(ratio, words):
    assert compare_bytes(ratio) == words


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2e12, "2 TB")]
)
def test_sizes_in_words(count, words):
    assert format_bytes(count) == words
