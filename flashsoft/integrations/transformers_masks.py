"""Masks of transformers as values: what its mask functions say, read off and handed to each layer unbuilt.

transformers composes a mask of functions of (batch, head, query, key), which its own backends evaluate at every
position. Those that its factories make are read back here, by the code that they run and what they close over; any
other function goes to `sdpa_mask`, which builds a boolean tensor. So does what torch.compile traces, which has no
closures to look into, except for causal masks and padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import MODEL_MAPPING
from transformers import masking_utils as made
from transformers.utils.import_utils import is_tracing

from ..masks import All, Causal, Mask, Padding, Segments, Window

MaskFunction = Callable[..., Any]

_any = torch.zeros(1, 1, dtype=torch.long)
AND = made.and_masks(made.causal_mask_function).__code__
WINDOW = made.sliding_window_overlay(1).__code__
WINDOW_BOTH_SIDES = made.sliding_window_bidirectional_overlay(1).__code__
PACKED = made.packed_sequence_mask_function(_any).__code__
REMAPPED = (  # since 5.23
    made.remap_positions_for_packed_sequence(made.causal_mask_function, _any).__code__
    if hasattr(made, "remap_positions_for_packed_sequence")
    else None
)


@dataclass(frozen=True, eq=False)
class ModelMask(All):
    """A mask on its way through a model, which asks it for its shape; (B, 1, Sq, Sk), as if it were built.

    `generate` makes masks ahead of a pass where a cache is static. A model asks for a mask of what it was given then,
    and gets the same back.
    """

    shape: tuple[int, int, int, int]
    ndim: ClassVar[int] = 4

    def contiguous(self) -> ModelMask:
        return self

    def to(self, *args: Any, **kwargs: Any) -> ModelMask:
        """On another device, for a model whose layers lie on several."""
        return ModelMask(tuple(_moved(part, *args, **kwargs) for part in self._parts()), self.shape)


def _moved(part: Mask | Tensor, *args: Any, **kwargs: Any) -> Mask | Tensor:
    if isinstance(part, Segments):
        query_ids, key_ids = part.pair
        return Segments((query_ids.to(*args, **kwargs), key_ids.to(*args, **kwargs)))
    if isinstance(part, Padding):
        return Padding(part.keys.to(*args, **kwargs))
    return part


def online_softmax_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = made.causal_mask_function,
    attention_mask: Tensor | ModelMask | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> ModelMask | Tensor | None:
    """The mask of a forward pass, as transformers asks for it.

    Args:
        batch_size, q_length, kv_length: B, Sq and Sk.
        q_offset, kv_offset: query i stands at i + q_offset, key j at j + kv_offset. A static cache has a tensor here.
        mask_function: of positions; True = takes part.
        attention_mask: boolean (B, positions), True = a token, False = padding; or a mask made before.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether the mask need not be a tensor.
        options: for `sdpa_mask`.

    Returns:
        None where layers know by themselves (all keys, or those up to each query's index), a `ModelMask`, or a boolean
        tensor (B, 1, Sq, Sk).

    Raises:
        ValueError: for a model whose layers compute attention by themselves, and would take no mask for no causality.
    """
    if isinstance(attention_mask, ModelMask):
        return attention_mask
    if not is_tracing():
        kind: Any = type(options.get("config"))
        _check_that_layers_ask(kind)
    offset = None if isinstance(q_offset, Tensor) or options.get("use_vmap") else q_offset - kv_offset
    parts = None if offset is None else _read(mask_function, q_length, kv_length, offset)
    if parts is not None and offset is not None:
        causal = any(isinstance(part, Causal) for part in parts)
        packed = any(isinstance(part, Segments) for part in parts)  # transformers then forbids is_causal, not values
        if packed or (allow_is_causal_skip if causal else allow_is_bidirectional_skip):
            if attention_mask is not None:
                keep = made.prepare_padding_mask(attention_mask, kv_length, kv_offset)
                parts = (*parts, Padding(keep[:, kv_offset : kv_offset + kv_length]))
            needed = tuple(part for part in parts if _hides(part, q_length, kv_length, offset))
            known = all(isinstance(part, Causal) and offset == 0 for part in needed)
            return None if known else ModelMask(needed, (batch_size, 1, q_length, kv_length))
    return made.sdpa_mask(  # type: ignore[no-any-return]
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **options,
    )


@cache
def _check_that_layers_ask(config: Any) -> None:
    """That the model of a config calls the attention that is registered; code from elsewhere is not known here."""
    model = MODEL_MAPPING.get(config, None)
    for one in model if isinstance(model, tuple | list) else (model,):
        if one is not None and not one._can_set_attn_implementation():
            raise ValueError(f"attn_implementation must be another: {one.__name__} only knows attention of its own")


def _read(function: MaskFunction, Sq: int, Sk: int, offset: int, *, in_packed: bool = False) -> tuple[Mask, ...] | None:
    """The same as values that all hold, query i standing `offset` keys after key i; None for what cannot be read."""
    align = "lower_right" if offset == Sk - Sq else offset
    if function is made.causal_mask_function:
        return (Causal(align),)
    if function is made.bidirectional_mask_function:
        return ()
    if is_tracing():  # where functions made in the trace have no code to look at
        return None
    code = _code(function)
    inside = {} if code is None else _closure(function)
    if code is AND:
        functions = inside["mask_functions"]
        in_packed = in_packed or any(_code(one) is PACKED for one in functions)
        read = [_read(one, Sq, Sk, offset, in_packed=in_packed) for one in functions]
        return None if None in read else tuple(part for parts in read if parts is not None for part in parts)
    if code is WINDOW:
        return (Window(inside["sliding_window"] - 1, None, align),)
    if code is WINDOW_BOTH_SIDES:
        return (Window(inside["sliding_window"], inside["sliding_window"], align),)
    if code is PACKED and offset == 0:
        return (Segments(inside["packed_sequence_mask"]),)
    if in_packed and code is not None and code is REMAPPED:
        # to positions in the own sequence, which are as far apart as the tokens
        return _read(inside["mask_function"], Sq, Sk, offset)
    return None


def _code(function: MaskFunction) -> CodeType | None:
    return getattr(function, "__code__", None)


def _closure(function: Any) -> dict[str, Any]:
    return dict(
        zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ()), strict=True)
    )


def _hides(part: Mask, Sq: int, Sk: int, offset: int) -> bool:
    """Whether some query does not see some key."""
    if isinstance(part, Causal):
        return Sq > 1 or offset < Sk - 1
    if isinstance(part, Window):
        before = part.left is not None and Sq - 1 + offset > part.left
        return before or (part.right is not None and Sk - 1 - offset > part.right)
    if isinstance(part, Padding):  # one read of the device a forward pass, as transformers' own masks do
        return is_tracing(part.keys) or not bool(part.keys.all())
    return True
