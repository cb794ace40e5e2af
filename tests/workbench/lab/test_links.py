"""Links of ranks: their measurement, and the slow rank or pair among them."""

import itertools

import pytest
import torch
import torch.distributed as dist

from gradwire.ranks.distributed import DistributedGroup
from gradwire.workbench.lab.links import (
    LEAST,
    MOST,
    Links,
    measure_links,
    pair_rounds,
    rank_figures,
    slow_pairs,
    slow_ranks,
)

ONE_HOST = ["a"] * 4


def links(world=4, rate=100.0, latency=1e-4, **changes):
    """Equal links but for `rate_AB` and `latency_AB`, from rank A to B."""
    table = {name: [[value] * world for _ in range(world)] for name, value in
             (("rate", rate), ("latency", latency))}  # fmt: skip
    for name, value in changes.items():
        kind, (a, b) = name.split("_")
        table[kind][int(a)][int(b)] = value
    return Links(**table)


@pytest.mark.parametrize("world", [2, 3, 4, 7, 8])
def test_every_two_meet_once_and_nobody_is_in_two_pairs_at_a_time(world):
    met = list(pair_rounds(world))
    for pairs in met:
        members = list(itertools.chain(*pairs))
        assert len(members) == len(set(members))
    everyone = sorted(tuple(sorted(pair)) for pairs in met for pair in pairs)
    assert everyone == list(itertools.combinations(range(world), 2))


def test_equal_links_are_not_slow():
    figures = rank_figures(links(), ONE_HOST)
    assert slow_ranks(figures) == []
    assert slow_pairs(links(), ONE_HOST, set()) == []


def test_a_rank_that_sends_slowly_is_named_and_its_peers_are_not():
    slow = links(rate_20=10.0, rate_21=9.0, rate_23=11.0)
    assert slow_ranks(rank_figures(slow, ONE_HOST)) == [(2, "sends", 11.0, 100.0)]
    assert slow_pairs(slow, ONE_HOST, {2}) == []


def test_a_rank_that_receives_slowly_is_named():
    slow = links(rate_01=10.0, rate_21=9.0, rate_31=11.0)
    assert slow_ranks(rank_figures(slow, ONE_HOST)) == [(1, "receives", 11.0, 100.0)]


def test_a_rank_that_answers_late_is_named():
    late = links(latency_30=0.02, latency_31=0.02, latency_32=0.02)
    assert slow_ranks(rank_figures(late, ONE_HOST)) == [(3, "latency", 0.02, 1e-4)]
    little = links(latency_30=4e-4, latency_31=4e-4, latency_32=4e-4)
    assert slow_ranks(rank_figures(little, ONE_HOST)) == [], "0.3 ms more is no finding"


def test_one_slow_pair_is_no_slow_rank():
    slow = links(rate_12=10.0)
    assert slow_ranks(rank_figures(slow, ONE_HOST)) == []
    assert slow_pairs(slow, ONE_HOST, set()) == [(1, 2, 10.0)]


def test_of_two_ranks_the_pair_is_named():
    slow = links(world=2, rate_01=10.0)
    assert slow_ranks(rank_figures(slow, ["a", "a"])) == []
    assert slow_pairs(slow, ["a", "a"], set()) == [(0, 1, 10.0)]


def test_links_inside_a_host_and_between_hosts_are_not_compared():
    hosts = ["a", "a", "b", "b"]
    fast = links(rate_01=9000.0, rate_10=9000.0, rate_23=9000.0, rate_32=9000.0)
    assert slow_ranks(rank_figures(fast, hosts)) == []
    assert slow_pairs(fast, hosts, set()) == []
    worse = links(rate_01=9000.0, rate_10=9000.0, rate_23=9000.0, rate_32=900.0)
    assert slow_pairs(worse, hosts, set()) == [(3, 2, 900.0)]


def test_the_best_of_two_measurements_counts():
    best = links(rate_01=10.0, latency_01=1.0).best(links())
    assert best == links()


def measured(rank):
    control = dist.new_group(backend="gloo")
    group = DistributedGroup(control, torch.device("cpu"))
    measured_links = measure_links(group, group)
    return measured_links.rate, measured_links.latency, group.bytes_sent


def test_ranks_measure_every_link_and_all_get_the_same_table(ranks):
    tables = ranks.run(3, measured)
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    rate, latency, sent = tables[0]
    for a, b in itertools.permutations(range(3), 2):
        assert 1e6 < rate[a][b] < 1e12
        assert 1e-7 < latency[a][b] < 1
    assert 2 * LEAST < sent < 2 * 2 * MOST, "a transfer is bounded"
