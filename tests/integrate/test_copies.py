"""Copies of a model with a wire: they are plain DDP, and the original goes on."""

import contextlib
import copy
import io
import logging

import pytest
import torch

import gradwire
from tests.integrate import models

KINDS = "attach", "unused parameters", "ddp_hook"


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_plain_ddp(ranks, kind):
    for error, original, untouched in ranks.run(2, copied_three_ways, kind):
        assert error < 1e-6
        assert torch.equal(original, untouched)


def copied_three_ways(rank, kind):
    """The copies' error against dense, and the original after its next steps, with and without."""
    untouched, _ = with_wire(kind)
    models.train(untouched, rank, 4)
    ddp, wire = with_wire(kind)
    optimizer = models.train(ddp, rank, 2)
    copies = [copy.deepcopy(ddp), torch.optim.swa_utils.AveragedModel(ddp).module]
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    dense = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(ddp.module))
    worst = 0.0
    models.train(dense, rank, 2, start=2)
    for module in copies:
        models.train(module, rank, 2, start=2)
        worst = max(worst, float((models.flat(module) - models.flat(dense)).abs().max()))
        assert wire is None or wire.steps == 2
        # A copy takes a wire of its own.
        with gradwire_on(module):
            models.train(module, rank, 1)
    models.train(ddp, rank, 2, start=2, optimizer=optimizer)
    assert wire is None or wire.steps == 4
    return worst, models.flat(ddp), models.flat(untouched)


def with_wire(kind):
    if kind != "ddp_hook":
        return models.wrapped(ddp={"find_unused_parameters": kind == "unused parameters"})
    ddp = torch.nn.parallel.DistributedDataParallel(models.model())
    ddp.register_comm_hook(gradwire.State(density=0.01, dense_below=0), gradwire.ddp_hook)
    return ddp, None


def gradwire_on(module):
    return contextlib.closing(gradwire.attach(module, density=0.01))


def lines_of(rank, kind):
    """What is logged when a model is copied that has taken a step."""
    ddp, _wire = with_wire(kind)
    models.train(ddp, rank, 1)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("gradwire")
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        copy.deepcopy(ddp)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return lines


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_says_in_one_line_that_it_begins_anew(ranks, kind):
    for lines in ranks.run(2, lines_of, kind):
        (line,) = lines
        assert line.endswith("the residual stays with the original")
