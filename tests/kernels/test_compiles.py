"""Every kernel compiles for an H100 without one: Triton's interpreter checks no types."""

import os
import pickle
import subprocess
import sys

from tests.kernels.triton_device import DEVICE  # isort: skip

from gradwire.encode import Encoding
from gradwire.kernels.triton import unpack
from gradwire.kernels.triton.launch import Launcher
from tests.kernels.specialisation import bind
from tests.kernels.test_launch import CALLS, written

COMPILER = """
import importlib, pickle, sys

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler.compiler import ASTSource

target = GPUTarget("cuda", 90, 32)
backend = CUDABackend(target)
for entry in pickle.load(sys.stdin.buffer):
    name, module, kernel, signature, constants, alignments, options = entry
    function = getattr(importlib.import_module(module), kernel)
    attributes = {at: backend.parse_attr(text) for at, text in alignments.items()}
    source = ASTSource(function, signature, constants, attributes)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options(options)
    code = backend.get_codegen_implementation(options)
    try:
        source.make_ir(target, options, code, backend.get_module_map(), context)
    except Exception as error:
        print(f"{name}, {kernel}: {error}")
    else:
        print("compiled")
"""


def read(encoding):
    unpack.unpack_triton(written(encoding).unsqueeze(0), 100, 8, encoding)


ENCODINGS = [
    Encoding("two-bit", "packed"),
    Encoding("int4", "bitmap"),
    Encoding("int8", "local16"),
    Encoding("fp16", "int32"),
]
MORE = {f"write {e}": lambda _, e=e: written(e) for e in ENCODINGS} | {
    f"read {e}": lambda _, e=e: read(e) for e in ENCODINGS
}


def launches_of(call, monkeypatch):
    """The launcher and arguments of each launch, which all take place too."""
    launches, launch = [], Launcher.__call__

    def noted(self, grid, on, *args):
        launches.append((self, args))
        return launch(self, grid, on, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Launcher, "__call__", noted)
        call(patch)
    return launches


def compilation(name, launcher, args):
    """All that Triton compiles a launch from, without a tensor."""
    kernel, names = launcher._kernel, launcher._kernel.arg_names
    bound, chosen = bind(kernel, args)
    constants = {
        n: bound[n] for n, part in zip(names, chosen, strict=True) if part[0] == "constexpr"
    }
    alignments = {
        (i,): text for i, (kind, text) in enumerate(chosen) if kind != "constexpr" and text
    }
    options = launcher._options | ({"launch_pdl": True} if launcher._overlap_launch else {})
    signature = dict(zip(names, [part[0] for part in chosen], strict=True))
    return name, kernel.fn.__module__, kernel.fn.__name__, signature, constants, alignments, options


def test_every_kernel_compiles(monkeypatch):
    found = {}
    for name, call in (CALLS | MORE).items():
        for launcher, args in launches_of(call, monkeypatch):
            args = (*args, True) if launcher._overlap_launch else args
            made = compilation(name, launcher, args)
            found.setdefault(str(made[1:]), made)
    assert len(found) > 30, DEVICE
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILER],
        input=pickle.dumps(list(found.values())),
        capture_output=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.stdout.decode().splitlines() == ["compiled"] * len(found), done.stderr.decode()
