"""CUDA runs the references while kernels compile, and changes only between bundles."""

import threading

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip

from gradwire.kernels import dispatch
from gradwire.kernels.dispatch import hold_kernels, on_references, one_version, release_kernels

assert DEVICE
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def op(monkeypatch):
    monkeypatch.setattr(dispatch, "has_kernels", lambda device: device.type == "cuda")
    return dispatch.versions(
        "reference", cpu="twin", triton="gradwire.kernels.dispatch.hold_kernels"
    )


def test_a_hold_takes_cuda_to_the_reference_and_back(op):
    assert op(CUDA) is hold_kernels
    first, second = hold_kernels(), hold_kernels()
    assert (op(CUDA), op(CPU)) == ("reference", "twin")
    assert not dispatch.uses_triton(CUDA)
    release_kernels(first)
    assert op(CUDA) == "reference"
    release_kernels(second)
    release_kernels(second)
    assert op(CUDA) is hold_kernels
    assert dispatch.uses_triton(CUDA)


def test_a_kernel_that_no_gpu_has_run_is_not_chosen(monkeypatch):
    monkeypatch.setattr(dispatch, "has_kernels", lambda device: device.type == "cuda")
    path = "gradwire.kernels.dispatch.hold_kernels"
    op = dispatch.versions("reference", cpu="twin", triton=path, unseen=True)
    assert (op(CUDA), op(CPU)) == ("reference", "twin")


def test_a_bundle_keeps_its_version_to_the_end(op):
    hold = hold_kernels()
    with one_version():
        release_kernels(hold)
        with one_version():
            assert op(CUDA) == "reference"
        assert op(CUDA) == "reference"
    assert op(CUDA) is hold_kernels
    with one_version():
        hold = hold_kernels()
        assert op(CUDA) is hold_kernels
    assert op(CUDA) == "reference"
    release_kernels(hold)


def test_threads_choose_for_themselves(op):
    seen = []
    hold = hold_kernels()
    with one_version():
        release_kernels(hold)
        # Begun while a bundle of another thread is on its way: on references as well, or not at
        # all; but never both within one bundle.
        thread = threading.Thread(target=lambda: seen.append((on_references(), op(CUDA))))
        thread.start()
        thread.join()
        assert on_references()
    assert seen == [(True, "reference")]
    assert not on_references()


def test_an_error_in_a_bundle_ends_its_hold(op):
    def fail(hold):
        with one_version():
            release_kernels(hold)
            raise ValueError("in a bundle")

    with pytest.raises(ValueError, match="in a bundle"):
        fail(hold_kernels())
    assert op(CUDA) is hold_kernels
