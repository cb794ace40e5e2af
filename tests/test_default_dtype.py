"""torch.set_default_dtype is the user's: it moves no bit of what the library computes."""

import ast
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradwire
from gradwire.accumulate.schedule import entry_count
from tests.exchange.cases import allowed, options, owned_after
from tests.law.cases import NOTHING, gradients, violation

PACKAGE = Path(gradwire.__file__).parent
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range"),
    *("scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
    *("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window"),
}
"""Of torch; what `torch.*_like` and `tensor.new_*` make is like the tensor they are given."""


def is_number(node):
    if isinstance(node, ast.UnaryOp):
        return is_number(node.operand)
    if isinstance(node, ast.Attribute):
        return node.attr in ("inf", "nan", "pi")
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("float", "int")
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def unnamed(text, name="it"):
    """The calls of torch whose result is of the default dtype, or may be for other arguments."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        what = node.func
        if not isinstance(what.value, ast.Name) or what.value.id != "torch":
            continue
        named = any(keyword.arg == "dtype" for keyword in node.keywords)
        numbers = what.attr == "where" and len(node.args) > 1 and all(map(is_number, node.args[1:]))
        if numbers or (what.attr in FACTORIES and not named):
            found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    return found


def test_every_factory_call_names_its_dtype():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 200
    found = [
        line
        for path in files
        for line in unnamed(path.read_text(), path.relative_to(PACKAGE.parent))
    ]
    assert not found, "name the dtype:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("torch.zeros(3)", 1),
        ("torch.zeros(3, dtype=torch.float32)", 0),
        ("torch.zeros_like(x)", 0),
        ("x.new_zeros(3)", 0),
        ("torch.tensor(torch.ones(2), dtype=torch.int64)", 1),
        ("torch.where(ok, 0.0, float('nan'))", 1),
        ("torch.where(ok, -1, math.inf)", 1),
        ("torch.where(ok, x, 0.0)", 0),
        ("torch.where(ok)", 0),
    ],
)
def test_the_walk_sees(text, count):
    assert len(unnamed(text)) == count


CASES = [
    *((method, exchange, values, {}) for method, exchange, values in allowed() if values == "fp32"),
    *(("topk", e, v, {}) for _, e, v in allowed(("topk",)) if v != "fp32"),
    *(("topk", "allgather", v, {"rounding": "stochastic"}) for v in ("bf16", "int8", "int4")),
    ("topk", "gtopk", "int8", {"rounding": "stochastic"}),
    ("topk", "gtopk", "fp32", {"merge": "paper"}),
    ("topk", "oktopk", "fp32", {"refresh": 2}),
    ("randk", "allgather", "fp32", {"unbiased": True}),
    ("gaussiank", "allgather", "fp32", {"variant": "paper"}),
    ("threshold", "allgather", "fp32", {"value": 0.5}),
    ("topk", "allgather", "fp32", {"momentum": 0.9, "clip": 1.0}),
]
WORLD, SIZE, DENSITY = 3, 997, 0.05
KINDS = ("heavy", "layers", "correlated")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def given(request):
    """One gradient a worker, step by step; made before anything is set."""
    generator = torch.Generator().manual_seed(7)
    return [gradients(kind, WORLD, SIZE, request.param, generator) for kind in KINDS]


def run(default, steps, method, exchange, values, more):
    """All updates and residuals, and the largest error of the law, with that default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        sketch = options(exchange, SIZE, entry_count(DENSITY, SIZE))
        fields = {"exchange": exchange, "values": values, "density": DENSITY, **sketch, **more}
        cluster = gradwire.VirtualCluster(WORLD, method=method, **fields)
        out, error, before_step = [], 0.0, NOTHING
        old = [torch.zeros_like(g, dtype=torch.float32) for g in steps[0]]
        for gradient in steps:
            update = cluster.average(gradient).clone()
            new = [cluster.residual(rank) for rank in range(WORLD)]
            u = [g.float() + kept for g, kept in zip(gradient, old, strict=True)]
            after = owned_after(cluster._states, SIZE)
            error = max(error, violation(u, update, new, before_step, after))
            out += [update, *new]
            old, before_step = new, after
        return out, error
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("method", "exchange", "values", "more"), CASES, ids=str)
def test_the_default_dtype_moves_no_bit(given, method, exchange, values, more):
    case = method, exchange, values, more
    expected, error = run(torch.float32, given, *case)
    if not {"momentum", "merge", "unbiased"} & {*more}:  # where more or less than u is delivered
        assert error <= 4
    for default in (torch.bfloat16, torch.float64):
        found, _ = run(default, given, *case)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype == theirs.dtype, default
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), default


class Watch(TorchDispatchMode):
    """Notes what the library computes from whole numbers in the default dtype."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        said = any(isinstance(leaf, torch.dtype) for leaf in leaves)
        # Padding and filling take a number as float, and compute nothing with it.
        fills = any(word in str(function) for word in ("pad", "fill"))
        if said or fills or any(tensor.is_floating_point() for tensor in tensors):
            return out
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        floats = any(isinstance(leaf, float) for leaf in leaves)
        if floats or any(tensor.is_floating_point() for tensor in made):
            place = self._place()
            if place:
                self.found.add(f"{place}: {function}")
        return out

    def _place(self):
        """Where in the library, unless a test asked for it."""
        frame = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                return f"{path.relative_to(PACKAGE.parent)}:{frame.f_lineno}"
            if path.is_relative_to(Path(__file__).parent) and path != Path(__file__):
                return ""
            frame = frame.f_back
        return ""


FIRST = {method: case for case in reversed(CASES) for method in case[:1]}
WATCHED = [c for c in CASES if c[0] == "topk" or c[3] or c in FIRST.values()]
"""Every method once, and every exchange and encoding: an operation is of one of these."""


def test_no_operation_asks_for_the_default_dtype(given, monkeypatch):
    """Also where the bits happen to agree: a count times 1.05 does, while counts are small."""
    watch, process = Watch(), gradwire.State.process

    def watched(self, *args):
        with watch:  # a mode is one thread's, and each worker has its own
            return process(self, *args)

    monkeypatch.setattr(gradwire.State, "process", watched)
    # Encodings see u, which is fp32 whatever the gradients are.
    is_fp32 = given[0][0].dtype == torch.float32
    for case in [c for c in WATCHED if is_fp32 or c[2] == "fp32"]:
        run(torch.float32, given, *case)
    assert not watch.found, "\n".join(sorted(watch.found))
