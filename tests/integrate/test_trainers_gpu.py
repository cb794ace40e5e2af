"""The trainers' examples on CUDA: two NCCL ranks that share one GPU."""

import pytest
import torch

from gradwire.errors import VersionError
from gradwire.integrate import versions
from tests.integrate.test_trainers import check_example

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", ["lightning_trainer", "accelerate_loop", "transformers_trainer"])
def test_example_sends_less_and_resumes_bit_equal(nccl, tmp_path, name):
    for package in (name.partition("_")[0], "accelerate"):
        try:
            versions.require(package)
        except VersionError as error:
            pytest.skip(str(error))
    check_example(nccl, tmp_path, name)
