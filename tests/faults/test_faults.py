"""A few of the faults of `make faults`, and that the harness itself can tell."""

import json
import re

import pytest

from faults import crew, disk, kills, page, soak
from faults.__main__ import FAULTS
from faults.inject import MOMENTS, Strike
from faults.row import Row


@pytest.fixture(scope="module")
def whole():
    return kills.unbroken({})


@pytest.mark.parametrize("strike", [Strike(2, "exchange", 40), Strike(0, "write", 3)])
def test_a_rank_is_killed_the_others_name_it_and_the_run_goes_on(whole, strike):
    loss, seconds = kills.kill({}, strike, whole)
    assert loss == ""
    assert seconds < 20


def test_the_disk_of_one_rank_is_full(whole):
    assert disk.full_on_one(1, whole.digest) == ""


NAMED = "rank {} of 3: all-gather of 8 bytes failed in stage exchange. No word from rank 1 for 2 s"


def endings(**third):
    last = {"error": NAMED.format(2)} | third
    return [
        crew.Ending(0, 11.0, error=NAMED.format(0)),
        crew.Ending(1, 10.0, killed=True),
        crew.Ending(2, 12.5, **last),
    ]


@pytest.mark.parametrize(
    "third",
    [
        {"error": "", "hangs": True},
        {"error": NAMED.format(2).replace("rank 1 ", "ranks 0, 1 ")},
        {"error": "AssertionError: no words"},
        {"error": "", "result": (0, "other", {})},
    ],
)
def test_a_survivor_that_hangs_or_is_unclear_counts_as_lost(third):
    assert kills.verdict(endings(), 1, "digest") == ("", 2.5)
    assert kills.verdict(endings(error="", result=(0, "digest", {})), 1, "digest")[0] == ""
    assert "rank 2, after rank 1 was killed" in kills.verdict(endings(**third), 1, "digest")[0]
    assert "was not killed" in kills.verdict(endings(), 2, "digest")[0]


@pytest.mark.parametrize("what", ["bytes", "handles", "threads", "cpu"])
def test_growth_is_seen(what):
    first = {"bytes": 1e8, "handles": 20, "threads": 9, "cpu": 1.0}
    assert soak.growth([first, first | {"cpu": 1.4}]) == ""
    grown = first | {what: first[what] * 1.6}
    assert soak.growth([first, grown])


def test_a_row_counts():
    row = Row("a fault")
    row.count("", 1.26)
    row.count("gone", 0.5)
    assert (row.times, row.survived, row.lost, row.slowest) == (2, 1, 1, 1.3)
    assert row.losses == ["gone"]


def test_the_page_says_what_was_measured():
    figures = json.loads(page.FIGURES.read_text())
    assert page.markdown(figures) in page.PAGE.read_text(), "make faults, with --keep"
    rows = page.rows_of(figures)
    killed = [row for row in rows if row["fault"].startswith("rank killed: ")]
    assert [row["fault"].removeprefix("rank killed: ") for row in killed] == list(MOMENTS)
    assert set(figures["parts"]) == set(FAULTS)
    assert sum(row["times"] for row in killed) >= 100
    assert not any(row["lost"] or row["skipped"] for row in rows)


def test_a_part_that_is_measured_anew_leaves_the_others(tmp_path, monkeypatch):
    for name in ("PAGE", "FIGURES"):
        copy = tmp_path / getattr(page, name).name
        copy.write_bytes(getattr(page, name).read_bytes())
        monkeypatch.setattr(page, name, copy)
    before = json.loads(page.FIGURES.read_text())["parts"]
    page.write(tmp_path / "new.json", "soak", [Row("soak of 7 steps", 1, 1)], 3.0)
    page.keep(tmp_path / "new.json")
    after = json.loads(page.FIGURES.read_text())["parts"]
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] != before[name]] == ["soak"]
    text = page.PAGE.read_text()
    assert "| soak of 7 steps | 1 | 1 | 0 |" in text
    assert "| rank killed: encode |" in text
    # Each day and machine has its own line.
    assert re.search(rf"`soak`.*: {after['soak']['date']}, {after['soak']['machine']}", text)
    assert re.search(rf"- `kills`, .*: {before['kills']['date']}, ", text)
