"""offload: x and outer momentum in the host's memory change no bit, and no checkpoint."""

import pytest
import torch

import gradwire
from gradwire.errors import ConfigError
from gradwire.integrate.local_steps.vectors import HostVectors
from gradwire.ranks.echo import EchoGroup
from tests.integrate.island_models import Islander
from tests.integrate.test_local import call, crew

SIGNS = {"method": "topk", "density": 0.5, "values": "sign", "indices": "auto"}
WAYS = {
    "waits": {"every": 3, "bundle_mb": 0.001},
    "kept": {"every": 3, "keep_unsent": True, **SIGNS},
    "late": {"every": 4, "overlap": 2, "fragments": 2, "bundle_mb": 0.001, **SIGNS},
    "average": {"every": 2, "outer": "average"},
    "watch": {"every": 2, "watch": 1},
}


def bits(worker):
    """Weights, x, momentum and residual of a worker, flat."""
    local = worker.local
    vectors = [*local.reference.items(), *local.velocity.items()]
    return torch.cat([worker.flat, worker.residual, *[v.reshape(-1) for _, v in vectors]])


@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
def test_no_bit_changes(fields):
    plain, run_plain = crew(2, **fields)
    host, run_host = crew(2, offload=True, **fields)
    for _ in range(3):
        run_plain(lambda w: w.train(3))
        run_host(lambda w: w.train(3))
        assert all(map(torch.equal, map(bits, plain), map(bits, host)))
    assert isinstance(host[0].local.reference, HostVectors)


@pytest.mark.parametrize("first", [False, True], ids=["then offloaded", "offloaded first"])
def test_a_checkpoint_fits_either_way(first):
    """Taken in the middle of an overlapped round, and just before a prefetched exchange."""
    fields = WAYS["late"]
    workers, run = crew(2, offload=first, **fields)
    resumed, run_resumed = crew(2, offload=not first, seed=1, **fields)
    run_resumed(lambda w: w.train(7))
    run(lambda w: w.train(5))
    states = run(lambda w: w.local.state_dict())
    run_resumed(lambda w: w.local.load_state_dict(states[w.rank]))
    for worker in resumed:
        worker.taken = 5
    run(lambda w: w.train(6))
    run_resumed(lambda w: w.train(6))
    assert all(map(torch.equal, map(bits, workers), map(bits, resumed)))


def islander(rank, kind, offload, folder):
    worker = Islander(kind, seed=2, offload=offload, every=3, overlap=1).train(4)
    gradwire.save(worker.local, folder)
    again = Islander(kind, offload=not offload, every=3, overlap=1)
    gradwire.load(again.local, folder)
    again.taken = worker.taken
    with again.local.shared():
        shared = again.whole()
    for each in (worker, again):
        each.train(4)
    same = worker.whole() == again.whole() and torch.equal(worker.x(), again.x())
    whole = worker.local.shared_weights()
    result = same, again.whole(), shared, sorted(whole)
    worker.close()
    again.close()
    return result


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_islands_save_and_go_on_either_way(ranks, tmp_path, kind):
    got = [ranks.run(4, islander, kind, way, tmp_path / str(way)) for way in (False, True)]
    assert got[0] == got[1]
    assert all(same for same, *_ in got[0])


def test_the_device_holds_what_an_exchange_needs():
    vectors = HostVectors({"a": torch.Size([2]), "b": torch.Size([3])}, torch.device("cpu"))
    vectors.prefetch(["a", "b"])
    vectors.fetch("a").add_(1)
    assert vectors["a"].tolist() == [0, 0], "not stored yet"
    vectors.store("a")
    assert vectors["a"].tolist() == [1, 1]
    vectors.put("b", torch.ones(3))
    assert vectors.fetch("b").tolist() == [1, 1, 1], "the copy on its way was old"
    vectors.drop(["b"])
    assert [name for name, _ in vectors.items()] == ["a", "b"]


def test_the_memory_is_the_hosts():
    use = call(every=4, outer="nesterov", offload=True).memory_use()
    plain = call(every=4, outer="nesterov").memory_use()
    assert use["in host memory"] == plain["x"] + plain["outer momentum"]
    assert use["x"] == use["outer momentum"] == plain["in host memory"] == 0
    assert "8 in host memory" in repr(call(every=4, outer="nesterov", offload=True))


def test_bad_input_is_one_line():
    with pytest.raises(ConfigError, match="offload must be True or False, got 'x'"):
        call(every=4, offload="x")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies beside the device's work")
@pytest.mark.parametrize("fields", WAYS.values(), ids=WAYS)
def test_copies_beside_the_device_change_no_bit(fields):
    def trained(offload):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        local = gradwire.local_steps(
            model, optimizer, group=EchoGroup(2), offload=offload, **{"density": 0.1} | fields
        )
        for step in range(12):
            x = torch.full((64, 512), 0.1 * step, device="cuda")
            model(x).square().mean().backward()
            optimizer.step()
            local.step()
        vectors = [*local.reference.values(), *local.velocity.values(), *model.parameters()]
        return [v.detach().cpu() for v in vectors]

    assert all(map(torch.equal, trained(False), trained(True)))
