"""What the cross entropy kernels do with a program's part of a row: its state forward, its gradient backward.

Of a row the forward keeps m and s, and what of the loss is linear in the scores: that of the label, and with label
smoothing the sum of w_j * (x_j - m). With `slope` = dloss/dlse / s the gradient of a row is

    dx_j = exp(x_j - m) * slope - share * w_j - (j = label) * hit

Nothing is read of rows that are not kept. Padding reads as -inf, after the soft cap, so that it has no weight.
"""

import triton
import triton.language as tl

from .row_tiles import again, scalar
from .softcap import softcap
from .softmax import exponential_folded, fold, pivot
from .tiles import row_offset

EMPTY: tl.constexpr = tl.constexpr(float("-inf"))


@triton.jit
def labels(target, row, row_in, sizes, strides, first, ignore_index):
    """The rows' labels (int64), counted from class `first`, and which rows are kept."""
    label = tl.load(target + row_offset(row, sizes, strides), mask=row_in, other=0).to(tl.int64)
    return label - first, row_in & (label != ignore_index)


@triton.jit
def label_column(label, kept, part, head, begin, end, body, n_units, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """The column of a row's label, counted from where the program's part begins, and whether it is the program's."""
    column = label - head
    inside = kept & (label >= 0) & (label < tl.cast(n_units, tl.int64) * UNIT)
    own = (column >= begin) & (column < begin + end)
    if ALIGN > 0:
        own = own | ((part == 0) & ((column < 0) | (column >= body)))
    return column - begin, inside & own


@triton.jit
def read_end(kept, end, BLOCK_ROWS: tl.constexpr):
    """Columns that are read of a part of so many: none where a program's only row is not kept."""
    if BLOCK_ROWS == 1:
        return tl.where(scalar(kept.to(tl.int32)) > 0, end, 0)
    else:
        return end


@triton.jit
def inside_tile(kept, start, end, BLOCK_COLS: tl.constexpr):
    """Where a tile (rows, columns) holds scores."""
    return kept[:, None] & (tl.arange(0, BLOCK_COLS) < end - start)[None, :]


@triton.jit
def larger(a, b, PAIRS: tl.constexpr):
    """The larger of two tiles of scores as stored; of 16-bit ones two at a time if PAIRS. NaN may be dropped."""
    if not PAIRS:
        return tl.maximum(a.to(tl.float32), b.to(tl.float32))
    elif a.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def scores(tile, kept, start, end, cap, nothing, PACKED: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """A tile as it was read, padded with -inf, as scores: in float32, capped."""
    x = again(tile, nothing, PACKED)
    if cap is not None:
        x = tl.where(inside_tile(kept, start, end, BLOCK_COLS), softcap(x, cap), EMPTY)
    return x


@triton.jit
def class_weights(weight, stride, column, inside):
    """The weights of classes at these columns, float32, 0 where not inside."""
    return tl.load(weight + column.to(tl.int64) * stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def part_state(
    tiles, end_tile, end_inside, end_columns, weight, weight_stride, kept, end, cap, nothing,
    SMOOTH: tl.constexpr, PAIRS: tl.constexpr, PACKED: tl.constexpr, TILES: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """m, s, the sum of w_j * (x_j - m) and that of w_j (both 0 unless SMOOTH), each (rows,), of a part.

    tiles: TILES of them, as read; end_tile: scores of a row's ends, or None; weight: where the part's classes begin,
    or None for 1 each.
    """
    top = tiles[0]
    for t in tl.static_range(1, TILES):
        top = larger(top, tiles[t], PAIRS)
    m = tl.max(top.to(tl.float32), 1)
    if cap is not None:  # the cap keeps the order
        m = tl.where(kept & (end > 0), softcap(m, cap), EMPTY)
    if end_tile is not None:
        m = tl.maximum(m, tl.max(end_tile, 0))
    c, at, unit = fold(m)
    whole = pivot(m)
    lanes = tl.zeros(tiles[0].shape, tl.float32)
    lanes_of_u = tl.zeros(tiles[0].shape, tl.float32)
    lanes_of_w = tl.zeros(tiles[0].shape, tl.float32)
    for t in tl.static_range(TILES):
        x = scores(tiles[t], kept, t * BLOCK_COLS, end, cap, nothing, PACKED, BLOCK_COLS)
        p = exponential_folded(x, c[:, None], at[:, None])
        lanes = p if t == 0 else lanes + p
        if SMOOTH:
            inside = inside_tile(kept, t * BLOCK_COLS, end, BLOCK_COLS)
            away = x - whole[:, None]
            if weight is not None:
                column = t * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
                w = class_weights(weight, weight_stride, column[None, :], inside)
                away = away * w
                lanes_of_w += w
            lanes_of_u += tl.where(inside, away, 0.0)
    s = tl.sum(lanes, 1)
    u = tl.sum(lanes_of_u, 1)
    w_sum = tl.sum(lanes_of_w, 1)
    if SMOOTH and weight is None:
        w_sum = tl.where(kept, end, 0).to(tl.float32)
    if end_tile is not None:
        s += tl.sum(exponential_folded(end_tile, scalar(c), scalar(at)), 0)
        if SMOOTH:
            away = end_tile - scalar(whole)
            if weight is not None:
                w = class_weights(weight, weight_stride, end_columns, end_inside)
                away = away * w
                w_sum += tl.sum(w, 0)
            else:
                w_sum += tl.sum(end_inside.to(tl.float32), 0)
            u += tl.sum(tl.where(end_inside, away, 0.0), 0)
    return m, tl.div_rn(s, unit), u, w_sum  # at least 1 where there is mass, so that no loss is below 0


@triton.jit
def gradient(
    x, weight, weight_stride, c, at, slope, share, hit, column, start, inside, cap,
    SMOOTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of scores x, by rows' c, at, slope (over unit), share, hit and the column of the label."""
    out = exponential_folded(x, c[:, None], at[:, None]) * slope[:, None]
    if SMOOTH:
        if weight is not None:
            w = class_weights(weight, weight_stride, (start + tl.arange(0, BLOCK_COLS))[None, :], inside)
            out -= share[:, None] * w
        else:
            out -= share[:, None]
    place = column - start
    if BLOCK_ROWS == 1:  # of the tiles of a row one has the label
        only = scalar(tl.where((place >= 0) & (place < BLOCK_COLS), place, -1).to(tl.int32))
        if only >= 0:
            out = tl.where((tl.arange(0, BLOCK_COLS) == only)[None, :], out - hit[:, None], out)
    else:
        only = tl.where((place >= 0) & (place < BLOCK_COLS), place, -1).to(tl.int32)
        out = tl.where(tl.arange(0, BLOCK_COLS)[None, :] == only[:, None], out - hit[:, None], out)
    if cap is not None:
        out = out * capped_slope(x, cap)
    return out


@triton.jit
def capped_slope(x, cap):
    """The derivative of the soft cap where it gave x."""
    u = x * (1.0 / cap)
    return tl.maximum(1.0 - u * u, 0.0)  # 0 for padding


@triton.jit
def end_gradient(
    x, weight, weight_stride, c, at, slope, share, hit, column, end_columns, end_inside, cap, SMOOTH: tl.constexpr
):  # fmt: skip
    """`gradient` for the ends of a program's only row."""
    out = exponential_folded(x, scalar(c), scalar(at)) * scalar(slope)
    if SMOOTH:
        if weight is not None:
            out -= scalar(share) * class_weights(weight, weight_stride, end_columns, end_inside)
        else:
            out -= scalar(share)
    out = tl.where(end_columns == scalar(column), out - scalar(hit), out)
    if cap is not None:
        out = out * capped_slope(x, cap)
    return out
