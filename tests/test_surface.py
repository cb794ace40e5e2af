"""The public surface is small, and importing it is lean."""

import subprocess
import sys

import gradwire

PUBLIC = {
    "Config", "Sparse", "State", "VirtualCluster", "__version__", "attach", "average", "compress",
    "ddp_hook", "load", "local_steps", "plan", "save",
}  # fmt: skip


def test_public_names_are_pinned():
    assert set(gradwire.__all__) == PUBLIC
    assert all(hasattr(gradwire, name) for name in PUBLIC)
    assert callable(gradwire.compress)


def test_import_is_lean():
    """No Triton, no CUDA context, no command line, no logging set up."""
    code = """
import logging, sys
import torch
before = set(sys.modules)
import gradwire
new = {m.partition(".")[0] for m in set(sys.modules) - before}
for heavy in ("triton", "typer", "rich", "matplotlib", "tensorboard", "mlxtend", "numba",
              "lightning", "accelerate", "transformers"):
    assert heavy not in new, heavy
assert not torch.cuda.is_initialized()
assert not logging.getLogger("gradwire").handlers and not logging.root.handlers
"""
    subprocess.run([sys.executable, "-c", code], check=True)
