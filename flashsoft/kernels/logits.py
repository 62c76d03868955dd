"""Fused softmax of logits, and tokens drawn from it: scale, softcap, temperature, bias, mask, top-k, top-p, min-p.

A row that fits one tile is read once, stays on chip and is written once (several short rows a program); its bytes are
those of x, y, and of mask and bias where they are full. Of wider rows, those of which few scores are kept are read
once too (wide_selection.py). Otherwise x is read twice, the second time from L2 as far as it fits there: one launch
for the states of a row's parts, and one for y. A token instead of y needs only one part of its row again. Nothing of
the size of x is stored besides y.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..tuning import logits as tuning
from .draw import draw
from .launch import Launch, Tensors, launch
from .options import Limits, row_inverse, row_limits, row_uniform, split_temperature
from .row_loops import loop_kernel
from .scores import ended, fold_given, last_stride, score_offsets, score_scale, score_tile
from .selection import kept, key_shift
from .softmax import exponential, merge_parts, pivot
from .tiles import row_offset
from .wide_selection import choose_kernel, load_states, row_state, stream_kernel


@triton.jit(do_not_specialize=["lo", "hi", "top_k", "rows"])
def short_kernel(
    x_ptr, temperature_ptr, mask_ptr, bias_ptr, top_k_ptr, top_p_ptr, min_p_ptr, uniform_ptr, y_ptr, lse_ptr, token_ptr,
    inverse, factor, cap, lo, hi, top_k, top_p, min_p, rows, N,
    sizes, x_strides, y_strides, mask_strides, bias_strides, x_step, y_step, mask_step, bias_step,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, SHIFT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program owns ROWS whole rows of up to BLOCK scores, each read and written once, or drawn from."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    columns = tl.arange(0, BLOCK)
    inside = live[:, None] & (columns < N)[None, :]
    inverse, poisoned = row_inverse(inverse, temperature_ptr, row, live, WITH_BIAS=bias_ptr is not None)
    at = score_offsets(row, sizes, x_strides, mask_strides, bias_strides)
    steps = (x_step, mask_step, bias_step)
    source = ((x_ptr, mask_ptr, bias_ptr), at, steps, (inverse, factor, cap), (lo, hi))
    score = score_tile(columns, inside, source)
    scale = score_scale(inverse, WITH_BIAS=bias_ptr is not None)
    m = tl.max(score, 1)
    p = exponential(score, pivot(m)[:, None], scale[:, None])
    if TOP_K or TOP_P or MIN_P:
        k, share, least, poisoned = row_limits(
            top_k, top_k_ptr, top_p, top_p_ptr, min_p, min_p_ptr, row, live, N, poisoned, TOP_K, TOP_P, MIN_P
        )
        p = tl.where(kept(score, p, k, share, None, least, None, TOP_K, TOP_P, MIN_P, SHIFT), p, 0.0)
    s = tl.sum(p, 1)
    inverse_s = ended(m, s, scale, poisoned, row, live, lse_ptr)
    if y_ptr is not None:
        at_y = (y_ptr + row_offset(row, sizes, y_strides))[:, None] + columns[None, :].to(tl.int64) * y_step
        tl.store(at_y, (p * inverse_s[:, None]).to(y_ptr.dtype.element_ty), mask=inside)
    if token_ptr is not None:
        token = draw(p, columns[None, :], row_uniform(uniform_ptr, temperature_ptr, row, live))
        tl.store(token_ptr + row, tl.where(poisoned, -1, token).to(tl.int64), mask=live)


@triton.jit(do_not_specialize=["lo", "hi"])
def spread_kernel(
    x_ptr, temperature_ptr, mask_ptr, bias_ptr, states_ptr, y_ptr, lse_ptr,
    inverse, factor, cap, lo, hi, N, parts, sizes, x_strides, y_strides, mask_strides, bias_strides,
    x_step, y_step, mask_step, bias_step,
    PART: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """A program owns a part of a row of y, for the states of the row's parts; the first also has its lse."""
    row = tl.program_id(0).to(tl.int64) // parts + tl.arange(0, 1)
    part = tl.program_id(0) % parts
    columns = part * PART + tl.arange(0, PART)
    inside = (columns < N)[None, :]
    inverse, poisoned = row_inverse(inverse, temperature_ptr, row, row >= 0, WITH_BIAS=bias_ptr is not None)
    at = score_offsets(row, sizes, x_strides, mask_strides, bias_strides)
    steps = (x_step, mask_step, bias_step)
    source = ((x_ptr, mask_ptr, bias_ptr), at, steps, (inverse, factor, cap), (lo, hi))
    score = score_tile(columns, inside, source)
    scale = score_scale(inverse, WITH_BIAS=bias_ptr is not None)
    m, s = row_state(states_ptr, row, parts, scale, BLOCK_PARTS)
    inverse_s = ended(m, s, scale, poisoned, row, (row >= 0) & (part == 0), lse_ptr)
    y = exponential(score, pivot(m)[:, None], scale[:, None]) * inverse_s[:, None]
    at_y = (y_ptr + row_offset(row, sizes, y_strides))[:, None] + columns[None, :].to(tl.int64) * y_step
    tl.store(at_y, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["lo", "hi"])
def draw_kernel(
    x_ptr, temperature_ptr, mask_ptr, bias_ptr, uniform_ptr, states_ptr, token_ptr,
    inverse, factor, cap, lo, hi, N, parts, sizes, x_strides, mask_strides, bias_strides, x_step, mask_step, bias_step,
    PART: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """A program owns a row: it draws a part by the parts' states, and a token of that part by its scores."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    inverse, poisoned = row_inverse(inverse, temperature_ptr, row, row >= 0, WITH_BIAS=bias_ptr is not None)
    at = score_offsets(row, sizes, x_strides, mask_strides, bias_strides)
    steps = (x_step, mask_step, bias_step)
    source = ((x_ptr, mask_ptr, bias_ptr), at, steps, (inverse, factor, cap), (lo, hi))
    scale = score_scale(inverse, WITH_BIAS=bias_ptr is not None)
    m, s = load_states(states_ptr, row, parts, BLOCK_PARTS)
    m_row, _ = merge_parts(m, s, tl.max(scale, 0))
    weight = s * exponential(m, pivot(m_row), tl.max(scale, 0))
    u = row_uniform(uniform_ptr, temperature_ptr, row, row >= 0)
    drawn = draw(weight[None, :], tl.arange(0, BLOCK_PARTS)[None, :], u)
    columns = tl.maximum(tl.max(drawn, 0), 0) * PART + tl.arange(0, PART)
    score = score_tile(columns, (columns < N)[None, :], source)
    p = exponential(score, pivot(tl.max(score, 1))[:, None], scale[:, None])
    # a number of its own: what u leaves within its part is too coarse
    token = draw(p, columns[None, :], row_uniform(uniform_ptr + 1, temperature_ptr, row, row >= 0))
    tl.store(token_ptr + row, tl.where(poisoned | (drawn < 0), -1, token).to(tl.int64))


# ---- plans and launchers -----------------------------------------------------------------------------------


Numbers = tuple[float | int | None, ...]
LIMITED = ("TOP_K", "TOP_P", "MIN_P")


class Scores(NamedTuple):
    """Where scores come from: the tensors x, temperature, mask and bias, and 1 / T, scale, softcap, lo and hi."""

    tensors: tuple[torch.Tensor | None, ...]
    numbers: Numbers

    @classmethod
    def of(
        cls, x: torch.Tensor, temperature: float | torch.Tensor, scale: float | None, softcap: float | None,
        mask: torch.Tensor | None, lo: int | None, hi: int | None, bias: torch.Tensor | None,
    ) -> Scores:  # fmt: skip
        """From the arguments of an operator."""
        row_temperature, inverse = split_temperature(temperature, x, bias is not None)
        mask = None if mask is None else mask.view(torch.uint8)
        return cls((x, row_temperature, mask, bias), (inverse, scale, softcap, lo, hi))

    def exact(self) -> bool:
        """Whether scores are values of x, unchanged."""
        return self.tensors[3] is None and self.numbers[1] is None and self.numbers[2] is None


def _layout(x: torch.Tensor, others: Tensors, numbers: Numbers) -> tuple[object, ...]:
    """Sizes of the rows, and the strides along them and the last steps of x and others, the last of which is a bias."""
    *middle, bias = others
    given = (x, *middle, None if bias is None else bias.expand(x.shape))
    sizes, strides = fold_given(*given, separate_last=numbers[3] is not None or numbers[4] is not None)
    return (sizes, *strides, *map(last_stride, given))


def _plan_short(
    inputs: Tensors, outputs: Tensors, numbers: Numbers, limits: Numbers, constants: frozenset[tuple[str, int]]
) -> Launch:
    x, _, mask, bias = inputs[:4]
    N = x.shape[-1]
    rows = x.numel() // N
    options = dict(constants)
    config = tuning.forward(N, any(options[name] for name in LIMITED))
    options |= {"ROWS": config.rows, "BLOCK": config.block, "num_warps": config.num_warps}
    args = (*numbers, *limits, rows, N, *_layout(x, (outputs[0], mask, bias), numbers))
    return Launch(short_kernel, triton.cdiv(rows, config.rows), args, options)


def _plan_stream(inputs: Tensors, outputs: Tensors, numbers: Numbers, config: tuning.WideConfig) -> Launch:
    x, _, mask, bias = inputs
    y, maxima, _ = outputs
    N = x.shape[-1]
    parts, chunks = triton.cdiv(N, config.part), 0 if maxima is None else maxima.shape[1]
    args = (*numbers, N, parts, chunks, *_layout(x, (y, mask, bias), numbers))
    options = {"PART": config.part, "CHUNK": config.chunk, "num_warps": config.part_warps}
    return Launch(stream_kernel, x.numel() // N * parts, args, options)


def _plan_spread(inputs: Tensors, outputs: Tensors, numbers: Numbers, config: tuning.WideConfig) -> Launch:
    x, _, mask, bias, states = inputs
    N, parts = x.shape[-1], states.shape[1]
    args = (*numbers, N, parts, *_layout(x, (outputs[0], mask, bias), numbers))
    options = {"PART": config.part, "BLOCK_PARTS": triton.next_power_of_2(parts), "num_warps": config.part_warps}
    return Launch(spread_kernel, states.shape[0] * parts, args, options)


def _plan_draw(inputs: Tensors, outputs: Tensors, numbers: Numbers, config: tuning.WideConfig) -> Launch:
    x, _, mask, bias, _, states = inputs
    N, parts = x.shape[-1], states.shape[1]
    args = (*numbers, N, parts, *_layout(x, (mask, bias), numbers))
    options = {"PART": config.part, "BLOCK_PARTS": triton.next_power_of_2(parts), "num_warps": config.part_warps}
    return Launch(draw_kernel, states.shape[0], args, options)


def _plan_choose(
    inputs: Tensors, outputs: Tensors, numbers: Numbers, limits: Numbers, constants: frozenset[tuple[str, int]],
    config: tuning.WideConfig,
) -> Launch:  # fmt: skip
    x, _, mask, bias = inputs[:4]
    N, (rows, chunks) = x.shape[-1], inputs[8].shape
    parts = triton.cdiv(N, config.part)
    args = (*numbers, *limits, N, parts, chunks, *_layout(x, (outputs[0], mask, bias), numbers))
    options = dict(constants) | {
        "CHUNK": config.chunk,
        "CHUNKS": triton.next_power_of_2(chunks),
        "CHOSEN": config.chosen,
        "BLOCK": config.part,
        "BLOCK_PARTS": triton.next_power_of_2(parts),
        "num_warps": config.choose_warps,
    }
    return Launch(choose_kernel, rows, args, options)


def _plan_loop(
    inputs: Tensors, outputs: Tensors, numbers: Numbers, limits: Numbers, constants: frozenset[tuple[str, int]],
    config: tuning.WideConfig,
) -> Launch:  # fmt: skip
    x, _, mask, bias = inputs[:4]
    N, (rows, chunks) = x.shape[-1], inputs[8].shape
    args = (*numbers, *limits, N, chunks, *_layout(x, (outputs[0], mask, bias), numbers))
    options = dict(constants) | {
        "CHUNKS": triton.next_power_of_2(chunks),
        "BLOCK": config.block,
        "FEW": config.few,
        "num_warps": config.loop_warps,
    }
    return Launch(loop_kernel, rows, args, options)


def _run(
    scores: Scores, limits: Limits, uniform: torch.Tensor | None,
    y: torch.Tensor | None, lse: torch.Tensor | None, token: torch.Tensor | None,
) -> None:  # fmt: skip
    """Launches what writes those of the outputs that are given."""
    x, *_ = scores.tensors
    N = x.shape[-1]
    rows = x.numel() // N
    given = limits.given
    limited = any(given.values())
    constants = frozenset({**given, "SHIFT": key_shift(x, exact=scores.exact())}.items())
    if tuning.forward(N, limited).one_tile:
        inputs = (*scores.tensors, *limits.tensors, uniform)
        launch(_plan_short, inputs, (y, lse, token), scores.numbers, limits.numbers, constants)
        return
    given_k = given["TOP_K"] and limits.tensors[0] is None
    config = tuning.wide(N, limited, limits.numbers[0] if given_k else None)
    parts = triton.cdiv(N, config.part)
    states = None
    if not given["TOP_K"] and (given["TOP_P"] or not given["MIN_P"]):
        states = x.new_empty((rows, parts, 2), dtype=torch.float32)
    if limited:
        maxima = x.new_empty((rows, triton.cdiv(N, config.chunk)), dtype=torch.float32)
        launch(_plan_stream, scores.tensors, (y if config.chosen else None, maxima, states), scores.numbers, config)
        inputs = (*scores.tensors, *limits.tensors, uniform, maxima)
        options = (scores.numbers, limits.numbers, constants, config)
        unresolved = None
        if config.chosen:
            chosen = x.new_empty((rows, config.chosen), dtype=torch.int32)
            unresolved = None if given_k else x.new_empty((rows,), dtype=torch.int32)
            launch(_plan_choose, (*inputs, states), (y, lse, token, chosen, unresolved), *options)
        if unresolved is not None or not config.chosen:
            few = x.new_empty((rows, config.few), dtype=torch.int32)
            launch(_plan_loop, (*inputs, unresolved), (y, lse, token, few), *options)
        return
    launch(_plan_stream, scores.tensors, (None, None, states), scores.numbers, config)
    if y is not None:
        launch(_plan_spread, (*scores.tensors, states), (y, lse), scores.numbers, config)
    else:
        launch(_plan_draw, (*scores.tensors, uniform, states), (token,), scores.numbers, config)


def fused_softmax_forward(
    x: torch.Tensor,
    dtype: torch.dtype,
    temperature: float | torch.Tensor,
    scale: float | None,
    softcap: float | None,
    mask: torch.Tensor | None,
    lo: int | None,
    hi: int | None,
    bias: torch.Tensor | None,
    top_k: int | torch.Tensor | None,
    top_p: float | torch.Tensor | None,
    min_p: float | torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax of what mask, band, top-k, top-p and min-p keep of the scores, and its lse; see `reference`."""
    y = torch.empty_like(x, dtype=dtype)
    lse = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if x.numel() == 0:
        return y, lse.fill_(float("-inf"))
    scores = Scores.of(x, temperature, scale, softcap, mask, lo, hi, bias)
    _run(scores, Limits.of(x, top_k, top_p, min_p), None, y, lse, None)
    return y, lse


def sample_forward(
    x: torch.Tensor,
    uniform: torch.Tensor,
    temperature: float | torch.Tensor,
    scale: float | None,
    softcap: float | None,
    mask: torch.Tensor | None,
    lo: int | None,
    hi: int | None,
    bias: torch.Tensor | None,
    top_k: int | torch.Tensor | None,
    top_p: float | torch.Tensor | None,
    min_p: float | torch.Tensor | None,
) -> torch.Tensor:
    """A column of each row, int64, drawn by `uniform` from what `fused_softmax_forward` would give; see `reference`."""
    token = x.new_empty(x.shape[:-1], dtype=torch.int64)
    if x.numel() == 0:
        return token.fill_(-1)
    if not isinstance(temperature, torch.Tensor) and temperature == 0:
        uniform = torch.zeros_like(uniform)  # which draws the first of the largest
    scores = Scores.of(x, temperature, scale, softcap, mask, lo, hi, bias)
    _run(scores, Limits.of(x, top_k, top_p, min_p), uniform.contiguous(), None, None, token)
    return token
