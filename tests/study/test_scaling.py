import pytest

from gradwire.study import scaling
from gradwire.study.study import Settings


def test_the_page_has_the_papers_table_and_a_chart_a_network(monkeypatch):
    monkeypatch.setattr(scaling, "WORKERS", (16, 64))
    settings = Settings(small=True)
    cells = scaling.cells(settings)
    assert cells[0] == {"what": "table"}
    wanted = [cell for cell in cells if cell["what"] in ("table", "alexnet", "70B")]
    rows = [row for cell in wanted for row in scaling.measure(settings, cell)]
    page = scaling.page(rows)
    assert "within 9 %" in page.says
    assert "not measured" in page.says
    (table,) = page.tables
    assert len(table.rows) == 4
    assert "2.068 / 2.115 (+2.3%)" in table.rows[1]
    assert [chart.name for chart in page.charts] == ["scaling-alexnet", "scaling-70B"]
    large = {line.label: line.ys for line in page.charts[1].lines}
    assert large["dense"][0] > 50 * large["topk/gtopk"][0]
    # Twice the bytes for four times the workers would be a ring; all-gather sends four times.
    assert large["topk/allgather"][1] == pytest.approx(4.2 * large["topk/allgather"][0], rel=0.2)
