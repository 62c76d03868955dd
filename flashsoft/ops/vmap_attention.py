"""The batching rules of attention: the new dimension is folded into the batch, or each of its entries runs alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..terms import Gradients, Terms
from .registry import batch, call, front

_INPUTS = {
    "attention": ("query", "key", "value"),
    "attention_backward": ("dout", "dlse", "query", "key", "value", "out", "lse"),
}
_WHOLE = ("sink", "factor")  # they stand for every entry of a batch
_SHARED = ("keep", "bias", "slopes", "query_ids", "key_ids")  # a batch size of 1 stands for every entry


def batch_attention() -> None:
    """Registers them."""
    for name in _INPUTS:
        batch(name, _rule(name))


def _rule(name: str) -> Any:
    fields = (*_INPUTS[name], *Terms._fields)
    needs = {f"need_{field}" for field in Gradients._fields if field not in _INPUTS[name]}
    names = (*fields, *((f"need_{field}" for field in Gradients._fields) if name != "attention" else ()), "backend")

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        given = dict(zip(names, args, strict=True))
        dims = dict(zip(names, in_dims, strict=True))
        # dropout counts entries, packed sequences are one, and the gradient of a term may be that of an entry
        alone = given["seed"] is not None or given["cu_q"] is not None or any(given.get(need) for need in needs)
        if alone or any(dims[field] is not None for field in _WHOLE):
            return _one_by_one(name, info.batch_size, in_dims, args)
        B = given["query"].shape[0 if dims["query"] is None else int(dims["query"] == 0)]
        result = call(name, *(_folded(field, given[field], dims[field], info.batch_size, B) for field in names))
        dims_out = tuple(None if t.ndim == 1 else 0 for t in result)  # of a placeholder, none
        return tuple(t if t.ndim == 1 else t.unflatten(0, (info.batch_size, B)) for t in result), dims_out

    return rule


def _folded(name: str, value: Any, dim: int | None, size: int, B: int) -> Any:
    """(V, B, ...) -> (V * B, ...)."""
    if not isinstance(value, Tensor) or name in _WHOLE:
        return value
    if dim is None and name in _SHARED and value.shape[0] == 1:
        return value
    batched = front(value, dim, size)
    return batched.expand(-1, B, *batched.shape[2:]).flatten(0, 1)


def _one_by_one(name: str, size: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    if size == 0:
        raise RuntimeError(f"{name} with such options has no batching rule for 0 entries: leave them out of torch.vmap")
    entries = [
        call(name, *(arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)))
        for i in range(size)
    ]
    return tuple(torch.stack(parts) for parts in zip(*entries, strict=True)), (0,) * len(entries[0])
