"""Small sharded models and loops for the tests of the FSDP2 adapter: 2 replicas x 2 shards."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from tests.law.cases import violation


class Block(nn.Module):
    """Odd shapes: 31 rows over 2 shards are 16 and 15, a scalar's shard is 1 and 0."""

    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 31)
        self.down = nn.Linear(31, width)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x + self.gain * self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """About 3,500 entries in three units: two blocks and the root."""

    def __init__(self, width=22):
        super().__init__()
        self.first = nn.Linear(13, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.last = nn.Linear(width, 5)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def mesh(device="cpu", replicas=2):
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def sharded(net, axis, **kw):
    """fully_shard on every block and on the root."""
    for block in net.blocks:
        fully_shard(block, mesh=axis, **kw)
    return fully_shard(net, mesh=axis, **kw)


def model(seed=0, device="cpu", dtype=torch.float32):
    torch.manual_seed(seed)
    return Net().to(device, dtype)


def wrapped(axes=None, seed=0, dtype=torch.float32, shard=None, **fields):
    """A sharded model and the wire on it; without `axes` on 2 x 2 ranks."""
    axes = axes or mesh()
    net = sharded(model(seed, axes.device_type, dtype), axes["shard"], **(shard or {}))
    fields = {"density": 0.02, "dense_below": 0, **fields}
    return net, gradwire.attach(net, replicate_group=axes["replicate"].get_group(), **fields)


def data(step, device="cpu", dtype=torch.float32, rank=None):
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 13, generator=generator).to(device, dtype)


def loss(net, x):
    return net(x).float().square().mean()


def train(net, steps, start=0, optimizer=None, dtype=torch.float32):
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    device = next(net.parameters()).device
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss(net, data(step, device, dtype)).backward()
        optimizer.step()
    return optimizer


def flat(net):
    """This rank's shards."""
    with torch.no_grad():
        return torch.cat([p.to_local().reshape(-1).float() for p in net.parameters()])


def gradients(net):
    with torch.no_grad():
        return {n: p.grad.to_local().clone() for n, p in trainable(net)}


def residuals(net, wire):
    return {name: wire.residual(name) for name, _ in trainable(net)}


def trainable(net):
    return [(name, p) for name, p in net.named_parameters() if p.requires_grad]


def spied(wire, change=None):
    """The flat shards that reach the wire, by parameter, summed since the last clear().

    `change(unit, flat)` may spoil a flat shard first; what is not finite does not count.
    """
    seen = {}
    hook = wire.engine.hook

    def spy(unit, shard):
        if change is not None:
            change(unit, shard)
        for name, part in unit.split(shard).items():
            part = torch.where(torch.isfinite(part), part.float(), 0)
            seen[name] = seen.get(name, 0) + part
        hook(unit, shard)

    wire.engine.hook = spy
    return seen


def joined(tensors):
    """All parameters as one flat fp32 vector, in the order of their names."""
    return torch.cat([tensors[name].reshape(-1).float() for name in sorted(tensors)]).cpu()


def same_shard(results):
    """The results of the replicas, shard by shard."""
    return [results[0::2], results[1::2]]


def check_law(results):
    for replicas in same_shard(results):
        for parts in zip(*(rows for rows, _, _ in replicas), strict=True):
            us, updates, kept = zip(*parts, strict=True)
            assert torch.equal(*updates)
            assert violation(us, updates[0], kept) <= 8
            assert all(float(part.norm()) > 0 for part in (*us, updates[0], *kept))
        assert torch.equal(replicas[0][1], replicas[1][1]), "replicas differ"
    for _, _, stats in results:
        assert stats["bytes_sent"] < stats["bytes_dense"] / 4
        assert stats["steps"] == 4
