"""Cross entropy backward: (softmax - one-hot) scaled in one pass, and a gradient that is there scaled by its own.

A program owns one tile and waits for none: 2 N elements a row move, and the softmax is never written.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from ..tuning.losses import GRADIENT, loss_config, pieces
from ..tuning.rows import device
from .launch import Launch, Tensors, launch
from .loss_tiles import end_gradient, gradient, inside_tile, label_column, labels, read_end, scores
from .row_layout import layout
from .row_tiles import body_of, ends, load, load_ends, part_of, place, rows_of, scalar, store, store_ends
from .softcap import softcap
from .softmax import fold
from .tiles import row_offset

EMPTY: tl.constexpr = tl.constexpr(float("-inf"))
SCALE_PROGRAMS = 8  # a multiprocessor, each of which takes many tiles: those that find a factor of 1 cost nothing


@triton.jit(do_not_specialize=["first", "ignore_index"])
def cross_entropy_backward_kernel(
    dloss, x, target, weight, m_of_row, slope_of_row, dx, sizes, x_strides, dx_strides, dloss_strides, target_strides,
    x_stride, dx_stride, weight_stride, n_rows, n_units, part_cols, parts, first, n_classes, ignore_index, smoothing,
    cap,
    SMOOTH: tl.constexpr, WEIGHTED: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr,
    ALIGN: tl.constexpr, ALIGNED: tl.constexpr, INDEX: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """dx of one tile, from m and slope of the forward; x is not read where rows are not kept."""
    row, row_in, part = place(n_rows, parts, BLOCK_ROWS)
    label, kept = labels(target, row, row_in, sizes, target_strides, first, ignore_index)
    head, body = body_of(row, sizes, x_strides, n_units, UNIT, ALIGN, INDEX)
    begin, whole_end = part_of(part, part_cols, body, True, INDEX)
    column, own = label_column(label, kept, part, head, begin, whole_end, body, n_units, UNIT, ALIGN)
    end = read_end(kept, whole_end, BLOCK_ROWS)
    x = rows_of(x, row, sizes, x_strides, x_stride, head, begin, UNIT, ALIGNED[0])
    dx = rows_of(dx, row, sizes, dx_strides, dx_stride, head, begin, UNIT, ALIGNED[1])
    STEP: tl.constexpr = ALIGN if ALIGN > 0 else UNIT
    tile = load(x, kept, 0, x_stride, end, EMPTY, "", False, STEP, BLOCK_ROWS, BLOCK_COLS)
    by = tl.load(dloss + row_offset(row, sizes, dloss_strides), mask=kept, other=0.0).to(tl.float32)
    c, at, unit = fold(tl.load(m_of_row + row, mask=kept, other=0.0))
    slope = tl.load(slope_of_row + row, mask=kept, other=0.0) / unit * by
    hit = tl.where(own, (1.0 - smoothing) * by, 0.0)
    share = tl.zeros_like(hit)
    if WEIGHTED:
        weight += (head + begin) * weight_stride
        hit *= tl.load(weight + column * weight_stride, mask=own, other=0.0).to(tl.float32)
    if SMOOTH:
        share += tl.where(kept, by * (smoothing / n_classes), 0.0)
    if not SMOOTH:
        weight = None
    tile = scores(tile, kept, 0, end, cap, None, PACKED, BLOCK_COLS)
    out = gradient(
        tile, weight, weight_stride, c, at, slope, share, hit, column, 0, inside_tile(kept, 0, end, BLOCK_COLS), cap,
        SMOOTH, BLOCK_ROWS, BLOCK_COLS,
    )  # fmt: skip
    if ALIGN > 0:
        end_columns, end_exists = ends(part, head, body, n_units, UNIT, ALIGN)
        end_inside = end_exists & (scalar(kept.to(tl.int32)) > 0)
        end_tile = load_ends(x, end_columns, end_inside, EMPTY)
        if cap is not None:
            end_tile = tl.where(end_inside, softcap(end_tile, cap), EMPTY)
        end_out = end_gradient(
            end_tile, weight, weight_stride, c, at, slope, share, hit, column, end_columns, end_inside, cap, SMOOTH
        )
        store_ends(dx, end_out, end_columns, end_exists)
    store(dx, out, row_in, 0, dx_stride, whole_end, EVEN, STEP, BLOCK_ROWS, BLOCK_COLS)


@triton.jit(do_not_specialize=["tiles"])
def scale_kernel(
    factor, x, sizes, x_strides, x_stride, n_rows, n_cols, tiles, parts,
    EACH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """x *= factor, a scalar; nothing is read or written where that is 1. NaN of 0 * NaN as in a product."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            row = (tile // parts).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            column = (tile % parts).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
            inside = (row < n_rows)[:, None] & (column < tl.cast(n_cols, tl.int64) * EACH)[None, :]
            at = x + (row_offset(row, sizes, x_strides) * EACH)[:, None] + (column * x_stride)[None, :]
            value = tl.load(at, mask=inside, other=0.0).to(tl.float32) * by
            tl.store(at, value.to(x.dtype.element_ty), mask=inside)


# ---- launchers ---------------------------------------------------------------------------------------------


def _plan_gradient(
    inputs: Tensors, outputs: Tensors, first: int, n_classes: int, ignore_index: int, smoothing: float,
    cap: float | None,
) -> Launch:  # fmt: skip
    (dloss, x, target, weight, _, _), (dx,) = inputs, outputs
    rows = layout(GRADIENT, x, dx, per_row=(dloss, target), config_of=loss_config)
    rows = replace(rows, parts=pieces(rows.config, rows.n_cols))
    args = (
        rows.sizes, *rows.strides, *rows.per_row, x.stride(-1), dx.stride(-1),
        0 if weight is None else weight.stride(0), *rows.lengths, rows.parts.count, first, n_classes, ignore_index,
        smoothing, cap,
    )  # fmt: skip
    options = rows.options | {"SMOOTH": smoothing > 0.0, "WEIGHTED": weight is not None, "PACKED": rows.pairs(x)}
    return Launch(cross_entropy_backward_kernel, rows.programs, args, options)


def _plan_scale(inputs: Tensors, outputs: Tensors) -> Launch:
    _, x = inputs
    rows = layout(GRADIENT, x, config_of=loss_config)
    config = rows.config
    parts = triton.cdiv(rows.n_cols, config.block_cols)
    tiles = triton.cdiv(rows.n_rows, config.block_rows) * parts
    programs = min(tiles, SCALE_PROGRAMS * device(x.get_device()).multiprocessors)
    args = (rows.sizes, *rows.strides, x.stride(-1), rows.n_rows, rows.n_cols // rows.unit, tiles, parts)
    options = {"BLOCK_ROWS": config.block_rows, "BLOCK_COLS": config.block_cols, "num_warps": config.num_warps}
    return Launch(scale_kernel, programs, args, options | {"EACH": rows.unit})


def cross_entropy_gradient(
    dloss: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, m: torch.Tensor,
    slope: torch.Tensor, first: int, classes: int, ignore_index: int, label_smoothing: float, softcap: float | None,
    dx: torch.Tensor,
) -> None:  # fmt: skip
    """Writes the gradient into dx, which may be x."""
    if x.numel() > 0:
        launch(
            _plan_gradient, (dloss, x, target, weight, m, slope), (dx,), first, classes, ignore_index, label_smoothing,
            softcap,
        )  # fmt: skip


def cross_entropy_backward(
    dloss: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    m: torch.Tensor,
    slope: torch.Tensor,
    first: int,
    classes: int,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
) -> torch.Tensor:
    """The gradient of x for dloss (...), by m and slope of `cross_entropy_forward`; see `reference`."""
    dx = torch.empty_like(x)
    options = first, classes, ignore_index, label_smoothing, softcap
    cross_entropy_gradient(dloss, x, target, weight, m, slope, *options, dx)
    return dx


def scale_backward(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    """gradient *= factor, a scalar tensor, where it is not 1; see `reference`."""
    if gradient.numel() > 0:
        launch(_plan_scale, (factor, gradient), ())
