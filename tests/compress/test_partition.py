"""Methods in which every worker chooses in a part of its own: micro, exdyna, deft."""

import itertools

import pytest
import torch

import gradwire
from gradwire.accumulate.layout import assign_offsets, size_of
from gradwire.compress import METHODS
from gradwire.compress.parts.deft import allot_entries, assign_bins
from gradwire.compress.parts.exdyna import move_blocks
from gradwire.compress.parts.partition import adapt_threshold, capacity_per_rank
from gradwire.types import Memory, Scan, Slot, Sparse

PARTED = [name for name, method in METHODS.items() if method.learns]
WORLDS = [1, 2, 3, 4, 5, 8]
LAYERS = [10, 4000, 64, 300, 1, 2500, 900, 77]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Vectors this short are not worth the wait for a second one where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def layout(lengths):
    return assign_offsets(
        [Slot(str(i), (n,), (1,), torch.float32, numel=n) for i, n in enumerate(lengths)]
    )


class Workers:
    """P workers that choose, agree and learn, with no exchange between."""

    def __init__(self, method, ranks, lengths=LAYERS):
        self.method, self.slots = METHODS[method], layout(lengths)
        self.size = size_of(self.slots)
        self.memories = [Memory(rank, 0, ranks) for rank in range(ranks)]
        for memory in self.memories:
            memory.lay_out(self.slots, torch.device("cpu"))
        self.kept = [torch.zeros(self.size)] * ranks

    def feed(self, gradients, k):
        """A step with error feedback; how many each worker chose."""
        us = [g + e for g, e in zip(gradients, self.kept, strict=True)]
        chosen = self.step(us, k)
        sent = sum(c.dense().ne(0) for c in chosen)
        self.kept = [torch.where(sent > 0, 0, u) for u in us]
        return [int(c.count) for c in chosen]

    def noise(self, generator, scale=None):
        out = torch.zeros(self.size)
        for i, slot in enumerate(self.slots):
            size = 1.0 if scale is None else scale[i]
            noise = torch.randn(slot.numel, generator=generator) * size
            out[slot.offset : slot.offset + slot.numel] = noise
        return out

    def step(self, us, k, scans=None):
        """Each worker's choice, after all have learned from all."""
        each = zip(us, self.memories, scans or [None] * len(us), strict=True)
        chosen = [self.method.run(u, k, memory, scan) for u, memory, scan in each]
        every = torch.cat([c.indices[: int(c.count)] for c in chosen]).sort().values
        count = torch.tensor(every.numel(), dtype=torch.int32)
        every = torch.cat([every, every.new_full((5,), self.size)])
        for memory in self.memories:
            self.method.learns(memory, Sparse(every, every.float(), count, self.size), k)
        return chosen


@pytest.mark.parametrize("method", PARTED)
@pytest.mark.parametrize("ranks", WORLDS)
def test_no_two_workers_choose_the_same_entry(method, ranks):
    workers, generator = Workers(method, ranks), torch.Generator().manual_seed(ranks)
    owners = torch.zeros(ranks, workers.size)
    for _ in range(3 * ranks):
        us = [workers.noise(generator) for _ in range(ranks)]
        chosen = workers.step(us, 100)
        every = torch.cat([c.indices[: int(c.count)] for c in chosen])
        assert every.numel() == every.unique().numel(), "the union is not the sum"
        assert 60 <= every.numel() <= ranks * capacity_per_rank(100, workers.size, ranks)
        for rank, (c, u) in enumerate(zip(chosen, us, strict=True)):
            n = int(c.count)
            assert torch.equal(c.indices, c.indices.sort().values)
            assert torch.equal(c.values[:n], u[c.indices[:n].long()])
            assert bool((c.values[:n] != 0).all())
            assert bool((c.indices[n:] == workers.size).all())
            owners[rank, c.indices[:n].long()] = 1
    halves = owners.view(ranks, 2, -1).sum(2)
    assert bool((halves > 0).all()), "a worker stays in one place"


@pytest.mark.parametrize("method", PARTED)
@pytest.mark.parametrize(("ranks", "uneven"), [(1, False), (4, False), (4, True)])
def test_density_settles_at_k(method, ranks, uneven):
    size, k = 6400, 96
    generator = torch.Generator().manual_seed(ranks)
    scale = torch.logspace(-0.5, 0.5, size) if uneven else torch.ones(size)
    cluster = gradwire.VirtualCluster(ranks, method=method, density=k / size)
    counts = []
    for _ in range(70 if method == "deft" else 130):
        g = [torch.randn(size, generator=generator) * scale for _ in range(ranks)]
        cluster.average(g)
        sent = cluster._states[0].bundles[0].pending.delivered.sparse.indices
        counts.append(int((sent < size).sum()))
    mean = sum(counts[-50:]) / 50
    assert 0.85 * k <= mean <= 1.15 * k
    assert max(counts) <= ranks * capacity_per_rank(k, size, ranks)
    assert cluster.stats().dense == {}


def test_exdyna_evens_out_what_workers_send():
    def imbalance(method):
        workers, generator = Workers(method, 4, [8192]), torch.Generator().manual_seed(0)
        scale, out = torch.logspace(-0.3, 0.3, 8192), []
        for _ in range(120):
            g = [workers.noise(generator) * scale for _ in range(4)]
            counts = workers.feed(g, 200)
            out.append(4 * max(counts) / sum(counts) - 1)
        return sum(out[-20:]) / 20

    assert imbalance("micro") > 0.7
    assert imbalance("exdyna") < 0.35


def test_what_is_left_over_belongs_to_the_last_part():
    """1024 blocks of 64 do not reach the end of so many entries."""
    workers = Workers("exdyna", 2, [65536 + 6400])
    u = torch.zeros(workers.size)
    u[-1] = 1.0
    assert sorted(int(c.count) for c in workers.step([u, u], 10)) == [0, 1]


def test_one_block_moves_where_neighbours_are_uneven():
    starts = torch.tensor([0, 8, 16, 24, 32])
    for counts, expected in (
        ([10, 10, 10, 10], [0, 8, 16, 24, 32]),
        ([20, 0, 10, 10], [0, 7, 16, 24, 32]),
        ([0, 20, 0, 20], [0, 9, 15, 25, 32]),
        ([0, 0, 0, 0], [0, 8, 16, 24, 32]),
        ([11, 9, 10, 10], [0, 7, 16, 24, 32]),
        ([20, 10, 10, 0], [0, 8, 16, 24, 32]),
    ):
        assert move_blocks(starts, torch.tensor(counts), 2).tolist() == expected
    tight = torch.tensor([0, 3, 16, 24, 32])
    assert torch.equal(move_blocks(tight, torch.tensor([20, 0, 10, 10]), 2), tight)


def test_the_threshold_follows_the_count():
    for count, factor in (
        (100, 0.99875), (101, 1.00125), (110, 1.00125), (111, 1.005), (125, 1.005), (91, 0.99875),
        (90, 0.995), (81, 0.995),
    ):  # fmt: skip
        memory = Memory()
        memory["theta"] = torch.full((), 2.0)
        for _ in range(2):
            adapt_threshold(memory, torch.tensor(count), 100)
        assert float(memory["theta"]) == pytest.approx(2 * factor**2)


def test_the_threshold_runs_while_the_count_is_far_off():
    memory = Memory()
    memory["theta"] = torch.ones(())
    paces = []
    for count in [200] * 12 + [50, 50, 100, 200]:
        before = memory["theta"].clone()
        adapt_threshold(memory, torch.tensor(count), 100)
        paces.append(float((memory["theta"] / before).log()))
    assert paces[:3] == pytest.approx([0.0075, 0.01125, 0.016875], rel=1e-3)
    assert paces[10:12] == pytest.approx([0.25, 0.25], rel=1e-3)
    assert paces[12:] == pytest.approx([-0.0625, -0.09375, -0.00125, 0.005], rel=2e-3)


def naive(u, slots, ranks, counts, mine, k):
    """deft in loops: pieces, portions, bins, and torch.topk in each."""
    pieces = []
    for start, end in zip(slots, [*slots[1:], u.numel()], strict=True):
        blocks = -(-(end - start) // 64)
        parts = min(ranks if end - start > u.numel() / ranks else 1, blocks)
        cuts = [start + blocks * i // parts * 64 for i in range(parts)] + [end]
        pieces += itertools.pairwise(cuts)
    sizes = torch.tensor([-(-(b - a) // 64) * 64 for a, b in pieces])
    norms = torch.stack([u[a:b].double().norm() for a, b in pieces])
    room = capacity_per_rank(k, u.numel(), ranks)
    wanted = allot_entries(norms, sizes.clamp(max=room), k).tolist()
    order = sorted(range(len(pieces)), key=lambda i: (-(counts or sizes.tolist())[i], i))
    chosen = []
    for i, index in enumerate(order):
        column = i % ranks if i // ranks % 2 == 0 else ranks - 1 - i % ranks
        if column == mine:
            a, b = pieces[index]
            best = sorted(range(a, b), key=lambda j: (-abs(float(u[j])), j))[: wanted[index]]
            chosen += [j for j in best if float(u[j])]
    if len(chosen) > room:
        chosen = sorted(chosen, key=lambda j: (-abs(float(u[j])), j))[:room]
    return sorted(chosen)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", ["noise", "ties", "zeros", "one layer"])
def test_deft_takes_the_largest_of_each_piece(ranks, kind):
    workers, generator = Workers("deft", ranks), torch.Generator().manual_seed(7)
    scale = [100.0 if kind == "one layer" and i == 6 else 1.0 + i for i in range(8)]
    counts = None
    for step in range(3):
        us = [workers.noise(generator, scale) for _ in range(ranks)]
        if kind == "ties":
            us = [u.round() for u in us]
        if kind == "zeros":
            us = [u * (torch.rand(u.shape, generator=generator) < 0.01) for u in us]
        chosen = workers.step(us, 90)
        offsets = [slot.offset for slot in workers.slots]
        for rank, (c, u) in enumerate(zip(chosen, us, strict=True)):
            expected = naive(u, offsets, ranks, counts, (rank + step) % ranks, 90)
            assert c.indices[: int(c.count)].tolist() == expected
        counts = workers.memories[0]["counts"].tolist()
        assert sum(counts) == sum(int(c.count) for c in chosen)


def test_portions():
    norms, sizes = torch.tensor([6.0, 3, 1, 0]).double(), torch.tensor([1000, 1000, 1000, 1000])
    assert allot_entries(norms, sizes, 100).tolist() == [60, 30, 10, 1]
    assert allot_entries(norms, torch.tensor([20, 1000, 1000, 5]), 100).tolist() == [20, 60, 20, 1]
    assert allot_entries(norms, torch.tensor([20, 20, 20, 5]), 100).tolist() == [20, 20, 20, 1]
    assert allot_entries(torch.zeros(4).double(), sizes, 100).tolist() == [1] * 4
    assert (
        allot_entries(torch.full((4,), 1e200, dtype=torch.double), sizes, 100).tolist() == [25] * 4
    )


def test_bins_go_there_and_back():
    costs = torch.tensor([5, 9, 1, 7, 7, 2, 8])
    assert assign_bins(costs, 3).tolist() == [1, 0, 0, 2, 2, 0, 1]
    assert assign_bins(costs, 1).tolist() == [0] * 7


@pytest.mark.parametrize("method", PARTED)
@pytest.mark.parametrize(
    "u",
    [
        torch.zeros(640),
        torch.full((640,), 0.5),
        torch.eye(640)[100],
        torch.full((640,), 1e-38),
        torch.full((640,), 1e38),
    ],
    ids=["zeros", "equal", "one-hot", "tiny", "huge"],
)
def test_degenerate_inputs(method, u):
    workers = Workers(method, 4, [640])
    totals = [sum(int(c.count) for c in workers.step([u] * 4, 16)) for _ in range(6)]
    assert max(totals) <= min(32, int((u != 0).sum()))
    assert max(totals) >= min(16, int((u != 0).sum()))
    if float(u.max()) > 1 or 0 < float(u.max()) < 1e-9:
        return
    # A threshold of zero starts again with the first gradient that is not zero.
    noise = torch.randn(640, generator=torch.Generator().manual_seed(0))
    totals = [sum(int(c.count) for c in workers.step([noise] * 4, 16)) for _ in range(60)]
    assert 10 <= totals[-1] <= 24


@pytest.mark.parametrize("method", PARTED)
@pytest.mark.parametrize("group", [16, 64])
def test_what_a_scan_has_left_changes_nothing(method, group):
    plain, helped = Workers(method, 3), Workers(method, 3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        us = [plain.noise(generator) for _ in range(3)]
        scans = [Scan(torch.tensor(True), u.abs().view(-1, group).amax(1), group) for u in us]
        for a, b in zip(plain.step(us, 60), helped.step(us, 60, scans), strict=True):
            assert torch.equal(a.indices, b.indices)
            assert torch.equal(a.values, b.values)


@pytest.mark.parametrize("method", PARTED)
def test_alone_it_chooses_k(method):
    u = torch.randn(1003)
    assert gradwire.compress(u, method=method, k=0).indices.numel() == 0
    for k in (1, 30, 1003):
        sparse = gradwire.compress(u, method=method, k=k)
        assert torch.equal(sparse.indices, gradwire.compress(u, k=k).indices)
    short = gradwire.compress(torch.randn(5), method=method, k=2)
    assert short.indices.numel() == 2


@pytest.mark.parametrize("method", PARTED)
def test_resumed_is_bit_equal(method):
    def run(cluster, steps, start=0):
        out = b""
        for step in range(start, start + steps):
            seeds = [torch.Generator().manual_seed(100 * step + r) for r in range(3)]
            out += (
                cluster.average([torch.randn(3000, generator=s) for s in seeds]).numpy().tobytes()
            )
        return out

    first, second, fresh = (gradwire.VirtualCluster(3, method=method, density=0.01) for _ in "123")
    whole, start = run(first, 12), run(second, 7)
    saved = second.state_dict()
    run(second, 2, start=20)
    fresh.load_state_dict(saved)
    assert start + run(fresh, 5, start=7) == whole
    fresh.load_state_dict(saved)
    assert start + run(fresh, 5, start=7) == whole, "what was loaded has changed"


@pytest.mark.parametrize("method", PARTED)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_parts_for_another_number_of_workers_are_made_anew(method, ranks):
    old, new = Workers(method, 4, [8192, 100]), Workers(method, ranks, [8192, 100])
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        old.step([old.noise(generator) for _ in range(4)], 100)
    for memory in new.memories:
        memory.update({k: v.clone() for k, v in old.memories[0].items()})
    for _ in range(2):
        chosen = new.step([new.noise(generator) for _ in range(ranks)], 100)
        every = torch.cat([c.indices[: int(c.count)] for c in chosen])
        assert 50 < every.numel() == every.unique().numel()


def real(rank, method):
    state = gradwire.State(method=method, density=0.02, dense_below=0)
    out = b""
    for step in range(8):
        g = torch.randn(2000, generator=torch.Generator().manual_seed(100 * step + rank))
        gradwire.average({"gradient": g}, state)
        out += g.numpy().tobytes()
    assert state.stats().dense == {}
    return out


@pytest.mark.parametrize("method", PARTED)
def test_virtual_workers_equal_real_ranks_bit_for_bit(ranks, method):
    cluster = gradwire.VirtualCluster(4, method=method, density=0.02)
    out = b""
    for step in range(8):
        seeds = [torch.Generator().manual_seed(100 * step + rank) for rank in range(4)]
        out += cluster.average([torch.randn(2000, generator=s) for s in seeds]).numpy().tobytes()
    assert set(ranks.run(4, real, method)) == {out}


def test_a_worker_has_room_for_its_share_only():
    """With room for k each, eight workers would send more than dense at density 0.1."""
    cluster = gradwire.VirtualCluster(8, method="micro", density=0.1)
    cluster.average([torch.randn(6400) for _ in range(8)])
    assert cluster.stats().dense == {}
    # Headers and 160 indices to 7 others; 2 (P - 1) / P of the values at 8 x 160 places.
    assert cluster.stats().bytes_sent == 7 * (32 + 160 * 4) + 2 * 7 * 160 * 4
