"""The table of torch releases says what was seen, and of the releases that gradwire claims."""

import re
from pathlib import Path

import pytest

from compat import environment, page, results
from gradwire.torch_internals import KNOWN_TORCH, tested_range

ROWS = page.read_rows()


def test_the_page_is_made_of_the_rows():
    assert page.render_table(ROWS) in page.PAGE.read_text()


def test_the_oldest_and_the_newest_are_the_range_that_is_claimed():
    releases = [page.version_numbers(page.release(row))[:2] for row in ROWS]
    assert (releases[0], releases[-1]) == KNOWN_TORCH
    assert releases == sorted(set(releases))
    assert f"torch {tested_range()}." in page.PAGE.read_text()


@pytest.mark.parametrize("row", ROWS, ids=page.release)
def test_every_column_was_run_and_nothing_failed(row):
    assert row["failures"] == []
    assert list(row["counts"]) == list(results.COLUMNS)
    for column, count in row["counts"].items():
        assert count["failed"] == 0
        assert sum(count.values()) > 0, column


def test_every_module_of_the_tests_has_a_column():
    root = environment.ROOT
    modules = [path for name in results.TESTS for path in (root / name).rglob("test_*.py")]
    columns = {
        results.column_of(path.relative_to(root).with_suffix("").as_posix().replace("/", "."))
        for path in modules
    }
    assert columns == set(results.COLUMNS) == set(page._ORDER)


REPORT = """<testsuites><testsuite>
<testcase classname="tests.integrate.ddp.test_ddp" name="test_a"/>
<testcase classname="tests.integrate.ddp.test_ddp" name="test_b"><failure/></testcase>
<testcase classname="" name="tests.integrate.fsdp.test_micro"><error/></testcase>
<testcase classname="tests.integrate.fsdp.test_nccl" name="test_c"><skipped/></testcase>
</testsuite></testsuites>"""


def test_a_report_becomes_a_row(tmp_path, monkeypatch):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    versions = {"torch": "2.99.0", "python": "3.11.7", "ray": "2.60.0"}
    row = results.row_of(report, versions)
    assert row.counts["DDP"] == {"passed": 1, "failed": 1, "skipped": 0}
    assert row.failures[0] == "tests.integrate.ddp.test_ddp::test_b"
    assert len(row.failures) == 2
    monkeypatch.setattr(page, "ROWS", tmp_path / "rows.json")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    page.PAGE.write_text(f"before {page.BEGIN} {page.END} after")
    for version in ("2.99.0", "2.100.1", "2.99.0"):
        versions["torch"] = version
        page.keep_row(results.row_of(report, dict(versions)))
    text = page.PAGE.read_text()
    assert text.startswith("before ")
    assert text.endswith(" after")
    lines = [line for line in text.splitlines() if line.startswith("| 2.")]
    assert [re.match(r"\| (\S+) \|", line)[1] for line in lines] == ["2.99.0", "2.100.1"]
    assert all("| 1 passed, **1 failed** |" in line for line in lines)
    assert all(line.count(f"| {page.UNSEEN} |") > 1 for line in lines)


def test_the_pins_of_one_torch_do_not_apply_to_the_others():
    names = [re.split(r"[\[=]", line)[0] for line in environment.trainers()]
    assert names == ["lightning", "accelerate", "transformers", "ray"]
    assert all(re.search(r"==\d", line) for line in environment.trainers())


def test_an_environment_that_is_ready_is_not_built_again(tmp_path):
    (tmp_path / ".ready").touch()
    assert environment.build(tmp_path, "2.99.0") == Path(tmp_path) / "bin" / "python"
