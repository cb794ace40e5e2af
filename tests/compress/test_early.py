"""What a method begins before the scan changes when it is done, not what."""

import importlib

import pytest
import torch

import gradwire

# Its package has a function of that name.
module = importlib.import_module("gradwire.compress.randk")


@pytest.fixture
def aside(monkeypatch):
    """Every vector is large enough; what a stream at the side would do, of which a CPU has none."""
    begun = []

    class AtOnce:
        def __init__(self, purpose, device, work, urgent):
            assert urgent, "otherwise it would wait for the scan to end"
            begun.append(purpose)
            self._result = work()

        def result(self):
            return self._result

    monkeypatch.setattr(module, "SideStream", AtOnce)
    monkeypatch.setattr(module, "side_stream_pays", lambda size, device: True)
    return begun


def steps(shared):
    """What two workers get in three steps, and how many draws each then remembers."""
    torch.manual_seed(1)
    cluster = gradwire.VirtualCluster(2, method="randk", density=0.1, shared=shared, dense_below=0)
    means = [cluster.average([torch.randn(640), torch.randn(640)]) for _ in range(3)]
    memories = [b.memory for state in cluster._states for b in state.bundles]
    return (
        torch.stack(means),
        [int(m["draws"]) for m in memories],
        [dict(m.prefetched) for m in memories],
    )


@pytest.mark.parametrize("shared", [True, False])
def test_random_k_drawn_early_is_the_same(shared, request):
    inline = steps(shared)
    begun = request.getfixturevalue("aside")
    early = steps(shared)
    assert begun == ["draw"] * 6
    assert torch.equal(inline[0], early[0])
    assert inline[1:] == early[1:] == ([3, 3], [{}, {}])


def test_nothing_is_drawn_for_a_step_that_sends_everything(aside):
    cluster = gradwire.VirtualCluster(2, method="randk", density=0.1, dense_below=0)
    cluster.average([torch.randn(640), torch.randn(640)])
    cluster.flush()
    cluster.average([torch.randn(640), torch.randn(640)])
    assert aside == ["draw"] * 2
