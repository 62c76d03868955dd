"""Cross entropy forward: the states of rows' parts, and the losses of what they merge to.

`cross_entropy_state_kernel` reads the logits once, N elements a row, and writes a few numbers a part: a program owns
one part and waits for none. `cross_entropy_kernel` merges the parts of a row, be they of one device or the ranks of a
group, and gives its loss and what the backward needs, 8 bytes a row. At the read rate an H200 has 13 instructions for
an element of 16 bits; the first takes 5, and with all that is done once a thread 10 (counted for sm_90, 64 elements a
thread): maxima are taken two at a time, one instruction unpacks an element, and an exponent is one FMA (`softmax.fold`)
before its exp2, so that the loss is exact however far from zero the logits lie.

`cross_entropy_overwrite_kernel` does the work of the first and writes the gradient over the logits as well, 2 N in
all: the row stays on chip while the programs of a row exchange their states, as in rows.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from ..reference.softmax import wide
from ..tuning.losses import OVERWRITE, STATE, loss_config, pieces
from ..tuning.rows import device
from .cross_entropy_backward import cross_entropy_gradient
from .exchange import Phase, board, exchange, shared_state
from .launch import Launch, Tensors, launch
from .loss_tiles import end_gradient, gradient, inside_tile, label_column, labels, part_state, read_end, scores
from .row_layout import Layout, layout
from .row_tiles import body_of, ends, load_all, load_ends, part_of, place, rows_of, scalar, store, store_ends
from .softcap import softcap
from .softmax import finish, fold, merge_parts, of_state, pivot
from .tiles import fold_rows

EMPTY: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def store_state(
    states, row, row_in, n_rows, part, parts, m, s, label_score, label_weight, u, w_sum,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """Writes a part's numbers into states (kinds, n_rows, parts)."""
    kind = tl.cast(n_rows, tl.int64) * parts
    to = states + row * parts + part
    tl.store(to, m, mask=row_in)
    tl.store(to + kind, s, mask=row_in)
    tl.store(to + 2 * kind, label_score, mask=row_in)
    SMOOTHING: tl.constexpr = 4 if WEIGHTED else 3
    if WEIGHTED:
        tl.store(to + 3 * kind, label_weight, mask=row_in)
    if SMOOTH:
        tl.store(to + SMOOTHING * kind, u, mask=row_in)
        tl.store(to + (SMOOTHING + 1) * kind, w_sum, mask=row_in)


@triton.jit
def of_label(x, weight, column, own, stride, weight_stride, cap):
    """The label's score and weight (rows,) where it is the program's, else 0; the weight 1 without weights."""
    score = tl.sum(tl.load(x + (column * stride)[:, None], mask=own[:, None], other=0.0).to(tl.float32), 1)
    if cap is not None:
        score = softcap(score, cap)
    w = own.to(tl.float32)
    if weight is not None:
        w = tl.load(weight + column * weight_stride, mask=own, other=0.0).to(tl.float32)
    return score, w


@triton.jit(do_not_specialize=["first", "ignore_index"])
def cross_entropy_state_kernel(
    x, target, weight, states, sizes, x_strides, target_strides, x_stride, weight_stride, n_rows, n_units, part_cols,
    parts, first, ignore_index, cap,
    SMOOTH: tl.constexpr, PAIRS: tl.constexpr, PACKED: tl.constexpr, TILES: tl.constexpr, EVEN: tl.constexpr,
    UNIT: tl.constexpr, ALIGN: tl.constexpr, ALIGNED: tl.constexpr, INDEX: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """The state of a part of each of the program's rows; N elements a row are read."""
    row, row_in, part = place(n_rows, parts, BLOCK_ROWS)
    label, kept = labels(target, row, row_in, sizes, target_strides, first, ignore_index)
    head, body = body_of(row, sizes, x_strides, n_units, UNIT, ALIGN, INDEX)
    begin, end = part_of(part, part_cols, body, True, INDEX)
    column, own = label_column(label, kept, part, head, begin, end, body, n_units, UNIT, ALIGN)
    end = read_end(kept, end, BLOCK_ROWS)
    x = rows_of(x, row, sizes, x_strides, x_stride, head, begin, UNIT, ALIGNED[0])
    STEP: tl.constexpr = ALIGN if ALIGN > 0 else UNIT
    tiles = load_all(x, kept, x_stride, end, EMPTY, "", TILES, False, STEP, BLOCK_ROWS, BLOCK_COLS)
    if weight is not None:
        weight += (head + begin) * weight_stride
    label_score, label_weight = of_label(x, weight, column, own, x_stride, weight_stride, cap)
    end_tile = None
    end_columns = None
    end_inside = None
    if ALIGN > 0:
        end_columns, end_inside = ends(part, head, body, n_units, UNIT, ALIGN)
        end_inside = end_inside & (scalar(kept.to(tl.int32)) > 0)
        end_tile = load_ends(x, end_columns, end_inside, EMPTY)
        if cap is not None:
            end_tile = tl.where(end_inside, softcap(end_tile, cap), EMPTY)
    m, s, u, w_sum = part_state(
        tiles, end_tile, end_inside, end_columns, weight, weight_stride, kept, end, cap, None,
        SMOOTH, PAIRS, PACKED, TILES, BLOCK_COLS,
    )  # fmt: skip
    store_state(
        states, row, row_in, n_rows, part, parts, m, s, label_score, label_weight, u, w_sum, weight is not None, SMOOTH
    )


@triton.jit(do_not_specialize=["parts", "n_rows"])
def merge_states_kernel(
    states, merged, n_rows, parts,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """The states (kinds, n_rows, 1) of whole rows from those (kinds, n_rows, parts) of their parts."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_in = row < n_rows
    m, s, label_score, label_weight, u, w_sum = merged_states(
        states, row, row_in, n_rows, parts, WEIGHTED, SMOOTH, BLOCK_PARTS
    )
    store_state(merged, row, row_in, n_rows, 0, 1, m, s, label_score, label_weight, u, w_sum, WEIGHTED, SMOOTH)


@triton.jit
def merged_states(
    states, row, row_in, n_rows, parts, WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, BLOCK_PARTS: tl.constexpr
):
    """A row's numbers, each (rows,), of those of all its parts, taken in their order."""
    kind = tl.cast(n_rows, tl.int64) * parts
    part = tl.arange(0, BLOCK_PARTS)[:, None]
    there = row_in[None, :] & (part < parts)
    at = states + row[None, :] * parts + part
    m_parts = tl.load(at, mask=there, other=EMPTY)
    m, s = merge_parts(m_parts, tl.load(at + kind, mask=there, other=0.0))
    label_score = tl.sum(tl.load(at + 2 * kind, mask=there, other=0.0), 0)
    label_weight = tl.full(row.shape, 1.0, tl.float32)
    u = tl.zeros(row.shape, tl.float32)
    w_sum = tl.zeros(row.shape, tl.float32)
    SMOOTHING: tl.constexpr = 4 if WEIGHTED else 3
    if WEIGHTED:
        label_weight = tl.sum(tl.load(at + 3 * kind, mask=there, other=0.0), 0)
    if SMOOTH:
        u_parts = tl.load(at + SMOOTHING * kind, mask=there, other=0.0)
        w_parts = tl.load(at + (SMOOTHING + 1) * kind, mask=there, other=0.0)
        u = tl.sum(u_parts + w_parts * (pivot(m_parts) - pivot(m)[None, :]), 0)
        w_sum = tl.sum(w_parts, 0)
    return m, s, label_score, label_weight, u, w_sum


@triton.jit(do_not_specialize=["n_rows", "parts", "n_classes", "ignore_index"])
def cross_entropy_kernel(
    target, states, loss, kept_weight, m_of_row, slope_of_row, sizes, target_strides, n_rows, parts, n_classes,
    ignore_index, smoothing, z_loss,
    WEIGHTED: tl.constexpr, SMOOTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_PARTS: tl.constexpr,
):  # fmt: skip
    """Losses of rows, their weights in the mean, and for the backward m and dloss/dlse / s."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_in = row < n_rows
    label, kept = labels(target, row, row_in, sizes, target_strides, 0, ignore_index)
    m, s, label_score, label_weight, u, w_sum = merged_states(
        states, row, row_in, n_rows, parts, WEIGHTED, SMOOTH, BLOCK_PARTS
    )
    at, inverse, log_s = of_state(m, s)
    lse = at + log_s
    per_label = (1.0 - smoothing) * label_weight
    of_loss = per_label * (log_s - (label_score - at))
    of_slope = per_label
    if SMOOTH:
        share = smoothing / n_classes
        of_loss += share * (w_sum * log_s - u)
        of_slope += share * w_sum
    if z_loss is not None:
        of_loss += z_loss * lse * lse
        of_slope += 2.0 * z_loss * lse
    valid = (label >= 0) & (label < n_classes)
    of_loss = tl.where(valid, of_loss, float("nan"))
    of_slope = tl.where(valid, of_slope * inverse, float("nan"))
    tl.store(loss + row, tl.where(kept, of_loss, 0.0), mask=row_in)
    tl.store(kept_weight + row, tl.where(kept, label_weight, 0.0), mask=row_in)
    tl.store(m_of_row + row, m, mask=row_in)
    tl.store(slope_of_row + row, tl.where(kept, of_slope, 0.0), mask=row_in)


@triton.jit(do_not_specialize=["ignore_index"])
def cross_entropy_overwrite_kernel(
    x, target, weight, factor, total_weight, states, board, sizes, x_strides, target_strides, x_stride, weight_stride,
    n_rows, n_units, part_cols, ignore_index, smoothing, z_loss, cap, nothing, nor_this,
    SMOOTH: tl.constexpr, PAIRS: tl.constexpr, PACKED: tl.constexpr, TILES: tl.constexpr,
    EVEN: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, ALIGNED: tl.constexpr, INDEX: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, SENDS: tl.constexpr, RECEIVES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """`cross_entropy_state_kernel`, and the gradient, times factor (a scalar, or None for 1), in place of x."""
    row, row_in, part = place(n_rows, PARTS, BLOCK_ROWS)
    label, kept = labels(target, row, row_in, sizes, target_strides, 0, ignore_index)
    head, body = body_of(row, sizes, x_strides, n_units, UNIT, ALIGN, INDEX)
    begin, whole_end = part_of(part, part_cols, body, PARTS > 1, INDEX)
    column, own = label_column(label, kept, part, head, begin, whole_end, body, n_units, UNIT, ALIGN)
    end = read_end(kept, whole_end, BLOCK_ROWS)
    x = rows_of(x, row, sizes, x_strides, x_stride, head, begin, UNIT, ALIGNED[0])
    STEP: tl.constexpr = ALIGN if ALIGN > 0 else UNIT
    tiles = load_all(x, kept, x_stride, end, EMPTY, "", TILES, False, STEP, BLOCK_ROWS, BLOCK_COLS)
    label_weight = kept.to(tl.float32)
    n_classes = (tl.cast(n_units, tl.int64) * UNIT).to(tl.float32)
    valid = (label >= 0) & (label < tl.cast(n_units, tl.int64) * UNIT)
    w_total = n_classes
    if weight is not None:
        label_weight = tl.load(weight + label * weight_stride, mask=kept & valid, other=0.0).to(tl.float32)
        if SMOOTH:
            w_total = tl.load(total_weight)
        weight += (head + begin) * weight_stride
    label_score, own_weight = of_label(x, weight, column, own, x_stride, weight_stride, cap)
    end_tile = None
    end_columns = None
    end_inside = None
    if ALIGN > 0:
        end_columns, end_exists = ends(part, head, body, n_units, UNIT, ALIGN)
        end_inside = end_exists & (scalar(kept.to(tl.int32)) > 0)
        end_tile = load_ends(x, end_columns, end_inside, EMPTY)
        if cap is not None:
            end_tile = tl.where(end_inside, softcap(end_tile, cap), EMPTY)
    m, s, u, w_sum = part_state(
        tiles, end_tile, end_inside, end_columns, weight, weight_stride, kept, end, cap, nothing,
        SMOOTH, PAIRS, PACKED, TILES, BLOCK_COLS,
    )  # fmt: skip
    store_state(
        states, row, row_in, n_rows, part, PARTS, m, s, label_score, own_weight, u, w_sum, weight is not None, SMOOTH
    )
    if PARTS > 1:
        m, s = shared_state(board, row, part, m, s, PARTS, BLOCK_PARTS, SENDS, RECEIVES)
    if RECEIVES:  # x is read once more where programs run one after another
        inverse, lse = finish(m, s)
        inverse = tl.where(s == 0.0, float("nan"), inverse)
        c, at, unit = fold(m)
        hit = (1.0 - smoothing) * label_weight
        slope = hit
        share = tl.zeros_like(hit)
        if SMOOTH:
            share += smoothing / n_classes
            slope += share * w_total
        if z_loss is not None:
            slope += 2.0 * z_loss * lse
        slope = tl.where(valid, slope * inverse / unit, float("nan"))
        if factor is not None:
            by = tl.load(factor)
            slope, share, hit = slope * by, share * by, hit * by
        slope, share, hit = tl.where(kept, slope, 0.0), tl.where(kept, share, 0.0), tl.where(kept, hit, 0.0)
        for t in tl.static_range(TILES):
            tile = scores(tiles[t], kept, t * BLOCK_COLS, end, cap, nor_this, PACKED, BLOCK_COLS)
            out = gradient(
                tile, weight, weight_stride, c, at, slope, share, hit, column, t * BLOCK_COLS,
                inside_tile(kept, t * BLOCK_COLS, end, BLOCK_COLS), cap, SMOOTH, BLOCK_ROWS, BLOCK_COLS,
            )  # fmt: skip
            store(x, out, row_in, t * BLOCK_COLS, x_stride, whole_end, EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)
        if ALIGN > 0:
            out = end_gradient(
                end_tile, weight, weight_stride, c, at, slope, share, hit, column, end_columns, end_inside, cap, SMOOTH
            )
            store_ends(x, out, end_columns, end_exists)


# ---- launchers ---------------------------------------------------------------------------------------------


def kinds(weighted: bool, smooth: bool) -> int:
    """Numbers that are kept of a row's part: m, s, the label's score; its weight; with smoothing two sums."""
    return 3 + weighted + 2 * smooth


def _pairs(x: torch.Tensor, rows: Layout, tiles: int) -> bool:
    """Whether maxima of x's tiles are taken two at a time, by an instruction of NVIDIA's."""
    name = device(x.get_device()).name
    return tiles > 1 and rows.pairs(x) and name.startswith("sm_")


def _state_parts(x: torch.Tensor) -> int:
    """Into how many parts the state kernel cuts rows of x, which follows from their length and layout."""
    rows_inner = x.stride(-1) > 1 and fold_rows(x)[1][0][0] == 1
    config = loss_config(STATE, x.shape[-1], x.element_size(), rows_inner, device(x.get_device()))
    return pieces(config, x.shape[-1]).count


def _plan_state(
    inputs: Tensors, outputs: Tensors, first: int, ignore_index: int, smooth: bool, cap: float | None
) -> Launch:
    x, target, weight = inputs
    rows = layout(STATE, x, per_row=(target,), config_of=loss_config)
    rows = replace(rows, parts=pieces(rows.config, rows.n_cols))
    assert rows.parts.count == outputs[0].shape[-1]
    tiles = triton.cdiv(rows.parts.cols, rows.config.block_cols)
    args = (
        rows.sizes, *rows.strides, *rows.per_row, x.stride(-1), 0 if weight is None else weight.stride(0),
        *rows.lengths, rows.parts.count, first, ignore_index, cap,
    )  # fmt: skip
    options = rows.options | {
        "SMOOTH": smooth, "PAIRS": _pairs(x, rows, tiles), "PACKED": rows.pairs(x), "TILES": tiles,
    }  # fmt: skip
    return Launch(cross_entropy_state_kernel, rows.programs, args, options)


def _merging(rows: int, parts: int) -> tuple[int, dict[str, Any]]:
    """Programs that merge states, and how: 512 numbers a program, more only for rows of more parts."""
    block_parts = triton.next_power_of_2(parts)
    together = max(512 // block_parts, 1)
    warps = 4 if block_parts <= 4096 else 16
    return triton.cdiv(rows, together), {"ROWS": together, "BLOCK_PARTS": block_parts, "num_warps": warps}


def _plan_merge(inputs: Tensors, outputs: Tensors, weighted: bool, smooth: bool) -> Launch:
    _, rows, parts = inputs[0].shape
    programs, options = _merging(rows, parts)
    return Launch(
        merge_states_kernel, programs, (rows, parts), options | {"WEIGHTED": weighted, "SMOOTH": smooth}
    )  # fmt: skip


def _plan_loss(
    inputs: Tensors, outputs: Tensors, n_classes: int, ignore_index: int, smoothing: float, z_loss: float,
    weighted: bool,
) -> Launch:  # fmt: skip
    target, states = inputs
    _, rows, parts = states.shape
    sizes, (strides,) = fold_rows(target.unsqueeze(-1))
    programs, options = _merging(rows, parts)
    args = (sizes, strides, rows, parts, n_classes, ignore_index, smoothing, z_loss or None)
    return Launch(
        cross_entropy_kernel, programs, args, options | {"WEIGHTED": weighted, "SMOOTH": smoothing > 0.0}
    )  # fmt: skip


def _plan_overwrite(
    inputs: Tensors, outputs: Tensors, ignore_index: int, smoothing: float, z_loss: float, cap: float | None,
    phase: Phase,
) -> Launch:  # fmt: skip
    x, target, weight, _, _ = inputs
    rows = layout(OVERWRITE, x, per_row=(target,), config_of=loss_config)
    count, tiles = rows.parts.count, rows.config.tiles
    args = (
        rows.sizes, *rows.strides, *rows.per_row, x.stride(-1), 0 if weight is None else weight.stride(0),
        *rows.lengths, ignore_index, smoothing, z_loss or None, cap, 0, 0,
    )  # fmt: skip
    options = rows.options | {
        "SMOOTH": smoothing > 0.0, "PAIRS": _pairs(x, rows, tiles), "PACKED": rows.packed(x) and rows.pairs(x),
        "TILES": tiles, "PARTS": count, "BLOCK_PARTS": triton.next_power_of_2(count),
        "SENDS": phase.sends, "RECEIVES": phase.receives,
    }  # fmt: skip
    if count == 1:
        programs = rows.programs if phase.receives else 0
        return Launch(cross_entropy_overwrite_kernel, programs, (None, *args), options)
    scratch = functools.partial(board, x.device, rows.n_rows * count**2)
    return Launch(cross_entropy_overwrite_kernel, rows.programs, args, options, scratch)


def _part_states(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, first: int, ignore_index: int, smooth: bool,
    softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """The states (kinds, rows, parts) of all parts of all rows."""
    states = x.new_empty(kinds(weight is not None, smooth), target.numel(), _state_parts(x), dtype=torch.float32)
    launch(_plan_state, (x, target, weight), (states,), first, ignore_index, smooth, softcap)
    return states


def _no_states(target: torch.Tensor, like: torch.Tensor, weighted: bool, smooth: bool) -> torch.Tensor:
    """The states of rows without columns."""
    states = like.new_zeros(kinds(weighted, smooth), target.numel(), 1, dtype=torch.float32)
    states[0] = float("-inf")
    return states


def cross_entropy_state_forward(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    first: int,
    ignore_index: int,
    smooth: bool,
    softcap: float | None,
) -> torch.Tensor:
    """States (kinds, ...) of rows of x, which are the classes from `first` on; see `reference`."""
    weighted = weight is not None
    if x.numel() == 0:
        return _no_states(target, x, weighted, smooth).view(-1, *target.shape)
    states = _part_states(x, target, weight, first, ignore_index, smooth, softcap)
    if states.shape[-1] > 1:
        parts, states = states, states.new_empty(*states.shape[:-1], 1)
        launch(_plan_merge, (parts,), (states,), weighted, smooth)
    return states.view(-1, *target.shape)


def cross_entropy_forward(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    states: torch.Tensor | None,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses, weights in the mean, m and slope of rows, of x or of states (kinds, ..., ranks); see `reference`."""
    weighted, smooth = weight is not None, label_smoothing > 0.0
    loss, kept, m, slope = (torch.empty(target.shape, dtype=wide(x.dtype), device=x.device) for _ in range(4))
    if target.numel() == 0:
        return loss, kept, m, slope
    if states is not None:
        parts = states.reshape(states.shape[0], target.numel(), states.shape[-1]).contiguous()
    elif x.numel() == 0:
        parts = _no_states(target, x, weighted, smooth)
    else:
        parts = _part_states(x, target, weight, 0, ignore_index, smooth, softcap)
    launch(
        _plan_loss, (target, parts), (loss, kept, m, slope), classes, ignore_index, label_smoothing, z_loss, weighted
    )
    return loss, kept, m, slope


def cross_entropy_overwrite_forward(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    factor: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> torch.Tensor:
    """Losses of rows of x; x becomes the gradient of their sum times factor (a scalar tensor, or None for 1)."""
    options = ignore_index, label_smoothing, z_loss, softcap
    rows = layout(OVERWRITE, x, config_of=loss_config) if x.numel() else None
    if rows is None or not rows.parts.whole:  # more than all programs of a row can hold is read twice
        loss, _, m, slope = cross_entropy_forward(x, target, weight, None, x.shape[-1], *options)
        dloss = torch.ones_like(loss) if factor is None else factor.to(loss.dtype).expand(loss.shape)
        cross_entropy_gradient(
            dloss, x, target, weight, m, slope, 0, x.shape[-1], ignore_index, label_smoothing, softcap, x
        )
        return loss
    weighted, smooth = weight is not None, label_smoothing > 0.0
    states = x.new_empty(kinds(weighted, smooth), target.numel(), rows.parts.count, dtype=torch.float32)
    total = weight.sum(dtype=torch.float32) if weight is not None and smooth else None
    exchange(_plan_overwrite, (x, target, weight, factor, total), (states,), *options)
    loss, kept, m, slope = (torch.empty(target.shape, dtype=wide(x.dtype), device=x.device) for _ in range(4))
    launch(
        _plan_loss, (target, states), (loss, kept, m, slope), x.shape[-1], ignore_index, label_smoothing, z_loss,
        weighted,
    )  # fmt: skip
    return loss
