"""Where the Triton kernels run in tests: on a GPU, or on the CPU through Triton's interpreter.

Import this before anything that imports Triton: it reads the environment only once.
"""

import os
import sys

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"

if not ON_GPU:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported before its interpreter could be switched on")
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU; the interpreter ran the small sizes")


def same(a, b):
    """Equal in every bit but those of a NaN."""
    return a.shape == b.shape and torch.equal(
        torch.nan_to_num(a.float(), nan=7e7), torch.nan_to_num(b.float(), nan=7e7)
    )
