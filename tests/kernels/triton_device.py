"""Where the Triton kernels run in tests: on a GPU, or on the CPU through Triton's interpreter.

Import this before anything that imports Triton: it reads the environment only once.
"""

import math
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


def remember():
    """Types, shapes and constants, which are only read, are made once, not for each operation."""
    block, semantic = tl.core.block_type, interpreter.TritonSemantic
    np_dtype, make_block = interpreter._get_np_dtype, block.__init__
    unwrap, make_constant = tl.core._unwrap_if_constexpr, semantic.scalar_constant
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    np_dtypes, blocks, shapes, constants = {}, {}, {}, {}
    bare = {int, float, bool, type(None), tl.tensor}
    plain = {("int32", int), ("fp32", int), ("fp32", float)}

    def np_dtype_once(kind):
        if kind.name not in np_dtypes:
            np_dtypes[kind.name] = np_dtype(kind)
        return np_dtypes[kind.name]

    def block_once(self, element, shape):
        key = (element.name, *[unwrap_first(n) for n in shape])
        if element.is_ptr() or key not in blocks:
            make_block(self, element, shape)
            blocks[key] = vars(self)
        vars(self).update(blocks[key])

    def tensor_once(self, handle, kind):
        sizes = tuple(kind.shape) if kind.is_block() else ()
        if sizes not in shapes:
            shape = tl.core.tuple([tl.constexpr(n) for n in sizes])
            shapes[sizes] = tl.constexpr(math.prod(sizes)), shape
        self.numel, self.shape = shapes[sizes]
        self.handle, self.type, self.dtype = handle, kind, kind.scalar

    def constant_once(self, value, dtype):
        if dtype.is_int_unsigned():  # a shift may make it signed
            return make_constant(self, value, dtype)
        key = type(value), value, dtype.name
        if key not in constants:
            constants[key] = make_constant(self, value, dtype)
            constants[key].handle.data.setflags(write=False)
        return constants[key]

    def unwrap_first(value):
        if type(value) in bare:
            return value
        if isinstance(value, tl.constexpr):
            return value.value
        return unwrap(value) if isinstance(value, list | tuple | tl.core.tuple) else value

    def check_first(self, lhs, rhs, *args, **kw):
        """Two of one type need neither a cast nor a broadcast, and numpy broadcasts a scalar."""
        kind = lhs.dtype.name if isinstance(lhs, tl.tensor) else ""
        if kind in ("int1", "int32", "fp32"):
            if isinstance(rhs, tl.tensor):
                if lhs.type.name == rhs.type.name or (kind == rhs.type.name and kind != "int1"):
                    return lhs, rhs
            elif (kind, type(rhs)) in plain and -(2**31) <= rhs < 2**31:
                return lhs, self.scalar_constant(rhs, lhs.dtype)
        return check(self, lhs, rhs, *args, **kw)

    def broadcast_first(self, lhs, rhs):
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

    interpreter._get_np_dtype = np_dtype_once
    block.__init__, tl.tensor.__init__ = block_once, tensor_once
    tl.core._unwrap_if_constexpr = unwrap_first
    semantic.scalar_constant, semantic.binary_op_type_checking_impl = constant_once, check_first
    semantic.broadcast_impl_value = broadcast_first


def call_at_once(scope, name, member, builder, changes):
    """In place of Triton's: one call less for each of its functions."""
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def call(*args, **kw):
        kw["_semantic"] = semantic
        return function(*args, **kw)

    changes.set_attr(scope, name, call)


if not ON_GPU:
    import triton.language as tl
    from triton.runtime import interpreter

    # At each call of a function the interpreter changes triton.language anew, always alike: here
    # that is done once. For each sum of integers it also looks for an overflow, and then says
    # nothing of it, as debug is off. Together they are two thirds of its time.
    interpreter._patch_attr = call_at_once
    interpreter._patch_lang(FunctionType((lambda: 0).__code__, {"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    # Half of what was left.
    remember()

gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU; the interpreter ran the small sizes")


def same(a, b):
    """Equal in every bit but those of a NaN."""
    return a.shape == b.shape and torch.equal(
        torch.nan_to_num(a.float(), nan=7e7), torch.nan_to_num(b.float(), nan=7e7)
    )
