"""Repairs to Triton's CPU interpreter, applied once, on import; nothing where kernels are compiled.

The stock interpreter holds bfloat16 and float8 tensors as raw integer bits. Silently, arithmetic, reductions
and dot products work on those bits, and casts to them truncate (bfloat16) or lose the carry into the exponent
(float8). Triton 3.6 with NumPy >= 2.4 refuses every loop whose bound is known only at run time.

After `repair`:

- casts to bfloat16 and float8 round to nearest even; float8 saturates, as on the GPU;
- arithmetic and reductions of such values are done in float32, each result rounded back;
- a fused multiply-add rounds once;
- a dot product of such values is that of the rounded inputs, accumulated in the accumulator's dtype;
- loop bounds may be tensors, and `input_precision` may be "bf16x3" or "bf16x6" (computed as float32);
- infinities and NaN come about without NumPy's warnings;
- calls inside a kernel take microseconds, not milliseconds.

Each repair wraps the method that it finds and is left out where a version of Triton has none by that name.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

# dtypes that the interpreter keeps as integer bits, by Triton's name
_PACKED = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
_FLOATS = {"fp16", "fp32", "fp64", *_PACKED}
_BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)
_MARK = "_flashsoft_repaired"


def repair() -> bool:
    """Repairs the interpreter, once; True if kernels are interpreted in this process."""
    if not triton.knobs.runtime.interpret:
        return False
    from triton.runtime import interpreter

    if not getattr(interpreter, _MARK, False):
        builder = interpreter.InterpreterBuilder
        _repair_casts(builder)
        _repair_arithmetic(builder)
        for operation in (interpreter.ReduceOps, interpreter.ScanOps):
            _repair_reduction(operation)
        _repair_bounds(interpreter)
        _patch_once(interpreter.InterpretedFunction)
        _wrap(interpreter.GridExecutor, "__call__", _silent)
        _allow_precisions(interpreter)
        setattr(interpreter, _MARK, True)
    return True


# ---- values ------------------------------------------------------------------------------------------------


def _is_packed(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and dtype.scalar.name in _PACKED


def _unpack(handle: Any) -> Any:
    """A handle on float32 values for one on packed bits; any other as it is."""
    if not _is_packed(handle):
        return handle
    bits = torch.from_numpy(np.array(handle.data, copy=True, order="C"))
    return type(handle)(bits.view(_PACKED[handle.dtype.scalar.name]).float().numpy(), tl.float32)


def _bits(values: Any, dtype: Any) -> np.ndarray:
    """The bits of floating values rounded to nearest even in a packed dtype."""
    wide = torch.from_numpy(np.array(values, dtype=np.float32, copy=True, order="C"))
    target = _PACKED[dtype.name]
    if dtype.primitive_bitwidth == 8:
        largest = torch.finfo(target).max
        return wide.clamp(-largest, largest).to(target).view(torch.uint8).numpy()  # clamp keeps NaN
    return wide.to(target).view(torch.int16).numpy().view(np.uint16)


# ---- repairs -----------------------------------------------------------------------------------------------


def _wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the method `name` of a class, if it has one, by `make` of it."""
    method = getattr(owner, name, None)
    if method is not None:
        setattr(owner, name, make(method))


def _repair_casts(builder: Any) -> None:
    def cast(stock: Callable[..., Any]) -> Callable[..., Any]:
        def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
            src, dst = _unpack(src), dst_type.scalar
            if dst.name in _PACKED:
                return type(src)(_bits(src.data, dst), dst)
            return src if src.dtype.scalar == dst else stock(self, src, dst_type)

        return cast_impl

    def convert(stock: Callable[..., Any]) -> Callable[..., Any]:
        def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
            names = {src.dtype.scalar.name, dst_type.scalar.name}
            if names <= _FLOATS and names & _PACKED.keys():
                return self.cast_impl(src, dst_type)
            return stock(self, src, dst_type, rounding_mode)

        return create_fp_to_fp

    _wrap(builder, "cast_impl", cast)
    _wrap(builder, "create_fp_to_fp", convert)
    if not hasattr(builder, "get_bf16"):
        from triton.runtime.interpreter import TensorHandle

        builder.get_bf16 = lambda self, value: TensorHandle(_bits([value], tl.bfloat16), tl.bfloat16)


def _repair_arithmetic(builder: Any) -> None:
    def widened(operands: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
            def operation(self: Any, *args: Any) -> Any:
                packed = next((value for value in args[:operands] if _is_packed(value)), None)
                # bit patterns are what a bitwise operation wants, and a choice copies
                if packed is None or any(op is np.where or op in _BITWISE for op in args[operands:]):
                    return stock(self, *args)
                out = stock(self, *(_unpack(value) for value in args[:operands]), *args[operands:])
                if out.data.dtype == np.bool_:
                    return out
                return type(out)(_bits(out.data, packed.dtype.scalar), packed.dtype.scalar)

            return operation

        return wrap

    def once(stock: Callable[..., Any]) -> Callable[..., Any]:
        def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
            if x.data.dtype != np.float32:
                return stock(self, x, y, z)
            exact = x.data.astype(np.float64) * y.data + z.data  # the product is exact in float64
            return type(x)(exact.astype(np.float32), x.dtype.scalar)

        return create_fma

    _wrap(builder, "create_fma", once)
    for name, operands in (("unary_op", 1), ("binary_op", 2), ("ternary_op", 3), ("create_fma", 3)):
        _wrap(builder, name, widened(operands))

    def dot(stock: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, a, b, *rest: stock(self, _unpack(a), _unpack(b), *rest)

    _wrap(builder, "create_dot", dot)


def _repair_reduction(operation: Any) -> None:
    """Reductions and scans of packed tensors run on float32 tensors, and their results are rounded back."""

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        def apply_impl(self: Any, tensors: Any) -> Any:
            tensors = tuple(tensors)
            if not any(_is_packed(tensor) for tensor in tensors):
                return stock(self, tensors)
            out = stock(self, tuple(unpacked(self, tensor) for tensor in tensors))
            if not isinstance(out, list | tuple):
                return repacked(out, tensors[0].dtype)
            # beside the values there may be indices, which have no input of their own
            dtypes = [tensor.dtype for tensor in tensors] + [None] * (len(out) - len(tensors))
            return [repacked(tensor, dtype) for tensor, dtype in zip(out, dtypes, strict=True)]

        return apply_impl

    def unpacked(self: Any, tensor: Any) -> Any:
        return self.to_tensor(_unpack(tensor.handle).data, tl.float32) if _is_packed(tensor) else tensor

    def repacked(tensor: Any, dtype: Any) -> Any:
        if dtype is None or dtype.name not in _PACKED or tensor.dtype.name != "fp32":
            return tensor
        bits = _bits(tensor.handle.data, dtype)
        kind = tl.block_type(dtype, list(bits.shape)) if tensor.type.is_block() else dtype
        return tl.core.tensor(type(tensor.handle)(bits, dtype), kind)

    _wrap(operation, "apply_impl", wrap)


def _repair_bounds(interpreter: Any) -> None:
    """A tensor of one entry, whatever its dimensions, serves as a loop bound and as a condition."""

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
            stock(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))
            scope.set_attr(
                tensor,
                "__bool__",
                lambda self: self.handle.data.size != 1 or bool(np.asarray(self.handle.data).item()),
            )

        return _patch_lang_tensor

    _wrap(interpreter, "_patch_lang_tensor", wrap)


def _patch_once(function: Any) -> None:
    """A call inside a kernel finds Triton's language patched, and does not spend 5 ms on doing it again.

    A launch patches what kernels see of the language, `triton.language`; Triton's own functions see other modules of
    it, which their first call patches for good.
    """
    patched: set[str] = set()

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            home = self.fn.__module__
            if home.startswith("triton.") and home not in patched:
                patched.add(home)
                return stock(self, *args, **kwargs)
            return self.rewrite()(*args, **kwargs)

        return __call__ if hasattr(function, "rewrite") else stock

    _wrap(function, "__call__", wrap)


def _silent(stock: Callable[..., Any]) -> Callable[..., Any]:
    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of maxima over NaN only
            return stock(self, *args, **kwargs)

    return launch


def _allow_precisions(interpreter: Any) -> None:
    options = interpreter.InterpreterOptions()
    allowed = (*options.allowed_dot_input_precisions, "bf16x3", "bf16x6")
    options = dataclasses.replace(options, allowed_dot_input_precisions=tuple(dict.fromkeys(allowed)))

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any) -> None:
            stock(self)
            self.options = options

        return __init__

    _wrap(interpreter.InterpreterBuilder, "__init__", wrap)
    interpreter.interpreter_builder.options = options


repair()
