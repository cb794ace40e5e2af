"""What all shards of a replica have to do together, done by one of them."""

import pytest
import torch

from gradwire.errors import ConfigError, ExchangeError
from tests.integrate.fsdp import models

CALLS = {
    "flush": lambda wire: wire.flush(),
    "skip_step": lambda wire: wire.skip_step(),
    "detach": lambda wire: wire.detach(),
    "follow_lr": lambda wire: wire.follow_lr(0.25),
}
SAYS = {
    "flush": "rank 1 has flush 0, rank 0 has 1",
    "skip_step": "rank 1 has skipped 0, rank 0 has 1",
    "detach": "rank 1 has flush 0, rank 0 has 1",
    "follow_lr": "rank 1 has learning_rate 0.0, rank 0 has 0.25",
}


def one_sided(rank, what):
    net, wire = models.wrapped(models.mesh(replicas=1), timeout=10.0)
    optimizer = models.train(net, 2)
    said = ""
    try:
        if rank == 0:
            CALLS[what](wire)
        models.train(net, 2, start=2, optimizer=optimizer)
    except ExchangeError as error:
        said = str(error)
    wire.close()
    return said


@pytest.mark.parametrize("what", CALLS)
def test_done_by_one_shard_only(ranks, what):
    for said in ranks.run(2, one_sided, what):
        assert f"shard exchange: {SAYS[what]}. All ranks must" in said


def scaler_of_one(rank):
    try:
        scaler = torch.amp.GradScaler("cpu") if rank == 0 else None
        _, wire = models.wrapped(models.mesh(replicas=1), scaler=scaler)
        wire.close()
    except ConfigError as error:
        return str(error)
    return ""


def test_a_scaler_on_one_shard_only(ranks):
    for said in ranks.run(2, scaler_of_one):
        assert "ranks differ in scaler: rank 1 has False, rank 0 has True" in said
