"""Accelerate: the wrong object, the wrong order of calls, several models."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.integrate import trainers


def prepared():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Linear(100, 100)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def refuses(rank):
    from gradwire.integrate.accelerate import attach

    with trainers.launched(rank):
        accelerator, model, _ = prepared()
        other = prepared()[0]
        bare = DistributedDataParallel(nn.Linear(2, 2))
        plain = nn.Linear(2, 2)
        plain._is_accelerate_prepared = True
        return [
            trainers.refusal(attach, model, accelerator),
            trainers.refusal(attach, accelerator, model.module),
            trainers.refusal(attach, accelerator, bare),
            trainers.refusal(attach, accelerator, plain),
            trainers.refusal(attach, other, model),
            trainers.refusal(attach, accelerator, model, density=7),
        ]


def test_wrong_objects_are_refused(ranks):
    for texts in ranks.run(2, refuses):
        swapped, inner, bare, plain, other, density = texts
        assert swapped.startswith("AttachError: attach needs an Accelerator and a model, got Distr")
        assert "Linear is not prepared: call model = accelerator.prepare(model) first" in inner
        assert "DistributedDataParallel is not prepared" in bare
        assert "made a Linear of the model, attach needs DistributedDataParallel" in plain
        assert "prepared by another Accelerator: attach with that one" in other
        assert density.startswith("ConfigError: density must be in")


def alone(rank):
    from gradwire.integrate.accelerate import attach

    with trainers.launched(rank):
        accelerator, model, _ = prepared()
        return trainers.refusal(attach, accelerator, model)


def test_one_process_is_refused(ranks):
    assert "one process here" in ranks.run(1, alone)[0]


def orders(rank, folder):
    """load_state on the wrong side of attach, both ways round."""
    from gradwire.integrate.accelerate import attach

    with trainers.launched(rank):
        accelerator, *_ = prepared()
        accelerator.save_state(f"{folder}/dense")
        accelerator, model, _ = prepared()
        wire = attach(accelerator, model, density=0.01)
        late = trainers.refusal(accelerator.load_state, f"{folder}/dense")
        model(torch.randn(4, 100)).sum().backward()
        accelerator.save_state(f"{folder}/sparse")
        wire.close()
        accelerator, *_ = prepared()
        early = trainers.refusal(accelerator.load_state, f"{folder}/sparse")
        return late, early


def test_wrong_order_is_refused(ranks, tmp_path):
    for late, early in ranks.run(2, orders, str(tmp_path)):
        assert late.startswith("StateError")
        assert "Call load_state before attach" in late
        assert "custom checkpoints" in early


def pair(rank, folder):
    """Two models, each with a wire: their parts go to folders of their own and come back."""
    from accelerate import Accelerator

    from gradwire.integrate.accelerate import attach

    with trainers.launched(rank):
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", enabled=False)
        torch.manual_seed(0)
        models = accelerator.prepare(nn.Linear(100, 100), nn.Linear(50, 50))
        wires = [attach(accelerator, m, density=0.01, dense_below=0) for m in models]
        for model, width in zip(models, (100, 50), strict=True):
            model(torch.randn(4, width)).sum().backward()
        norms = [wire.stats().residual_norm for wire in wires]
        accelerator.save_state(folder)
        for model, width in zip(models, (100, 50), strict=True):
            model(torch.randn(4, width)).sum().backward()
        accelerator.load_state(folder)
        again = [wire.stats().residual_norm for wire in wires]
        for wire in wires:
            wire.close()
        return norms, again, [wire.scaler is accelerator.scaler for wire in wires]


def test_two_models(ranks, tmp_path):
    for norms, again, scaled in ranks.run(2, pair, str(tmp_path)):
        assert norms == again
        assert min(norms) > 0
        assert all(scaled), "Accelerate's scaler is passed on"
    assert {"gradwire", "gradwire_1"} <= {p.name for p in tmp_path.iterdir()}
