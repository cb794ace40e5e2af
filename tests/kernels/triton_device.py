"""Where the Triton kernels run in tests: on a GPU, or on the CPU through Triton's interpreter.

Import this before anything that imports Triton: it reads the environment only once.
"""

import os
import sys
from types import FunctionType

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"

if not ON_GPU:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported before its interpreter could be switched on")
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

if not ON_GPU:
    import triton.language as tl
    from triton.runtime import interpreter

    # At each call of a function the interpreter changes triton.language anew, always alike: here
    # that is done once. For each sum of integers it also looks for an overflow, and then says
    # nothing of it, as debug is off. Together they are two thirds of its time.
    interpreter._patch_lang(FunctionType((lambda: 0).__code__, {"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )

gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU; the interpreter ran the small sizes")


def same(a, b):
    """Equal in every bit but those of a NaN."""
    return a.shape == b.shape and torch.equal(
        torch.nan_to_num(a.float(), nan=7e7), torch.nan_to_num(b.float(), nan=7e7)
    )
