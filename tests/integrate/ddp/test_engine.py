"""The engine: DDP's buckets in, Futures out, and nobody waits for ever."""

import gc
import threading
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import AttachError, ExchangeError
from gradwire.integrate.ddp.engine import Engine, slot_of
from tests.integrate import models


class Bucket:
    """A bucket of DDP, as far as the engine asks."""

    def __init__(self, index, parameters, last):
        self._index, self._parameters, self._last = index, parameters, last
        self._buffer = torch.cat([p.grad.reshape(-1) for p in parameters])

    def index(self):
        return self._index

    def parameters(self):
        return self._parameters

    def buffer(self):
        return self._buffer

    def is_last(self):
        return self._last


def made(sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(n)) for n in sizes]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    return parameters


def two_buckets(parameters):
    return [Bucket(0, parameters[:2], False), Bucket(1, parameters[2:], True)]


def opened(parameters, **fields):
    fields = {"density": 0.1, "dense_below": 0, "bundle_mb": 25, **fields}
    state = gradwire.State(**fields)
    state.engine = Engine(state)
    state.engine.open(parameters)
    return state


def split_over_buckets(rank):
    parameters = made([300, 50, 70, 128])
    state = opened(parameters)
    first, second = two_buckets(parameters)
    answers = [state.engine.hook(first)]
    state.engine._thread.wait(lambda: None)
    early = answers[0].done()
    answers.append(state.engine.hook(second))
    got = torch.cat([answer.wait() for answer in answers])
    entered = torch.cat([p.grad for p in parameters])
    kept = torch.cat([state.residual(f"p{i}") for i in range(4)])
    bundles = len(state.bundles)
    state.close()
    return early, torch.equal(got + kept, entered), int(got.count_nonzero()), bundles


def test_a_bucket_is_answered_when_its_bundle_is_complete(ranks):
    early, law, sent, bundles = ranks.run(1, split_over_buckets)[0]
    assert bundles == 1
    assert not early, "the bundle waits for the second bucket"
    assert law
    assert sent == 55


def order_of_work(rank):
    parameters = made([64, 64, 64, 64])
    state = opened(parameters, bundle_mb=1e-6)
    threads, order = [], []
    real = state.replace

    def replace(bundle, pieces, unused=()):
        threads.append(threading.current_thread().name)
        order.append(bundle.index)
        real(bundle, pieces, unused)

    state.replace = replace
    answers = [state.engine.hook(bucket) for bucket in two_buckets(parameters)]
    [answer.wait() for answer in answers]
    state.close()
    return threads, order


def test_one_thread_does_the_work_in_the_order_of_the_buckets_and_the_hook_the_last(ranks):
    threads, order = ranks.run(1, order_of_work)[0]
    assert threads == ["gradwire"] * 2 + ["MainThread"] * 2
    assert order == sorted(order)
    assert len(order) == 4


def failing(rank):
    parameters = made([300, 50, 70, 128])
    state = opened(parameters)

    def broken(*_):
        raise ZeroDivisionError("on purpose")

    state.replace = broken
    said = []
    for bucket in two_buckets(parameters):
        said.append(state.engine.hook(bucket))
    errors = []
    for answer in said:
        try:
            answer.wait()
        except Exception as error:
            errors.append(str(error))
    try:
        state.engine.hook(two_buckets(parameters)[0]).wait()
    except Exception as error:
        errors.append(str(error))
    kind = type(state.engine.broken)
    state.close()
    return errors, kind


def test_an_error_answers_every_bucket_and_all_that_follow(ranks):
    errors, kind = ranks.run(1, failing)[0]
    assert len(errors) == 3
    assert all("rank 0, step 1, bundle 0 (p0 ...): on purpose" in text for text in errors)
    assert kind is ExchangeError


def unfinished(rank):
    parameters = made([300, 50, 70, 128])
    state = opened(parameters)
    state.engine.hook(two_buckets(parameters)[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answers = [state.engine.hook(bucket) for bucket in two_buckets(parameters)]
        got = torch.cat([answer.wait() for answer in answers])
    words = [str(w.message) for w in caught]
    entered = torch.cat([p.grad for p in parameters])
    kept = torch.cat([state.residual(f"p{i}") for i in range(4)])
    state.close()
    return words, torch.equal(got + kept, entered)


def test_a_backward_pass_that_did_not_finish_is_dropped_and_said(ranks):
    words, law = ranks.run(1, unfinished)[0]
    assert words == ["the last backward pass did not finish; its gradients are dropped"]
    assert law


def closed(rank):
    parameters = made([300, 50, 70, 128])
    state = opened(parameters)
    state.close()
    try:
        state.engine.hook(two_buckets(parameters)[0]).wait()
    except Exception as error:
        return str(error)
    return "nothing"


def test_after_close_every_bucket_is_told(ranks):
    assert "the wire was closed" in ranks.run(1, closed)[0]


def dropped(rank):
    ddp = DistributedDataParallel(models.model())
    wire = gradwire.attach(ddp, density=0.01)
    models.train(ddp, rank, 2)
    engine, thread = wire.engine, wire.engine._thread._thread
    gone = weakref.ref(wire)
    del wire, ddp
    gc.collect()  # DDP itself is in a cycle
    try:
        said = repr(engine._state)
    except ExchangeError as error:
        said = str(error)
    del engine
    gc.collect()
    thread.join(10)
    return gone() is None, said, thread.is_alive()


def test_an_engine_does_not_keep_its_wire_and_its_thread_ends_with_it(ranks):
    gone, said, alive = ranks.run(1, dropped)[0]
    assert gone
    assert said == "the wire is gone: keep what gradwire.attach returned"
    assert not alive


def nothing_to_do(rank):
    state = gradwire.State(density=0.1)
    try:
        Engine(state).open([])
    except AttachError as error:
        return str(error)
    return "nothing"


def test_a_model_without_parameters_is_refused(ranks):
    assert ranks.run(1, nothing_to_do)[0] == "the model has no parameter that needs a gradient"


def test_a_slot_is_the_parameter_without_a_place():
    parameter = nn.Parameter(torch.zeros(2, 3).to(torch.bfloat16))
    slot = slot_of(parameter, "w")
    assert (slot.name, slot.shape, slot.stride, slot.dtype) == (
        "w", (2, 3), (3, 1), torch.bfloat16,
    )  # fmt: skip
    assert (slot.offset, slot.numel) == (0, 6)


@pytest.mark.parametrize("world", [2])
def test_ranks_exchange_beside_the_backward_pass(ranks, world):
    results = ranks.run(world, beside, world)
    assert len({weights for weights, _ in results}) == 1
    assert all(steps == 4 for _, steps in results)


def beside(rank, world):
    ddp, wire = models.wrapped()
    models.train(ddp, rank, 4)
    assert dist.get_world_size(wire.group.process_group) == world
    weights, steps = models.flat(ddp).numpy().tobytes(), wire.steps
    wire.close()
    return weights, steps
