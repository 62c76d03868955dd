"""Of attention's arguments, and of partial results of it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from .. import masks
from .values import contents_can_be_read, number, on_device, size, tensor

MAX_HEAD_DIM, MAX_VALUE_DIM = 576, 512


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
    for name, width, most in (("query", D, MAX_HEAD_DIM), ("value", Dv, MAX_VALUE_DIM)):
        if not 1 <= width <= most:
            raise ValueError(f"{name} must have a head size (last dimension) of 1 to {most}, got {width}")
    if (Hkv == 0 and Hq != 0) or (Hkv != 0 and Hq % Hkv != 0):
        raise ValueError(f"query must have a multiple of key's {Hkv} heads, got {Hq} (shape {tuple(query.shape)})")


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


def dropout_p(value: Any, name: str = "dropout_p") -> float:
    """A share of weights, 0 to 1."""
    share = number(name, value)
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"{name} must be 0 to 1, got {value}")
    return share


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
        if contents_can_be_read(given):
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
