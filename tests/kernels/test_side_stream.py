"""What is made on one stream and dropped on another is still whole when it is read."""

import pytest
import torch

from gradwire.config import Config
from gradwire.kernels.side_stream import tensors_in
from gradwire.ranks.echo import EchoGroup
from gradwire.state.state import State
from gradwire.types import Slot

SIZE = 100_000


def opened(device):
    state = State(Config("dgc", density=0.01, dense_below=0, momentum=0.9))
    slot = Slot("w", (SIZE,), (1,), torch.float32, numel=SIZE)
    state.open([slot], torch.device(device), EchoGroup(2, on_stream=device == "cuda"))
    return state


def step(state, gradient):
    state.begin()
    state.process(state.bundles[0], [gradient])


def test_everything_a_bundle_holds_is_found():
    state = opened("cpu")
    step(state, torch.randn(SIZE))
    bundle = state.bundles[0]
    bundle.pending.withheld = [(0, torch.zeros(3))]
    bundle.memory["m"] = torch.zeros(2)
    found = {id(tensor) for tensor in tensors_in(state.bundles)}
    pending = bundle.pending
    sent = pending.delivered.sparse
    wanted = [
        bundle.buffer,
        bundle.velocity,
        bundle.withheld[0][1],
        bundle.memory["m"],
        bundle.tally.sent,
    ]
    assert {id(t) for t in (*wanted, pending.ok, sent.indices, sent.values)} <= found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_a_checkpoint_brought_outlives_the_step_that_drops_it():
    side = torch.cuda.Stream()
    first, second = torch.randn(2, SIZE, device="cuda")
    whole = opened("cuda")
    step(whole, first)
    resumed = opened("cuda")
    resumed.load_state_dict(whole.state_dict())
    step(whole, second)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(1 << 28)
        step(resumed, second)
    lengths = [SIZE // 100, SIZE, SIZE + 1, 1]
    junk = [torch.full((n,), 7.0, device="cuda") for n in lengths for _ in range(32)]
    torch.cuda.synchronize()
    assert len(junk) == 128
    assert torch.equal(resumed.residual("w"), whole.residual("w"))
