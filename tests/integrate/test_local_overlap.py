"""Overlapped rounds and fragments: late updates land by the rule, and nothing else changes."""

import pytest
import torch
import torch.distributed as dist

import gradwire
from gradwire.errors import ConfigError, ExchangeError, StateError
from gradwire.integrate.local_steps.fragments import cut_model, is_turn
from gradwire.ranks.virtual import VirtualRanks
from tests.integrate import models
from tests.integrate.island_models import Islander
from tests.integrate.test_local import FIELDS, Worker, call, crew

WHOLE = {"method": "dense", "values": "fp32", "indices": "int32"}
SIGNS = {"method": "topk", "density": 0.5, "values": "sign", "indices": "auto"}
LATE = {"every": 4, "overlap": 2, **SIGNS}


def x_of(worker):
    return torch.cat([x.reshape(-1) for x in worker.local.reference.values()])


@pytest.mark.parametrize("kept", [False, True], ids=["all", "kept"])
@pytest.mark.parametrize("fields", [WHOLE, SIGNS], ids=["dense", "sign"])
def test_a_late_update_lands_on_the_weights_as_they_are_then(fields, kept):
    """The rule, written out: w = x - residual + what the weights moved since."""
    fields = {"every": 4, "overlap": 2, "keep_unsent": kept, "outer": "nesterov"} | fields
    workers, run = crew(2, **fields)
    taken = [w.flat for w in workers]
    for step in range(1, 15):
        x = x_of(workers[0])
        run(lambda w: (w.train(1), w.taken))
        if step % 4 == 0:
            assert torch.equal(x_of(workers[0]), x), "landed at once"
            taken = [w.flat for w in workers]
        if step % 4 == 1:
            moving = [w.flat for w in workers]
        if step % 4 == 2 and step > 4:
            assert not torch.equal(x_of(workers[0]), x), "did not land"
            for worker, then, before in zip(workers, taken, moving, strict=True):
                start = x_of(worker) - (worker.residual if kept else 0)
                landed = worker.flat
                # The step that ended just before the landing is AdamW's, of size 0.01 at most.
                assert (landed - (start + before - then)).abs().max() < 0.011
        elif step > 4:
            assert torch.equal(x_of(workers[0]), x)
        assert torch.equal(x_of(workers[0]), x_of(workers[1]))


def landing(worker, moves):
    """Weights moved by given amounts, so that every bit of the rule can be followed."""
    for move in moves:
        with torch.no_grad():
            for p in worker.model.parameters():
                p += move
        worker.local.step()
    return worker


def test_the_rule_to_the_bit():
    workers, run = crew(2, every=3, overlap=2, outer="average", **WHOLE)
    start = workers[0].flat
    run(lambda w: landing(w, [0.25 * (1 + w.rank)] * 3))
    # Differences are 0.75 and 1.5, the mean 1.125; two more steps are 0.5 and 1.
    run(lambda w: landing(w, [0.25 * (1 + w.rank)] * 2))
    for worker in workers:
        x = start + 1.125
        torch.testing.assert_close(x_of(worker), x, atol=1e-6, rtol=0)
        torch.testing.assert_close(worker.flat, x + 0.5 * (1 + worker.rank), atol=1e-6, rtol=0)


def test_without_steps_between_it_is_the_plain_rule():
    late, run_late = crew(2, every=3, overlap=2, **SIGNS)
    plain, run_plain = crew(2, every=3, **SIGNS)
    run_late(lambda w: landing(w, [0.5 + w.rank, 0.25, 0.125, 0, 0]))
    run_plain(lambda w: landing(w, [0.5 + w.rank, 0.25, 0.125, 0, 0]))
    assert torch.equal(late[0].flat, plain[0].flat)
    assert torch.equal(late[1].flat, plain[0].flat)


@pytest.mark.parametrize("fields", [SIGNS, {"density": 0.1}, SIGNS | {"fragments": 2}])
def test_nothing_is_lost(fields):
    workers, run = crew(3, **({"every": 4, "overlap": 2, "outer": "average"} | fields))
    f = workers[0].local.fragments
    names = [n for n, number in workers[0].local.fragment_of.items() if number == f - 1]

    def part(tensors):
        return torch.cat([tensors[n].detach().reshape(-1) for n in names])

    def residual(w):
        return torch.cat([w.local.residual(n).reshape(-1) for n in names])

    for _ in range(3):
        run(lambda w: w.train(3))
        x, kept = part(workers[0].local.reference), sum(residual(w).double() for w in workers)
        seen = {}

        def last(w, seen=seen):
            take = w.local._end_round

            def spy(number, overlap):
                seen[w.rank] = part(w.local.weights).clone()
                take(number, overlap)

            w.local._end_round = spy
            w.train(1)
            w.local._end_round = take

        run(last)
        moved = sum((x - w).double() for w in seen.values())
        left = sum(residual(w).double() for w in workers)
        run(lambda w: w.train(2))
        update = (x - part(workers[0].local.reference)).double()
        torch.testing.assert_close(moved + kept, 3 * update + left, atol=3e-6, rtol=0)
        assert update.count_nonzero() > 0
        run(lambda w: w.train(2))
        run(lambda w: w.local.exchange())


def wander(worker, steps=11):
    """Random steps: the same bits in every process, which matrix products do not promise."""
    draw = torch.Generator().manual_seed(worker.rank)
    for _ in range(steps):
        for p in worker.model.parameters():
            p.data += torch.randn(p.shape, generator=draw)
        worker.local.step()
    out = worker.flat.numpy().tobytes(), x_of(worker).numpy().tobytes()
    worker.local.close()
    return out


def wandered(rank, fields):
    return wander(Worker(rank, seed=rank, **fields))


@pytest.mark.parametrize("fragments", [1, 3])
def test_the_background_changes_no_bit(ranks, fragments):
    """Virtual workers exchange in their turn, real ones in a thread."""
    fields = LATE | {"fragments": fragments, "keep_unsent": True}
    _, run = crew(2, **fields)
    there = ranks.run(2, wandered, fields)
    assert there == run(wander)
    assert there[0][1] == there[1][1]
    assert there[0][0] != there[1][0]


def slow(rank):
    """The next steps run while the exchange waits for a rank that is late."""
    import threading

    worker = Worker(rank, **(LATE | WHOLE))
    gate = threading.Event()
    exchange = worker.local._exchange

    def held(flight):
        gate.wait(20)
        exchange(flight)

    worker.local._exchange = held
    worker.train(5)
    running = not worker.local.flights[0].done.is_set()
    gate.set()
    worker.train(1)
    out = running, worker.local.flights == [], worker.local.steps
    worker.local.close()
    return out


def test_steps_run_while_the_exchange_waits(ranks):
    assert ranks.run(2, slow) == [(True, True, 1)] * 2


def test_fragments_are_even_runs_and_none_is_empty():
    sizes = {"table": 900, "a": 50, "b": 50, "c": 50, "d": 50, "head": 900}
    assert list(cut_model(sizes, 3).values()) == [0, 1, 1, 1, 1, 2]
    assert list(cut_model(sizes, 6).values()) == [0, 1, 2, 3, 4, 5]
    assert list(cut_model({"one": 9, "two": 1, "three": 1}, 3).values()) == [0, 1, 2]
    even = cut_model({str(i): 10 for i in range(12)}, 4)
    assert [list(even.values()).count(n) for n in range(4)] == [3] * 4
    assert [s for s in range(1, 13) if is_turn(0, 2, 6, s)] == [3, 9]
    assert [s for s in range(1, 13) if is_turn(1, 2, 6, s)] == [6, 12]
    assert [n for n in range(4) for s in range(1, 6) if is_turn(n, 4, 5, s)] == [0, 1, 2, 3]


def test_fragments_take_turns():
    workers, run = crew(2, every=4, fragments=2, **WHOLE)
    local = workers[0].local
    for step in range(1, 13):
        before, sent = {n: x.clone() for n, x in local.reference.items()}, local.stats().bytes_sent
        run(lambda w: w.train(1))
        moved = {local.fragment_of[n] for n, x in local.reference.items() if (x != before[n]).any()}
        assert moved == ({0} if step % 4 == 2 else {1} if step % 4 == 0 else set())
        assert (local.stats().bytes_sent > sent) is bool(moved)
    assert local.stats().steps == 6
    assert [b.slots[0].unit // 2 for b in local.bundles] == [0, 1]


def test_a_rank_that_is_not_finite_stops_its_fragment_alone():
    workers, run = crew(2, every=4, fragments=2, overlap=1, **SIGNS)
    run(lambda w: w.train(3))
    before, start = x_of(workers[0]), workers[0].flat

    def spoil(w):
        if w.rank == 1:
            with torch.no_grad():
                w.model.c.bias[0] = float("nan")
        landing(w, [0.5])
        if w.rank == 1:
            assert not w.flat.isfinite().all()
        return landing(w, [0.5])

    run(spoil)
    assert torch.equal(x_of(workers[0]), before)
    assert all(w.local.stats().skipped == 1 for w in workers)
    later = [n for n, number in workers[0].local.fragment_of.items() if number == 1]
    for worker in workers:
        assert worker.flat.isfinite().all()
        for name in later:
            assert torch.equal(worker.local.weights[name], worker.local.reference[name])
    assert not torch.equal(workers[0].flat, start)
    run(lambda w: landing(w, [0.5] * 2))
    assert not torch.equal(x_of(workers[0]), before)
    assert torch.equal(x_of(workers[0]), x_of(workers[1]))


def test_exchange_lands_first_and_then_makes_all_equal():
    workers, run = crew(2, outer="average", **LATE)
    run(lambda w: w.train(5))
    assert [f.due for f in workers[0].local.flights] == [6]
    mean = sum(w.flat.double() for w in workers) / 2
    run(lambda w: w.local.flush())
    run(lambda w: w.local.exchange())
    assert workers[0].local.flights == []
    # With everything sent, x is the mean of all that the ranks had.
    torch.testing.assert_close(x_of(workers[0]).double(), mean, atol=1e-6, rtol=0)
    assert torch.equal(workers[0].flat, workers[1].flat)
    assert not any(w.residual.any() for w in workers)
    assert workers[0].local.stats().steps == 2


def test_flush_is_for_the_next_difference_of_every_fragment():
    workers, run = crew(2, **(LATE | {"fragments": 2}))
    run(lambda w: w.train(5))
    assert workers[0].residual.any()
    run(lambda w: w.local.flush())
    run(lambda w: w.train(1))
    some = [w.residual.count_nonzero() for w in workers]
    assert all(some)
    run(lambda w: w.train(2))
    assert not any(w.residual.any() for w in workers)
    assert workers[0].local.stats().dense == {"flush": 2}


def test_shared_holds_what_has_landed():
    workers, run = crew(2, **(LATE | {"keep_unsent": True}))
    run(lambda w: w.train(9))
    for worker in workers:
        own, x = worker.flat, x_of(worker)
        with worker.local.shared():
            assert torch.equal(worker.flat, x)
        assert torch.equal(worker.flat, own)
        assert len(worker.local.flights) == 1
    assert torch.equal(x_of(workers[0]), x_of(workers[1]))


def closed(rank):
    worker = Worker(rank, **LATE).train(5)
    own, x = worker.flat, x_of(worker)
    worker.local.close()
    same = torch.equal(worker.flat, own), torch.equal(x_of(worker), x)
    try:
        worker.local.step()
    except ExchangeError as error:
        return *same, str(error)
    return *same, "it went on"


def test_close_leaves_the_weights_as_they_are(ranks):
    wanted = True, True, "these local steps were closed: call local_steps again to go on"
    assert ranks.run(2, closed) == [wanted] * 2


def dying(rank):
    """Rank 1 stops while rank 0 exchanges in the background."""
    worker = Worker(rank, timeout=20, **(LATE | WHOLE))
    worker.train(3)
    if rank == 1:
        worker.local.group.give_up("it ran out of luck")
        worker.local.engine.broken = RuntimeError("stopped")
        return []
    said = []
    worker.train(1)
    worker.local.flights[0].done.wait(10)
    for act in (worker.local.step, worker.local.exchange, worker.local.state_dict):
        try:
            act()
        except ExchangeError as error:
            said.append(str(error))
    return said


def test_a_peer_that_dies_is_named_at_the_next_call(ranks):
    said, _ = ranks.run(2, dying)
    assert len(said) == 3
    assert all("Rank 1 has stopped: it ran out of luck" in words for words in said)
    assert all("rank 0 of 2" in words for words in said)


def end_of(worker):
    local = worker.local
    out = worker.flat.numpy().tobytes(), x_of(worker).numpy().tobytes(), local.stats().bytes_sent
    local.close()
    return out


def whole(rank, steps, fields):
    return end_of(Worker(rank, seed=rank, **fields).train(steps))


def broken(rank, steps, stop, folder, fields):
    worker = Worker(rank, seed=rank, **fields).train(stop)
    gradwire.save(worker.local, folder)
    flying = len(worker.local.flights)
    taken = worker.taken
    worker.local.close()
    worker = Worker(rank, seed=9, **fields).train(5)
    gradwire.load(worker.local, folder)
    assert len(worker.local.flights) == flying > 0
    worker.taken = taken
    return end_of(worker.train(steps - stop))


@pytest.mark.parametrize(
    ("stop", "more"),
    [
        (5, {}),
        (8, {"keep_unsent": True, "outer": "nesterov"}),
        (6, {"fragments": 3, "overlap": 3}),
    ],
    ids=["plain", "kept", "fragments"],
)
def test_resumed_in_the_middle_is_bit_equal(ranks, tmp_path, stop, more):
    fields = LATE | {"watch": 1} | more
    unbroken = ranks.run(2, whole, 12, fields)
    assert unbroken == ranks.run(2, broken, 12, stop, str(tmp_path), fields)
    assert unbroken[0][1] == unbroken[1][1]


def island_end(worker):
    out = worker.whole(), worker.x().numpy().tobytes(), worker.local.stats().bytes_sent
    worker.close()
    return out


def island_whole(rank, kind, fields):
    return island_end(Islander(kind, **fields).train(12))


def island_broken(rank, kind, folder, fields):
    worker = Islander(kind, **fields).train(6)
    gradwire.save(worker.local, folder)
    assert len(worker.local.flights) == 1
    worker.close()
    worker = Islander(kind, seed=4, **fields)
    gradwire.load(worker.local, folder)
    worker.taken = 6
    return island_end(worker.train(6))


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_islands_overlap_and_resume_in_the_middle(ranks, tmp_path, kind):
    fields = LATE | {"fragments": 2, "keep_unsent": True, "overlap": 1}
    unbroken = ranks.run(4, island_whole, kind, fields)
    assert unbroken == ranks.run(4, island_broken, kind, str(tmp_path), fields)
    assert unbroken[0][1] == unbroken[2][1]
    assert unbroken[1][1] == unbroken[3][1]
    assert unbroken[0][0] == unbroken[1][0] != unbroken[2][0]


def saved(rank, folder):
    worker = Worker(rank, **LATE).train(5)
    gradwire.save(worker.local, folder)
    (flight,) = worker.local.flights
    step = torch.cat([u.reshape(-1) for u in flight.values.values()])
    out = worker.flat, x_of(worker), step
    landing(worker, [0.0])
    out += (worker.flat,)
    worker.local.close()
    return [t.numpy() for t in out]


def loaded(rank, folder):
    worker = Worker(rank, seed=8, **LATE)
    gradwire.load(worker.local, folder)
    flat = worker.flat
    landing(worker, [0.0])
    out = flat, x_of(worker), worker.flat
    worker.train(4)
    worker.local.close()
    return [t.numpy() for t in out]


def test_another_number_of_ranks_lands_the_mean(ranks, tmp_path):
    before = [[torch.tensor(t) for t in r] for r in ranks.run(3, saved, str(tmp_path))]
    after = [[torch.tensor(t) for t in r] for r in ranks.run(2, loaded, str(tmp_path))]
    mean, landed = (sum(r[i].double() for r in before) / 3 for i in (0, 3))
    for flat, _, end in after:
        torch.testing.assert_close(flat.double(), mean, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(end.double(), landed, atol=1e-6, rtol=1e-6)
    assert torch.equal(after[0][1], after[1][1])


def test_a_damaged_note_of_a_flight_is_refused():
    workers, run = crew(1, **LATE)
    run(lambda w: w.train(5))
    local = workers[0].local
    for change, words in (
        ({"due": 5}, "an update that was due at step 5"),
        ({"number": 1}, "fragments that are not there"),
        ({"due": "soon"}, "due must be a whole number"),
    ):
        state = local.state_dict()
        state["local"]["flights"][0] |= change
        with pytest.raises(StateError, match=words):
            local.load_state_dict(state)
    state = local.state_dict()
    del state["local"]["update"]["c.bias"]
    with pytest.raises(StateError, match=r"differ in update: \['c.bias'\]"):
        local.load_state_dict(state)
    other, _ = crew(1, **(LATE | {"fragments": 2}))
    with pytest.raises(StateError, match="saved with fragments=1, this is fragments=2"):
        other[0].local.load_state_dict(local.state_dict())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"overlap": 3}, r"^overlap=3 is not below every=3: an update must land before"),
        ({"overlap": -1}, "overlap must be a whole number of steps, got -1"),
        ({"overlap": True}, "overlap must be a whole number of steps, got True"),
        ({"fragments": 0}, "fragments must be a whole number of at least 1, got 0"),
        ({"fragments": 4}, r"^fragments=4 is above every=3: each needs a step of its own"),
        ({"fragments": 7, "every": 9}, r"^fragments=7, and the model has 6 parameters: use fewer"),
    ],
)
def test_bad_input_is_one_line(given, words):
    with pytest.raises(ConfigError, match=words) as error:
        call(**given)
    assert "\n" not in str(error.value)


def test_learning_rates_are_not_followed():
    local = call(every=4, overlap=1)
    with pytest.raises(StateError, match="does not go together with overlap or fragments"):
        local.follow_lr(0.1)


def differing(rank, name):
    fields = {"overlap": 1, "fragments": 1} | {name: 1 + rank}
    try:
        Worker(rank, **(FIELDS | fields))
    except ConfigError as error:
        dist.barrier()
        return str(error)
    return ""


def test_ranks_must_have_them_alike(ranks):
    name = "overlap"
    wanted = f"ranks differ in {name}: rank 1 has 2, rank 0 has 1. Give all the same."
    assert ranks.run(2, differing, name) == [wanted] * 2


def test_a_recipe_says_them(capsys):
    net = models.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    group = VirtualRanks(1).groups[0]
    gradwire.local_steps(net, optimizer, group=group, recipe="muon", overlap=2, fragments=2)
    assert "keep_unsent=True, overlap=2, fragments=2\n" in capsys.readouterr().err
