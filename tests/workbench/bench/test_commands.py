"""`gradwire bench encode` and `bench exchange`: rows, tables, pictures, pages."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from gradwire.encode import nbytes
from gradwire.errors import ConfigError
from gradwire.exchange import EXCHANGES
from gradwire.workbench.bench import bench_exchange
from gradwire.workbench.bench.encode import ENCODINGS, parse_encoding
from gradwire.workbench.bench.exchange import correlated_gradients
from gradwire.workbench.bench.show import check_folder, check_picture
from gradwire.workbench.cli.app import app

CPU = torch.device("cpu")


def run(*words):
    result = CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.output


def test_encode_has_a_row_an_encoding():
    lines = run("encode", "--size", "20k", "--density", "0.01", "--repeat", "2", "--json")
    rows = [json.loads(line) for line in lines.splitlines()]
    assert [row["encoding"] for row in rows] == list(ENCODINGS)
    for row in rows:
        assert row["bits"] == round(
            8 * nbytes(200, parse_encoding(row["encoding"]), 20_032) / 200, 2
        )
        plain = row["encoding"] in ("fp32+int32", "bf16+int32")
        assert (row["decode_us"] == 0) == plain
        assert row["share"] == pytest.approx(
            (row["encode_us"] + row["decode_us"]) / row["select_us"], rel=1e-3, abs=1e-3
        )
    assert "int8+packed" in run("encode", "--size", "20k", "--encodings", "int8+packed")


def test_an_encoding_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"VALUES\+INDICES or"):
        parse_encoding("int8")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ranks": [2, 0]}, "ranks must be at least 1, got 0"),
        ({"values": "foo"}, "unknown value encoding 'foo'"),
        ({"options": ["row=3"]}, "none of gs-sgd has an option 'row'"),
    ],
)
def test_what_no_exchange_would_do_is_refused(given, said):
    words = {"ranks": [2], "size": 1000, "density": 0.1, "exchanges": ["gs-sgd"], "device": CPU}
    with pytest.raises(ConfigError, match=said):
        next(bench_exchange(**{**words, **given}))


def test_exchange_rows_agree_with_the_formulas():
    rows = list(bench_exchange([2, 3], 3000, 0.01, list(EXCHANGES), CPU, steps=2))
    assert [(r.ranks, r.exchange) for r in rows] == [(p, x) for p in (2, 3) for x in EXCHANGES]
    for row in rows:
        if row.bytes is None:
            assert "sketch" in row.why
            continue
        assert row.bytes == pytest.approx(row.predicted, rel=0.02)
        assert 0 < row.energy <= 1
        assert set(row.seconds) == {"accumulate", "compress", "encode", "decode"}
    by_name = {(r.exchange, r.ranks): r for r in rows}
    assert by_name["dense", 2].energy == 1
    assert by_name["dense", 2].union is None
    assert by_name["gtopk", 3].union == 1
    assert by_name["allgather", 3].rounds == 2
    assert 1 < by_name["allgather", 3].union <= 3


@pytest.mark.parametrize("back", ["int4", "two-bit"])
def test_all_entries_to_their_owners(back):
    """The same bytes at every P, but for (P - 1) / P: two bits there, and `back`."""
    fields = {"method": "dense", "values": "two-bit", "options": [f"back={back}"], "steps": 2}
    for row in bench_exchange([2, 8], 99_969, 0.01, ["owner", "allgather"], CPU, **fields):
        assert (row.k, row.encoding, row.why) == (99_969, "two-bit+common", "")
        assert row.bytes == row.predicted
        if row.exchange == "allgather":
            continue
        bits = 8 * row.bytes / row.size * row.ranks / (row.ranks - 1)
        assert 4.2 < bits - (2 if back == "int4" else 0) < 4.4


def test_workers_are_as_correlated_as_asked():
    for wanted in (0.0, 0.7, 1.0):
        pair = torch.stack(correlated_gradients("gaussian", 20_000, 2, wanted, CPU))
        assert float(torch.corrcoef(pair)[0, 1]) == pytest.approx(wanted, abs=0.03)
    with pytest.raises(ConfigError, match=r"correlation must be in \[0, 1\], got 2"):
        next(bench_exchange([2], 100, 0.1, ["dense"], CPU, correlation=2))


def test_a_table_and_a_picture(tmp_path):
    picture = tmp_path / "x.png"
    words = [
        "--ranks",
        "2,4",
        "--size",
        "2k",
        "--density",
        "0.01",
        "--exchanges",
        "allgather,union",
    ]
    table = run("exchange", *words, "--plot", str(picture))
    assert len(re.findall(r"^(allgather|union) +[24] ", table, re.MULTILINE)) == 4
    assert picture.read_bytes()[:4] == b"\x89PNG"
    refused = CliRunner().invoke(app, ["bench", "exchange", *words, "--plot", "x.jpg"])
    assert isinstance(refused.exception, ConfigError)


def test_a_number_that_is_none_is_named():
    for flag in ("ranks", "size"):
        refused = CliRunner().invoke(app, ["bench", "exchange", f"--{flag}", "a"])
        assert str(refused.exception) == f"{flag} must be a number, got 'a'"


def test_a_page_that_needs_nothing_else(tmp_path):
    words = ["--size", "20k", "--methods", "topk,randk", "--data", "gaussian,t3", "--repeat", "2"]
    output = run("compress", *words, "--out", str(tmp_path / "new"))
    page = (tmp_path / "new" / "methods.html").read_text()
    assert "methods.html" in output
    assert page.count("<svg") == 4
    assert len(re.findall("<td>topk</td>", page)) == 2
    assert not re.search(r"(src|href)=\"(?!#)", page.replace("xlink:href", "href"))
    assert "<script" not in page


def test_pictures_and_folders_that_cannot_be_are_refused_before_measuring(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made: File exists"):
        check_folder(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be made: Not a directory"):
        check_picture(tmp_path / "file" / "more" / "x.png")
    check_picture(tmp_path / "new" / "x.png")
    assert (tmp_path / "new").is_dir()
