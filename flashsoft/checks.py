"""Every rule an argument must obey, and the sentence that says so when it does not.

No rule reads a value on the device, except the content checks that FLASHSOFT_CHECK=1 turns on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import env, masks

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_HEAD_DIM, MAX_VALUE_DIM = 576, 512
MASKS = (masks.Causal, masks.Window, masks.Segments, masks.Padding)
NO_MASK = masks.MaskSpec()
MAX_INT = 1 << 1023  # the largest power of two that is a float too


def tensor(name: str, value: Any, ndim: int | None = None, layout: str = "") -> None:
    """`value` is a floating tensor, of `ndim` dimensions laid out as `layout` if that is given."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {value.dtype}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {value.layout}")
    if ndim is not None and value.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions {layout}, got shape {tuple(value.shape)}")


def dimension(x: Tensor, dim: Any, name: str = "x") -> int:
    """`dim` counted from the front."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {type(dim).__name__}")
    ndim = x.ndim
    if ndim == 0:
        raise ValueError(f"{name} must have at least one dimension, got a scalar tensor")
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim must be in [{-ndim}, {ndim - 1}] for {name} of shape {tuple(x.shape)}, got {dim}")
    return dim % ndim


def output_dtype(dtype: Any, name: str = "dtype") -> None:
    """`dtype` is None or one that results can have."""
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {dtype}")


def on_device(name: str, value: Tensor, other: str, device: torch.device) -> None:
    """`value` lies on `device`, that of argument `other`."""
    if value.device != device:
        raise ValueError(f"{name} must be on {device}, the device of {other}, got {value.device}")


def broadcastable(name: str, value: Tensor, shape: Sequence[int], what: str) -> None:
    """`value` can be expanded to `shape`."""
    sizes = list(value.shape)
    fits = len(sizes) <= len(shape) and all(
        size == 1 or size == full for size, full in zip(reversed(sizes), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"{name} must broadcast to {what} {tuple(shape)}, got shape {tuple(sizes)}")


def mask(value: Any, shape: Sequence[int], other: str, device: torch.device) -> masks.MaskSpec:
    """A mask for scores of `shape`, resolved. Integer and float masks are refused: what is added is a bias."""
    if value is None:
        return NO_MASK
    if not isinstance(value, masks.Mask | Tensor):
        raise TypeError(f"mask must be a boolean tensor or a mask such as Causal(), got {type(value).__name__}")
    Sq, Sk = shape[-2:] if len(shape) > 1 else (0, 0)  # without a second dimension there are only tensors
    for term in masks.terms(value):
        if isinstance(term, Tensor):
            if term.dtype != torch.bool:
                raise TypeError(f"mask must be boolean (True = takes part), got {term.dtype}")
            on_device("mask", term, other, device)
            broadcastable("mask", term, shape, "the scores")
        elif not isinstance(term, MASKS):
            names = ", ".join(kind.__name__ for kind in MASKS)
            raise TypeError(f"mask must be made of {names} and boolean tensors, got {type(term).__name__}")
        elif len(shape) < 2:
            raise ValueError(f"mask {term!r} needs scores (..., Sq, Sk), got shape {tuple(shape)}")
        elif isinstance(term, masks.Segments):
            for ids, length, what in zip(term.pair, (Sq, Sk), ("queries", "keys"), strict=True):
                _by_entry("Segments: ids", ids, shape, (length,), what, other, device)
        elif isinstance(term, masks.Padding):
            sizes = (Sk,) if term.keys.dtype == torch.bool else ()
            _by_entry("Padding: keys", term.keys, shape, sizes, "keys", other, device)
            if (
                not sizes
                and _contents_can_be_read(term.keys)
                and not bool(((term.keys >= 0) & (term.keys <= Sk)).all())
            ):
                raise ValueError(f"Padding: keys must be 0 to {Sk} in every entry, got {term.keys.tolist()}")
    return masks.resolve(value, Sq, Sk, len(shape))


def _by_entry(
    name: str,
    value: Tensor,
    shape: Sequence[int],
    sizes: tuple[int, ...],
    what: str,
    other: str,
    device: torch.device,
) -> None:
    """`value` is (B, *sizes), or (1, *sizes) if it has sizes, for scores (B, ..., Sq, Sk), or (Sq, Sk) with B = 1."""
    on_device(name, value, other, device)
    B = shape[0] if len(shape) > 2 else 1
    if (value.shape[0] != B and not (sizes and value.shape[0] == 1)) or tuple(value.shape[1:]) != sizes:
        full = f"{(B, *sizes)} for {B} entries" + (f" of {sizes[0]} {what}" if sizes else "")
        raise ValueError(f"{name} must be {full}, got shape {tuple(value.shape)}")


def backend(value: Any) -> str:
    """The name of a backend for an operator, "" to have one chosen. Which names there are, `dispatch` says."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"backend must be a name or None, got {type(value).__name__}")
    return value or ""


def number(name: str, value: Any, *, positive: bool = False) -> float:
    """A finite number, above 0 if so asked."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    # not math.isfinite, which torch.compile(dynamic=True) cannot trace on a symbolic float
    too_large = isinstance(value, int) and abs(value) > MAX_INT
    if too_large or not -math.inf < value < math.inf or (positive and value <= 0):
        raise ValueError(f"{name} must be finite{' and > 0' if positive else ''}, got {value}")
    return float(value)


def size(name: str, value: Any, least: int = 1) -> int:
    """An integer that is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}")
    return value


def per_row(name: str, value: Tensor, x: Tensor, dim: int) -> Tensor:
    """A tensor of one entry a row of x as a view of x.ndim dimensions, of size 1 along `dim`.

    It may have x's dimensions with size 1 at `dim`, or lack that dimension, or be one entry for all.
    """
    on_device(name, value, "x", x.device)
    rows = [size for axis, size in enumerate(x.shape) if axis != dim]
    keepdim = [*rows[:dim], 1, *rows[dim:]]
    if value.ndim == x.ndim:
        broadcastable(name, value, keepdim, "the rows of x,")
        return value
    if value.ndim != len(rows) and value.numel() == 1:
        return value.reshape((1,) * x.ndim)
    if value.ndim != len(rows):
        raise ValueError(
            f"{name} must have x's {x.ndim} dimensions, or {len(rows)} without dim, got shape {tuple(value.shape)}"
        )
    broadcastable(name, value, rows, "the rows of x,")
    return value.unsqueeze(dim)


def _contents_can_be_read(value: Tensor) -> bool:
    """FLASHSOFT_CHECK is set, and there are contents: not while tracing, under torch.func or on the meta device."""
    traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return env.CHECK and not traced and value.device.type != "meta"


def temperature(value: Any, x: Tensor, dim: int, *, zero: bool = False) -> float | Tensor:
    """A number > 0 (or 0, if so said), or one a row."""
    if not isinstance(value, Tensor):
        if zero and not isinstance(value, bool) and value == 0:
            return 0.0
        return number("temperature", value, positive=True)
    tensor("temperature", value)
    if _contents_can_be_read(value) and not bool((value > 0).all()):
        raise ValueError("temperature must be > 0 in every row, got an entry that is not")
    return per_row("temperature", value, x, dim)


def top_k(value: Any, x: Tensor, dim: int) -> int | Tensor | None:
    """None, an integer >= 1, or one a row; an integer of the row's length and more chooses nothing: None."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        if value.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"top_k must be an int, or an int32 or int64 tensor, got {value.dtype}")
        if _contents_can_be_read(value) and not bool((value >= 1).all()):
            raise ValueError("top_k must be >= 1 in every row, got an entry that is not")
        return per_row("top_k", value, x, dim)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"top_k must be an int, or an int32 or int64 tensor, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"top_k must be >= 1, got {value}")
    return None if value >= x.shape[dim] else value


def share(name: str, value: Any, x: Tensor, dim: int, *, zero: bool) -> float | Tensor | None:
    """None, a number from 0 (itself only if so said) to 1, or one a row; a number that keeps all is None."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        tensor(name, value)
        if _contents_can_be_read(value) and not bool(((value >= 0) & (value <= 1)).all()):
            raise ValueError(f"{name} must be from 0 to 1 in every row, got an entry that is not")
        return per_row(name, value, x, dim)
    share = number(name, value)
    if not (0.0 < share <= 1.0 or (zero and share == 0.0)):
        raise ValueError(f"{name} must be {'>=' if zero else '>'} 0 and <= 1, got {value}")
    return None if share == (0.0 if zero else 1.0) else share


def bias(value: Any, shape: Sequence[int], other: str, device: torch.device) -> None:
    """None or a floating tensor that broadcasts to the scores."""
    if value is None:
        return
    tensor("bias", value)
    on_device("bias", value, other, device)
    broadcastable("bias", value, shape, "the scores")


def slopes(value: Tensor, heads: int, batch: int, what: str, device: torch.device) -> None:
    """ALiBi's slopes, (Hq,) or (B, Hq)."""
    tensor("ALiBi: slopes", value)
    on_device("ALiBi: slopes", value, "query", device)
    if value.shape[-1] != heads or (value.ndim == 2 and value.shape[0] not in (1, batch)):
        raise ValueError(
            f"ALiBi: slopes must be ({heads},) or ({batch}, {heads}) for {batch} {what} of {heads} heads, "
            f"got shape {tuple(value.shape)}"
        )


def scale(value: Any, D: int, heads: int, device: torch.device) -> float | Tensor:
    """A finite number, 1 / sqrt(D) for None, or a floating tensor (), (1,) or (Hq,)."""
    if not isinstance(value, Tensor):
        return D**-0.5 if value is None else number("scale", value)
    tensor("scale", value)
    on_device("scale", value, "query", device)
    if tuple(value.shape) not in ((), (1,), (heads,)):
        raise ValueError(f"scale must be a number, or a tensor (), (1,) or ({heads},), got shape {tuple(value.shape)}")
    return value


def sink(value: Any, heads: int, device: torch.device) -> None:
    """None, or a floating tensor of an entry a head."""
    if value is None:
        return
    tensor("sink", value)
    on_device("sink", value, "query", device)
    if tuple(value.shape) != (heads,):
        raise ValueError(f"sink must have an entry for each of query's {heads} heads, got shape {tuple(value.shape)}")


def dropout_p(value: Any) -> float:
    """A share of weights, 0 to 1."""
    share = number("dropout_p", value)
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"dropout_p must be 0 to 1, got {value}")
    return share


def generator(value: Any, device: torch.device) -> None:
    """None, or a generator of the device that numbers are drawn on."""
    if value is None:
        return
    if not isinstance(value, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(value).__name__}")
    if value.device.type != device.type:
        raise ValueError(f"generator must be one of {device}, the device of logits, got {value.device}")


def attention(query: Any, key: Any, value: Any) -> None:
    """query (B, Hq, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, Dv) fit together."""
    tensor("query", query, 4, "(B, Hq, Sq, D)")
    tensor("key", key, 4, "(B, Hkv, Sk, D)")
    tensor("value", value, 4, "(B, Hkv, Sk, Dv)")
    device, dtype = query.device, query.dtype
    (B, Hq, _, D), (B_key, Hkv, Sk, D_key), (B_value, heads, length, Dv) = query.shape, key.shape, value.shape
    for name, other, batch in (("key", key, B_key), ("value", value, B_value)):
        on_device(name, other, "query", device)
        if other.dtype != dtype:
            raise TypeError(f"{name} must have query's dtype {dtype}, got {other.dtype}")
        if batch != B:
            raise ValueError(f"{name} must have query's batch size {B}, got shape {tuple(other.shape)}")
    if heads != Hkv or length != Sk:
        raise ValueError(f"value must have key's heads and length {(Hkv, Sk)}, got shape {tuple(value.shape)}")
    if D_key != D:
        raise ValueError(f"key must have query's head size {D}, got shape {tuple(key.shape)}")
    for name, size, most in (("query", D, MAX_HEAD_DIM), ("value", Dv, MAX_VALUE_DIM)):
        if not 1 <= size <= most:
            raise ValueError(f"{name} must have a head size (last dimension) of 1 to {most}, got {size}")
    if (Hkv == 0 and Hq != 0) or (Hkv != 0 and Hq % Hkv != 0):
        raise ValueError(f"query must have a multiple of key's {Hkv} heads, got {Hq} (shape {tuple(query.shape)})")


def packed(query: Any, key: Any, value: Any, ends: dict[str, Any], longest: dict[str, Any]) -> None:
    """query (Tq, Hq, D), key (Tk, Hkv, D) and value (Tk, Hkv, Dv) fit together and are cut by cu_seqlens_q and _k."""
    tensor("query", query, 3, "(Tq, Hq, D)")
    tensor("key", key, 3, "(Tk, Hkv, D)")
    tensor("value", value, 3, "(Tk, Hkv, Dv)")
    attention(*(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)))
    sizes = dict(zip(longest, [size(name, most, least=0) for name, most in longest.items()], strict=True))
    for name, given in ends.items():
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be an int32 tensor, got {type(given).__name__}")
        if given.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {given.dtype}")
        if given.ndim != 1 or given.shape[0] == 0:
            raise ValueError(f"{name} must be (sequences + 1,), got shape {tuple(given.shape)}")
        on_device(name, given, "query", query.device)
    (q_name, q_ends), (k_name, k_ends) = ends.items()
    if q_ends.shape != k_ends.shape:
        raise ValueError(f"{k_name} must be as long as {q_name}, {tuple(q_ends.shape)}, got {tuple(k_ends.shape)}")
    for (name, given), (limit, most), total in zip(ends.items(), sizes.items(), (query, key), strict=True):
        if _contents_can_be_read(given):
            starts, length = given.tolist(), total.shape[0]
            if starts[0] != 0 or starts != sorted(starts) or starts[-1] > length:
                raise ValueError(f"{name} must ascend from 0 to {length} at most, got {starts}")
            found = max((b - a for a, b in itertools.pairwise(starts)), default=0)
            if found > most:
                raise ValueError(f"{limit} must be at least {found}, the longest in {name}, got {most}")


def packed_mask(value: Any) -> tuple[int | None, int | None, bool]:
    """A band for each packed sequence: lo, hi, and whether they count from the last query and key."""
    if value is None:
        return None, None, False
    known = isinstance(value, masks.Mask | Tensor)
    aligns = set()
    for term in masks.terms(value) if known else (value,):
        if not isinstance(term, masks.Causal | masks.Window):
            raise TypeError(
                "mask must be made of Causal and Window for packed sequences (with attention, Segments packs them and "
                f"joins any mask), got {type(term).__name__}"
            )
        aligns.add(term.align == "lower_right")
    if len(aligns) > 1:
        raise ValueError(f"mask must be aligned lower right in all its parts or in none, got {value!r}")
    spec = masks.resolve(value, 0, 0)
    return spec.lo, spec.hi, aligns == {True}


def linear_loss(hidden: Any, weight: Any, bias: Any) -> None:
    """hidden (..., H), weight (N, H) and bias (N,) fit together, as in a linear layer."""
    tensor("hidden", hidden)
    tensor("weight", weight, 2, "(N, H)")
    if hidden.ndim == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden must be (..., {weight.shape[1]}), as wide as weight, got shape {tuple(hidden.shape)}")
    given = [("weight", weight)]
    if bias is not None:
        tensor("bias", bias, 1, "(N,)")
        if bias.shape[0] != weight.shape[0]:
            raise ValueError(f"bias must have weight's {weight.shape[0]} classes, got shape {tuple(bias.shape)}")
        given.append(("bias", bias))
    for name, value in given:
        on_device(name, value, "hidden", hidden.device)
        if value.dtype != hidden.dtype:
            raise TypeError(f"{name} must have hidden's dtype {hidden.dtype}, got {value.dtype}")


REDUCTIONS = ("none", "mean", "sum")


def loss_options(
    ignore_index: Any, label_smoothing: Any, z_loss: Any, softcap: Any, reduction: Any
) -> tuple[int, float, float, float | None]:
    """The options of a cross entropy: an int, a number in [0, 1], one >= 0, one > 0 or None, and a name."""
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index must be an int, got {type(ignore_index).__name__}")
    smoothing, z = number("label_smoothing", label_smoothing), number("z_loss", z_loss)
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if z < 0.0:
        raise ValueError(f"z_loss must be >= 0, got {z_loss}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    return ignore_index, smoothing, z, None if softcap is None else number("softcap", softcap, positive=True)


def target(value: Any, rows: Sequence[int], what: str, other: str, device: torch.device) -> None:
    """Labels for rows of this shape, which are `what`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"target must be a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target must be class indices, int64 or int32, got {value.dtype}")
    if tuple(value.shape) != tuple(rows):
        raise ValueError(f"target must have {what}, {tuple(rows)}, got {tuple(value.shape)}")
    on_device("target", value, other, device)


def labels(target: Tensor, classes: int, ignore_index: int) -> None:
    """Every label is a class or ignore_index, where contents are checked."""
    if not _contents_can_be_read(target):
        return
    bad = (target != ignore_index) & ((target < 0) | (target >= classes))
    if bool(bad.any()):
        raise ValueError(
            f"target must be in [0, {classes - 1}] or ignore_index {ignore_index}, got {int(target[bad][0])}"
        )


def class_weight(name: str, value: Any, classes: int, other: str, device: torch.device) -> None:
    """None, or a weight a class, which takes no gradient."""
    if value is None:
        return
    tensor(name, value)
    if tuple(value.shape) != (classes,):
        raise ValueError(f"{name} must have a weight for each of {classes} classes, got shape {tuple(value.shape)}")
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} must not require a gradient, which it is not given")
    on_device(name, value, other, device)


def group(value: Any) -> tuple[int, int]:
    """This process's rank in a group of torch.distributed, and how many there are."""
    distributed = torch.distributed
    if not distributed.is_available() or not isinstance(value, distributed.ProcessGroup):
        raise TypeError(
            f"group must be a torch.distributed.ProcessGroup this process is in, got {type(value).__name__}"
        )
    return distributed.get_rank(value), distributed.get_world_size(value)


def overwritable(logits: Tensor, reduction: str, group: Any) -> None:
    """The gradient may be written over the logits."""
    if reduction == "none":
        raise ValueError("reduction must be mean or sum with inplace_backward, got 'none'")
    if group is not None:
        raise ValueError("inplace_backward must be False with a group, whose ranks share rows, got True")
    base = logits if logits._base is None else logits._base
    if any(t.is_leaf and t.requires_grad for t in (logits, base)):
        raise ValueError("logits must not be a leaf that requires grad, or a view of one, with inplace_backward")
    if any(size > 1 and stride == 0 for size, stride in zip(logits.shape, logits.stride(), strict=True)):
        raise ValueError("logits must not be expanded with inplace_backward: entries share memory")


def partial_results(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> None:
    """Two pairs of out (..., Dv) and lse (...) of the same shape."""
    for name, value in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        tensor(name, value)
        on_device(name, value, "out_a", out_a.device)
    if out_a.ndim == 0:
        raise ValueError("out_a must be (..., Dv), got a scalar tensor")
    if out_b.shape != out_a.shape or out_b.dtype != out_a.dtype:
        a, b = (f"{tuple(out.shape)} of {out.dtype}" for out in (out_a, out_b))
        raise ValueError(f"out_b must be like out_a, {a}, got {b}")
    for name, value in (("lse_a", lse_a), ("lse_b", lse_b)):
        if value.dtype not in (torch.float32, torch.float64) or value.dtype != lse_a.dtype:
            raise TypeError(f"{name} must be float32, or float64 like the other, got {value.dtype}")
        if value.shape != out_a.shape[:-1]:
            raise ValueError(f"{name} must have out_a's shape without the last dimension, got {tuple(value.shape)}")
