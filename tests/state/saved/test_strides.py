"""A checkpoint is loaded by a model of another memory format: every entry finds its place."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import StateError

FORMATS = (torch.contiguous_format, torch.channels_last)
FIELDS = {
    "sparse": {},
    "all of it": {"method": "dense", "exchange": "dense-bf16"},
    "rounded": {"dtype": torch.bfloat16},
    "masked": {"momentum": 0.9},
    "held": {"find_unused_parameters": True},
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.other = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
        self.last = nn.Conv2d(8, 6, 3)

    def forward(self, x, both):
        return self.last(self.first(x) + (self.other(x) if both else 0))


def wrapped(memory_format, find_unused_parameters=False, dtype=torch.float32, **fields):
    torch.manual_seed(0)
    net = Net().to(dtype, memory_format=memory_format)
    ddp = DistributedDataParallel(net, find_unused_parameters=find_unused_parameters)
    return ddp, gradwire.attach(ddp, density=0.05, dense_below=0, **fields)


def train(ddp, rank, steps, leaves_out):
    dtype = next(ddp.parameters()).dtype
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        images = torch.randn(2, 3, 8, 8, generator=generator).to(dtype)
        ddp(images, not leaves_out or step == 0).float().square().mean().backward()


def kept(wire, skipped):
    """Return the residuals that the next step finds, after a skipped step and after a taken one."""
    if skipped:
        wire.skip_step()
    names = [slot.name for slot in wire.slots]
    out = [wire.residual(name) for name in names]
    if wire.config.momentum:
        for name in names:
            bundle, slot = wire.home(name)
            out.append(bundle.view(bundle.momentum(wire.was_skipped()), slot).clone())
    return out


def differences(rank, world, folder, before, after, fields, skipped):
    ddp, wire = wrapped(before, **fields)
    train(ddp, rank, 3, "find_unused_parameters" in fields)
    gradwire.save(wire, folder)
    wanted = kept(wire, skipped)
    _, other = wrapped(after, **fields)
    gradwire.load(other, folder)
    found = kept(other, skipped)
    stride = other.home("first.weight")[1].stride
    wire.close()
    other.close()
    pairs = zip(found, wanted, strict=True)
    return sum(not torch.equal(a, b) for a, b in pairs), sum(bool(w.any()) for w in wanted), stride


@pytest.mark.parametrize("skipped", [False, True], ids=["taken", "skipped"])
@pytest.mark.parametrize("kind", FIELDS)
def test_the_residual_does_not_depend_on_the_memory_format(ranks, tmp_path, kind, skipped):
    """Each kind goes into either format: one way after a step, and back after a skipped one."""
    before, after = FORMATS[::-1] if skipped else FORMATS
    wanted = torch.empty(8, 3, 3, 3, memory_format=after).stride()
    for found in ranks.run(2, differences, 2, tmp_path, before, after, FIELDS[kind], skipped):
        differ, filled, stride = found
        assert differ == 0
        assert filled or kind == "all of it"
        assert stride == wanted


def saved_by_two(rank, folder):
    ddp, wire = wrapped(torch.channels_last)
    train(ddp, rank, 3, False)
    gradwire.save(wire, folder)
    mean = {}
    for slot in wire.slots:
        mean[slot.name] = wire.group.all_reduce(wire.residual(slot.name).contiguous()) / 2
    wire.close()
    return mean


def loaded_by_three(rank, folder):
    _, wire = wrapped(torch.contiguous_format)
    gradwire.load(wire, folder)
    found = {slot.name: wire.residual(slot.name) for slot in wire.slots}
    wire.close()
    return found


def test_another_number_of_ranks_gets_the_mean(ranks, tmp_path):
    wanted, _ = ranks.run(2, saved_by_two, tmp_path)
    for found in ranks.run(3, loaded_by_three, tmp_path):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[name])


@pytest.mark.parametrize("stride", [[2], [2**40], [-1], [1, 1], "1", [1.0]], ids=str)
def test_strides_that_cannot_be_are_refused(stride):
    cluster = gradwire.VirtualCluster(1, density=0.1, dense_below=0)
    cluster.average([torch.randn(15)])
    saved = cluster.state_dict()
    (name,) = saved["workers"][0]["strides"]
    saved["workers"][0]["strides"] = {name: stride}
    with pytest.raises(StateError, match=f"the strides of '{name}' cannot be"):
        cluster.load_state_dict(saved)
