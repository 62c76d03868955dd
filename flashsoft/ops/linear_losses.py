"""The operators of cross entropy behind a linear layer, whose logits exist a chunk of rows at a time.

Where the sum of the losses is differentiated its gradients are computed in the forward, which is the only time that a
chunk's logits are there: they become their own gradient in place, and two products make the layer's of it. Losses of
single rows have factors of their own, which only the backward knows: it computes the logits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import dispatch
from ..reference.softmax import wide
from .losses import OP, times
from .registry import call, define, differentiate, not_twice


def _chunks(hidden: Tensor, weight: Tensor, chunk: int) -> Iterator[slice]:
    from ..tuning.chunks import chunk_rows  # not before it is needed

    rows = chunk or chunk_rows(hidden.shape[0], weight.shape[0], hidden.element_size(), hidden.device.type)
    for start in range(0, hidden.shape[0], rows):
        yield slice(start, min(start + rows, hidden.shape[0]))


class _Gradients:
    """Of hidden, weight and bias, as far as they are needed, from those of the logits of one chunk after another.

    That of weight is summed over few chunks in its own dtype (see tuning/chunks.py), over more in float32, and that of
    bias always in float32.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, bool, bool], chunks: int
    ) -> None:
        from ..tuning.chunks import ROUNDED_CHUNKS

        self.hidden, self.weight, self.bias = hidden, weight, bias
        exact = wide(weight.dtype)
        self.dhidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs[0] else None
        self.dweight: Tensor | None = None
        self.sums = None if not needs[1] else weight.dtype if chunks <= ROUNDED_CHUNKS else exact
        self.dbias = weight.new_zeros(weight.shape[0], dtype=exact) if needs[2] and bias is not None else None

    def add(self, rows: slice, dlogits: Tensor) -> None:
        hidden = self.hidden[rows]
        if self.dhidden is not None:
            torch.mm(dlogits, self.weight, out=self.dhidden[rows])
        if self.sums == self.weight.dtype and self.dweight is None:
            self.dweight = dlogits.mT @ hidden
        elif self.sums is not None:
            if self.dweight is None:
                self.dweight = self.weight.new_zeros(self.weight.shape, dtype=self.sums)
            _add_product(self.dweight, dlogits.mT, hidden)
        if self.dbias is not None:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """All three, empty where one is not needed."""
        none = self.hidden.new_empty(0)
        dhidden = none if self.dhidden is None else self.dhidden
        if self.dweight is not None:
            dweight = self.dweight.to(self.weight.dtype)
        else:  # not needed, or of no rows
            dweight = none.clone() if self.sums is None else torch.zeros_like(self.weight)
        dbias = none.clone() if self.dbias is None else self.dbias.to(self.weight.dtype)
        return dhidden, dweight, dbias


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in total's dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.device.type == "cuda" and torch.version.hip is None:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    elif a.device.type == "cpu":
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
    else:
        total += a @ b


def _fused(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    divisor: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    chunk: int,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    module = dispatch.choose(OP, hidden, backend)
    factor = None if divisor is None else divisor.reciprocal()
    chunks = list(_chunks(hidden, weight, chunk))
    gradients = _Gradients(hidden, weight, bias, (need_hidden, need_weight, need_bias), len(chunks))
    loss = hidden.new_zeros((), dtype=wide(hidden.dtype))
    for rows in chunks:
        logits = F.linear(hidden[rows], weight, bias)
        losses = module.cross_entropy_overwrite_forward(
            logits, target[rows], class_weight, factor, ignore_index, label_smoothing, z_loss, softcap
        )
        loss += losses.sum()
        gradients.add(rows, logits)
        del logits  # before the next chunk's are made
    return loss if divisor is None else loss / divisor, *gradients.result()


def _fused_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    need_hidden, need_weight, need_bias, _ = rest[-4:]
    loss = hidden.new_empty((), dtype=wide(hidden.dtype))
    return loss, *_gradients_fake(hidden, weight, bias, need_hidden, need_weight, need_bias)


def _gradients_fake(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, need_hidden: bool, need_weight: bool, need_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty(hidden.shape if need_hidden else 0),
        weight.new_empty(weight.shape if need_weight else 0),
        weight.new_empty(weight.shape[0] if need_bias and bias is not None else 0),
    )


def _rows(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    chunk: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    module = dispatch.choose(OP, hidden, backend)
    loss, kept = (hidden.new_empty(target.shape, dtype=wide(hidden.dtype)) for _ in range(2))
    for rows in _chunks(hidden, weight, chunk):
        logits = F.linear(hidden[rows], weight, bias)
        loss[rows], kept[rows], _, _ = module.cross_entropy_forward(
            logits, target[rows], class_weight, None, weight.shape[0], ignore_index, label_smoothing, z_loss, softcap
        )
        del logits
    return loss, kept


def _rows_fake(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    loss, kept = (hidden.new_empty(target.shape, dtype=wide(hidden.dtype)) for _ in range(2))
    return loss, kept


def _rows_backward(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    chunk: int,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    module, N = dispatch.choose(OP, hidden, backend), weight.shape[0]
    chunks = list(_chunks(hidden, weight, chunk))
    gradients = _Gradients(hidden, weight, bias, (need_hidden, need_weight, need_bias), len(chunks))
    for rows in chunks:
        logits = F.linear(hidden[rows], weight, bias)
        _, _, m, slope = module.cross_entropy_forward(
            logits, target[rows], class_weight, None, N, ignore_index, label_smoothing, z_loss, softcap
        )
        dlogits = module.cross_entropy_backward(
            dloss[rows], logits, target[rows], class_weight, m, slope, 0, N, ignore_index, label_smoothing, softcap
        )
        del logits
        gradients.add(rows, dlogits)
        del dlogits
    return gradients.result()


_LAYER = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, "
_OPTIONS = "SymInt ignore_index, float label_smoothing, float z_loss, float? softcap, SymInt chunk, "
_NEEDS = "bool need_hidden, bool need_weight, bool need_bias, "
FUSED, ROWS = "linear_cross_entropy", "linear_cross_entropy_rows"

define(
    f"{FUSED}({_LAYER}Tensor? divisor, {_OPTIONS}{_NEEDS}str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _fused,
    _fused_fake,
)
define(f"{ROWS}({_LAYER}{_OPTIONS}str backend) -> (Tensor, Tensor)", _rows, _rows_fake)
define(
    f"{ROWS}_backward(Tensor dloss, {_LAYER}{_OPTIONS}{_NEEDS}str backend) -> (Tensor, Tensor, Tensor)",
    _rows_backward,
    lambda dloss, hidden, weight, bias, *rest: _gradients_fake(hidden, weight, bias, *rest[-4:-1]),
)


def _save_fused(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *_, need_hidden, need_weight, need_bias, ctx.backend = inputs
    ctx.needs = need_hidden, need_weight, need_bias and inputs[2] is not None
    # the arguments only so that whoever differentiates a gradient again is told that this cannot be
    ctx.save_for_backward(*output[1:], *inputs[:3])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _fused_gradient(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    results: list[Tensor | None] = [None, None, None]
    if dloss is not None:
        saved = ctx.saved_tensors
        for i, needed in enumerate(ctx.needs):
            if needed:
                results[i] = times(saved[i], dloss, saved[3:], ctx.backend)
    return *results, *(None,) * 12


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.ignore_index, ctx.label_smoothing, ctx.z_loss, ctx.softcap, ctx.chunk, ctx.backend = inputs
    ctx.save_for_backward(*tensors)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _rows_gradient(ctx: Any, dloss: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    if dloss is None or not any(needs):
        return (None,) * 11
    options = ctx.ignore_index, ctx.label_smoothing, ctx.z_loss, ctx.softcap, ctx.chunk
    gradients = call(f"{ROWS}_backward", dloss, *ctx.saved_tensors, *options, *needs, ctx.backend)
    return *(g if need else None for g, need in zip(gradients, needs, strict=True)), *(None,) * 8


differentiate(FUSED, _save_fused, _fused_gradient)
differentiate(ROWS, _save_rows, _rows_gradient)
not_twice(ROWS, "torch.nn.functional.cross_entropy")
