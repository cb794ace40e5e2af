"""The memory that local steps say they hold is what is there."""

import pytest

from tests.integrate.fsdp import models as sharded
from tests.integrate.island_models import Islander
from tests.integrate.test_local import call


def test_each_use_is_counted():
    local = call(every=4, overlap=1, fragments=2, outer="nesterov", dense_below=0)
    entries = sum(p.numel() for p in local.weights.values())
    use = local.memory_use()
    assert use["x"] == use["outer momentum"] == 4 * entries
    assert 4 * entries <= use["residual"] < 4.3 * entries
    sizes = [0, 0]
    for name, number in local.fragment_of.items():
        sizes[number] += local.weights[name].numel()
    assert use["difference and update"] == 8 * max(sizes)
    assert use["weights at the difference"] == 4 * max(sizes)
    plain = call(every=4, outer="average")
    assert plain.memory_use()["outer momentum"] == 0
    assert plain.memory_use()["weights at the difference"] == 0
    assert "bytes per parameter: x 4, residual 4" in repr(plain)
    assert "outer momentum 4" in repr(local)


def island(rank, kind):
    worker = Islander(kind, every=4, outer="nesterov")
    use = worker.local.memory_use()
    worker.close()
    return use["x"], use["outer momentum"]


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_a_rank_of_an_island_holds_its_part(ranks, kind):
    got = ranks.run(4, island, kind)
    entries = sum(p.numel() for p in sharded.Net().parameters())
    for first, second in (got[:2], got[2:]):
        assert first[0] + second[0] == first[1] + second[1] == 4 * entries


def test_the_log_says_it_at_the_start(caplog):
    with caplog.at_level("INFO", logger="gradwire"):
        call(every=4, outer="nesterov")
    assert "bytes per parameter: x 4, outer momentum 4, residual 4" in caplog.text
