"""Which scan may settle the last step itself."""

from dataclasses import replace

import torch

from gradwire.accumulate import bundle as module
from gradwire.accumulate.bundle import Bundle
from gradwire.kernels.last_selection import LastSelection
from gradwire.types import Entries, Slot, Sparse

NO = torch.zeros((), dtype=torch.bool)


def prepared(monkeypatch):
    """A bundle whose last winner, entry 3, left just as it was; and what its scans are told."""
    slot = Slot("w", (128,), (1,), torch.float32, 0, 128)
    bundle = Bundle([slot], torch.device("cpu"), rank=0, index=0, dense=False)
    bundle.buffer[3] = 5.0
    indices, values = torch.tensor([3], dtype=torch.int32), torch.tensor([5.0])
    bundle._last_selection = LastSelection(torch.device("cpu"))
    bundle._edge.remember(indices, values)
    count = torch.tensor(1, dtype=torch.int32)
    bundle.deliver(Entries(Sparse(indices, values, count, 128)), torch.tensor(True))
    told = []
    monkeypatch.setattr(
        module.kernels, "scan", lambda *args: (told.append(args[5:]), torch.tensor(True))[1]
    )
    return bundle, slot, told


def test_a_scan_that_looks_at_every_entry_settles(monkeypatch):
    bundle, _, told = prepared(monkeypatch)
    bundle.accumulate([(0, torch.zeros(128))], 64, NO)
    assert told == [(bundle._edge, NO)]
    assert bundle.pending is None
    assert float(bundle.u[3]) == 5


def test_a_scan_that_may_pass_over_some_does_not(monkeypatch):
    bundle, _, told = prepared(monkeypatch)
    bundle.accumulate([(64, torch.zeros(64))], 0, NO)
    assert told == [(None, None)]
    assert float(bundle.u[3]) == 0


def test_nor_where_parameters_are_unused_or_other_values_left(monkeypatch):
    bundle, slot, told = prepared(monkeypatch)
    bundle.accumulate([], 64, NO, unused=[slot])
    other, _, also = prepared(monkeypatch)
    sparse = other.pending.delivered.sparse
    other.pending.delivered = Entries(replace(sparse, values=sparse.values.clone()))
    other.accumulate([(0, torch.zeros(128))], 64, NO)
    assert [skipped for _, skipped in told + also] == [None, None]
    assert float(bundle.u[3]) == float(other.u[3]) == 0
