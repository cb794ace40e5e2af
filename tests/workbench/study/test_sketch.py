import pytest
import torch

from gradwire.exchange import EXCHANGES
from gradwire.workbench.study import sketch, sketch_page
from gradwire.workbench.study.sketch import affordable_density, mean_u, measure_recall, sketch_bytes
from gradwire.workbench.study.study import Settings

SMALL = Settings(small=True)


def draw(power):
    """The higher the power, the heavier the tails."""
    noise = torch.randn(20_001, generator=torch.Generator().manual_seed(1))
    return noise * noise.abs() ** (power - 1)


def test_a_table_as_large_as_u_finds_heavy_tails_and_small_ones_do_not():
    found = {ratio: measure_recall(draw(3), 20, ratio)["recall"] for ratio in (1, 20, 200)}
    assert found[1][1:] == [1, 1]
    assert found[1][0] > found[20][0] > found[200][0]
    for shares in found.values():
        assert shares == sorted(shares), "more candidates find more"
    assert measure_recall(draw(1), 20, 20)["recall"][1] < 0.5 * found[20][1], (
        "of normal entries, fewer"
    )


def test_energy_is_that_of_the_best_k_of_the_candidates():
    u = torch.zeros(1000)
    u[[3, 500, 900]] = torch.tensor([3.0, -2.0, 1.0])
    assert measure_recall(u, 2, 2.0)["energy"] == pytest.approx([1, 1, 1])
    assert measure_recall(u, 2, 1000.0)["energy"][0] < 1, "one cell a row tells nobody from nobody"


@pytest.mark.parametrize("workers", [8, 16])
def test_gtopk_gets_the_bytes_of_the_sketch_and_no_more(workers):
    size = 61_706
    budget = sketch_bytes(size, workers, 40.0)
    k = round(affordable_density(size, workers, budget) * size)
    cost = EXCHANGES["gtopk"].bytes
    sizes = [cost(workers, 61_760, n, sketch.Encoding()) for n in (k, k + 4)]
    assert sizes[0] <= budget < sizes[1]
    assert affordable_density(size, workers, 2 * budget) > 1.9 * k / size


def test_u_is_the_mean_over_the_workers_at_the_last_step(monkeypatch):
    watched = []

    class Simulation:
        from_options = classmethod(lambda cls, options: cls())

        def step(self, watch):
            watched.append(watch)

        def u(self, worker):
            return torch.tensor([10.0 * worker, 1.0])

    monkeypatch.setattr(sketch, "Simulation", Simulation)
    cell = {"what": "u", "model": "lenet5", "recipe": "dense", "workers": 4, "steps": 3}
    assert mean_u(SMALL, cell).tolist() == [15, 1]
    assert watched == [(), (), (0, 1, 2, 3)]


def test_a_cell_of_each_kind(monkeypatch):
    monkeypatch.setattr(sketch, "SMALL_RUN", sketch.SMALL_RUN | {"epochs": 2, "batch": 256})
    monkeypatch.setattr(sketch, "RATIOS", (20, 10))
    kinds = {}
    for cell in sketch.cells(SMALL):
        kinds.setdefault((cell["what"], cell.get("recipe", "")), cell)
    u = sketch.measure(SMALL, kinds["u", "dense"] | {"steps": 2, "workers": 1})
    assert [row["ratio"] for row in u] == [20, 10]
    assert 0 <= u[0]["recall"][1] <= u[1]["recall"][1] <= 1
    two = {"workers": 2}
    names = ("topk/gs-sgd", "topk/gtopk")
    runs = {name: sketch.measure(SMALL, kinds["train", name] | two) for name in names}
    a, b = (run[-1]["bytes"] for run in runs.values())
    assert 0.98 < b / a <= 1, "equal bytes"
    assert runs["topk/gtopk"][0]["density"] > 5 * runs["topk/gs-sgd"][0]["density"]
    assert [row["epoch"] for row in runs["topk/gs-sgd"]] == [1, 2]
    times = sketch.measure(SMALL, {"what": "time", "size": 20_000, "workers": 4})
    assert [row["exchange"] for row in times] == ["sketched", "gs-sgd", "gtopk"]
    assert [row["rounds"] for row in times] == [12, 8, 2]
    assert all(row["local"] > 0 and not row["why"] for row in times)
    assert times[2]["bytes"] == pytest.approx(times[1]["bytes"], rel=0.02)
    page = sketch.STUDY.page([*u, *runs["topk/gs-sgd"], *runs["topk/gtopk"], *times])
    assert len(page.tables) == 3
    assert [c.name for c in page.charts] == ["sketch-lenet5", "sketch-bytes"]
    found = {line.label: line for line in page.charts[0].lines}
    assert found["dense, recall"].xs == [10, 20]
    assert found["dense, recall"].ys == [u[1]["recall"][1], u[0]["recall"][1]]
    assert found["dense, energy"].ys == [u[1]["energy"][1], u[0]["energy"][1]]


def row(exchange, local, rounds, sent, why=""):
    common = {"what": "time", "size": 1000, "workers": 4, "ratio": 40.0, "density": 0.001}
    own = {"exchange": exchange, "local": local, "rounds": rounds, "bytes": sent, "why": why}
    return common | own


def test_times_are_compared_with_gs_sgd_and_with_the_paper():
    # 1 Gbit/s is 119.5 MB/s of payload: 1195 bytes take 10 us; a round takes 50.
    rows = [row("gs-sgd", 1e-4, 8, 11950), row("gtopk", 3e-4, 2, 11950)]
    assert sketch_page.step_seconds(rows[0], "1gbit") == pytest.approx(600e-6)
    page = sketch.STUDY.page(rows)
    body = {r[0]: r for r in page.tables[0].rows}
    assert body["gTop-k, d / 40"][6] == "0.5 (0.83)"
    assert body["gTop-k, d / 40"][-1] == "1.3 to 3.1"
    assert "0.80 to 0.83 times that of gTop-k (paper: 1.3 to 3.1)" in page.summary
    refused = [row("gs-sgd", 0.0, None, None, why="too small"), rows[1]]
    assert sketch.STUDY.page(refused).tables[0].rows == []


def test_a_page_of_one_part_has_only_that_part():
    common = {"what": "train", "model": "lenet5", "workers": 8, "seed": 0, "d": 9, "steps": 5}
    common |= {"epochs": 1, "epoch": 1, "density": 0.001}
    runs = [
        ("dense", 0.0, 0.9, 9e6),
        ("topk/gs-sgd", 40.0, 0.5, 8e4),
        ("topk/gtopk", 40.0, 0.7, 8e4),
    ]
    rows = [
        common | {"recipe": r, "ratio": x, "score": s, "bytes": b} for r, x, s, b in runs
    ]  # fmt: skip
    page = sketch.STUDY.page(rows)
    assert page.summary.endswith("of d / 40 gs-SGD 50.0 % and gTop-k 70.0 %, dense 90.0 %.")
    assert page.tables[0].rows[1] == [
        "gs-SGD, bytes of a sketch of d / 40", "0.1 %", "2 kB", "50.0 %",
    ]  # fmt: skip
    assert len(page.charts) == 1


def test_the_full_study_looks_at_every_model_that_has_data():
    cells = sketch.cells(Settings())
    assert {c["model"] for c in cells if c["what"] == "u"} == set(sketch.MODELS)
    assert {c["recipe"] for c in cells if c["what"] == "u"} == set(sketch.SOURCES)
    assert len([c for c in cells if c["what"] == "train"]) == 7
