"""The gradients of fused softmax, from y: to x, temperature, and a bias of any broadcast form.

With c = softcap(scale * x) and z = c / T + bias: dz = y * (dy - sum(y * dy) + dlse), dc = dz / T, and
dT = -sum(dz * c) / T^2. y is 0 where nothing was kept, so masks and limits are not needed again. Every sum has a fixed
order; there are no atomics. y, dy and, for dT and a softcap, x are read once and dx written once; rows too wide for a
tile read y and dy again, from L2.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from ..tuning import logits as tuning
from .launch import Launch, Tensors, launch
from .options import row_inverse, split_temperature
from .scores import fold_given, raw_score
from .softcap import softcap_slope
from .tiles import fold_rows, row_offset


@triton.jit
def weights_tile(y_rows, y_step, dy_rows, dy_step, columns, inside):
    """y and dy (rows, columns), fp32; dy is 0 where y is, so that what was not kept does not leak."""
    j = columns[None, :].to(tl.int64)
    y = tl.load(y_rows[:, None] + j * y_step, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_rows[:, None] + j * dy_step, mask=inside, other=0.0).to(tl.float32)
    return y, tl.where(y == 0.0, 0.0, dy)


@triton.jit
def score_gradient(y, dy, shift):
    """dz = y * (dy - shift), 0 where nothing was kept, with shift = sum(y * dy) - dlse of the row."""
    return tl.where(y == 0.0, 0.0, y * (dy - shift[:, None]))


@triton.jit
def row_shift(dot, dlse_ptr, row, live, sizes, strides):
    """sum(y * dy) - dlse."""
    if dlse_ptr is not None:
        dlse = tl.load(dlse_ptr + row_offset(row, sizes, strides), mask=live, other=0.0)
        return dot - dlse.to(tl.float32)
    else:
        return dot


@triton.jit
def kept_x(y, x_rows, x_step, columns, inside):
    """x where kept, elsewhere 0."""
    j = columns[None, :].to(tl.int64)
    x = tl.load(x_rows[:, None] + j * x_step, mask=inside, other=0.0).to(tl.float32)
    return tl.where(y == 0.0, 0.0, x)


@triton.jit
def store_gradients(
    dz, y, inverse, factor, cap, x_rows, x_step, dx_rows, dx_step, dbias_ptr, dbias_at, columns, inside
):  # fmt: skip
    """dx, and dz as the gradient of a bias of x's size, contiguous."""
    j = columns[None, :].to(tl.int64)
    dx = dz * inverse[:, None]
    if cap is not None:
        dx *= softcap_slope(raw_score(kept_x(y, x_rows, x_step, columns, inside), factor, None), cap)
    if factor is not None:
        dx *= factor
    tl.store(dx_rows[:, None] + j * dx_step, dx.to(dx_rows.dtype.element_ty), mask=inside)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + (dbias_at[:, None] + j), dz.to(dbias_ptr.dtype.element_ty), mask=inside)


@triton.jit
def store_row(ptr, row, live, value):
    """Writes one value a row where there is somewhere to."""
    if ptr is not None:
        tl.store(ptr + row, value.to(ptr.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    dy_ptr, dlse_ptr, x_ptr, y_ptr, temperature_ptr, dx_ptr, dtemperature_ptr, dbias_ptr,
    shift_ptr, total_ptr, inverse, factor, cap, rows, N, sizes,
    dy_strides, dlse_strides, x_strides, y_strides, dx_strides,
    dy_step, x_step, y_step, dx_step,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    """A program owns ROWS rows, read once on chip if BLOCK holds them, otherwise twice in a loop over tiles.

    Writes dx; dtemperature, and dz itself as the gradient of a bias of x's size; and for one that was
    broadcast each row's shift or sum of dz. Each where there is somewhere to.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    inverse, _ = row_inverse(inverse, temperature_ptr, row, live, WITH_BIAS=False)
    dy_rows = dy_ptr + row_offset(row, sizes, dy_strides)
    y_rows = y_ptr + row_offset(row, sizes, y_strides)
    dx_rows = dx_ptr + row_offset(row, sizes, dx_strides)
    dbias_at = row * N
    x_rows = x_ptr + row_offset(row, sizes, x_strides)
    lane = tl.arange(0, BLOCK)

    if ONE_TILE:
        columns = lane
        inside = live[:, None] & (columns < N)[None, :]
        y, dy = weights_tile(y_rows, y_step, dy_rows, dy_step, columns, inside)
        shift = row_shift(tl.sum(y * dy, 1), dlse_ptr, row, live, sizes, dlse_strides)
        dz = score_gradient(y, dy, shift)
        store_gradients(
                dz, y, inverse, factor, cap, x_rows, x_step, dx_rows, dx_step, dbias_ptr, dbias_at, columns, inside
            )  # fmt: skip
        total = tl.sum(dz, 1)
        if dtemperature_ptr is not None:
            product = tl.sum(dz * raw_score(kept_x(y, x_rows, x_step, columns, inside), factor, cap), 1)
    else:
        dots = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, N, BLOCK):
            columns = start + lane
            inside = live[:, None] & (columns < N)[None, :]
            y, dy = weights_tile(y_rows, y_step, dy_rows, dy_step, columns, inside)
            dots += y * dy
        shift = row_shift(tl.sum(dots, 1), dlse_ptr, row, live, sizes, dlse_strides)
        totals = tl.zeros((ROWS, BLOCK), tl.float32)
        products = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in range(0, N, BLOCK):
            columns = start + lane
            inside = live[:, None] & (columns < N)[None, :]
            y, dy = weights_tile(y_rows, y_step, dy_rows, dy_step, columns, inside)
            dz = score_gradient(y, dy, shift)
            store_gradients(
                dz, y, inverse, factor, cap, x_rows, x_step, dx_rows, dx_step, dbias_ptr, dbias_at, columns, inside
            )  # fmt: skip
            totals += dz
            if dtemperature_ptr is not None:
                products += dz * raw_score(kept_x(y, x_rows, x_step, columns, inside), factor, cap)
        total = tl.sum(totals, 1)
        product = tl.sum(products, 1)

    store_row(shift_ptr, row, live, shift)
    store_row(total_ptr, row, live, total)
    if dtemperature_ptr is not None:
        store_row(dtemperature_ptr, row, live, -product * inverse * inverse)


@triton.jit
def bias_gradient_kernel(
    dy_ptr, y_ptr, shift_ptr, out_ptr, tiles, B, R, share, N,
    kept_sizes, dy_kept, y_kept, shift_kept, reduced_sizes, dy_reduced, y_reduced, shift_reduced,
    dy_step, y_step,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program owns a tile of one bias row, and sums dz over its share of the R rows it is broadcast to.

    y and dy are read once more. out is (splits, B, N).
    """
    pid = tl.program_id(0).to(tl.int64)
    b = pid // tiles % B
    split = pid // tiles // B
    columns = (pid % tiles * BLOCK).to(tl.int32) + tl.arange(0, BLOCK)
    dy_base = dy_ptr + row_offset(b, kept_sizes, dy_kept)
    y_base = y_ptr + row_offset(b, kept_sizes, y_kept)
    shift_base = shift_ptr + row_offset(b, kept_sizes, shift_kept)
    end = tl.minimum((split + 1) * share, R)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(split * share, end, ROWS):
        r = start + tl.arange(0, ROWS).to(tl.int64)
        live = r < end
        inside = live[:, None] & (columns < N)[None, :]
        y, dy = weights_tile(
            y_base + row_offset(r, reduced_sizes, y_reduced), y_step,
            dy_base + row_offset(r, reduced_sizes, dy_reduced), dy_step, columns, inside,
        )  # fmt: skip
        shift = tl.load(shift_base + row_offset(r, reduced_sizes, shift_reduced), mask=live, other=0.0)
        acc += score_gradient(y, dy, shift)
    out = tl.sum(acc, 0)
    tl.store(out_ptr + (split * B + b) * N + columns, out.to(out_ptr.dtype.element_ty), mask=columns < N)


def _plan(inputs: Tensors, outputs: Tensors, *numbers: float | None) -> Launch:
    dy, dlse, x, y, _ = inputs
    dx = outputs[0]
    N, rows = x.shape[-1], x.numel() // x.shape[-1]
    row_dlse = None if dlse is None else dlse.unsqueeze(-1)
    sizes, strides = fold_given(dy, row_dlse, x, y, dx)
    steps = (dy.stride(-1), x.stride(-1), y.stride(-1), dx.stride(-1))
    config = tuning.backward(N)
    options = dict(ROWS=config.rows, BLOCK=config.block, ONE_TILE=config.one_tile, num_warps=config.num_warps)
    args = (*numbers, rows, N, sizes, *strides, *steps)
    return Launch(backward_kernel, triton.cdiv(rows, config.rows), args, options)


def fused_softmax_backward(
    dy: torch.Tensor,
    dlse: torch.Tensor | None,
    x: torch.Tensor,
    y: torch.Tensor,
    temperature: float | torch.Tensor,
    scale: float | None,
    softcap: float | None,
    bias: torch.Tensor | None,
    need_temperature: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """dx, dtemperature (one a row), dbias (as bias); the last two None unless needed; see `reference`."""
    dx = torch.empty_like(x)
    row_temperature, inverse = split_temperature(temperature, x, with_bias=False)
    dtemperature = None
    if need_temperature and row_temperature is not None:
        dtemperature = row_temperature.new_empty(row_temperature.shape)
    if x.numel() == 0:
        dtemperature = None if dtemperature is None else dtemperature.zero_()
        return dx, dtemperature, None if bias is None else bias.new_zeros(bias.shape)

    dbias = shift = total = None
    if bias is not None:
        if bias.shape == x.shape:
            dbias = bias.new_empty(bias.shape)
        elif bias.shape[-1] == x.shape[-1]:
            shift = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        else:
            total = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    launch(_plan, (dy, dlse, x, y, row_temperature), (dx, dtemperature, dbias, shift, total), inverse, scale, softcap)
    if bias is not None and shift is not None:
        dbias = _bias_gradient(dy, y, shift, bias)
    if bias is not None and total is not None:
        dbias = total.sum_to_size(bias.shape).to(bias.dtype)
    return dx, dtemperature, dbias


def _plan_bias(inputs: Tensors, outputs: Tensors, shape: torch.Size, config: tuning.BiasGradientConfig) -> Launch:
    dy, y, _ = inputs
    reduced = [size == 1 and full > 1 for size, full in zip(shape, y.shape, strict=True)]
    kept_index = tuple(0 if along else slice(None) for along in reduced)
    reduced_index = (*(slice(None) if along else 0 for along in reduced[:-1]), slice(None))
    kept_sizes, kept = fold_rows(*(t[kept_index] for t in inputs))
    reduced_sizes, over = fold_rows(*(t[reduced_index] for t in inputs))
    N, B = y.shape[-1], math.prod(shape[:-1])
    R = y.numel() // (B * N)
    tiles = triton.cdiv(N, config.block)
    args = (
        tiles, B, R, triton.cdiv(R, config.splits), N,
        kept_sizes, *kept, reduced_sizes, *over, dy.stride(-1), y.stride(-1),
    )  # fmt: skip
    options = dict(ROWS=config.rows, BLOCK=config.block, num_warps=config.num_warps)
    return Launch(bias_gradient_kernel, tiles * B * config.splits, args, options)


def _bias_gradient(dy: torch.Tensor, y: torch.Tensor, shift: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """dz summed over the row dimensions that bias, of y's length in the last one, was broadcast along."""
    N = y.shape[-1]
    config = tuning.bias_gradient(N, bias.numel() // N, y.numel() // bias.numel())
    out = bias.new_empty((config.splits, *bias.shape), dtype=bias.dtype if config.splits == 1 else torch.float32)
    launch(_plan_bias, (dy, y, shift), (out,), bias.shape, config)
    return out[0] if config.splits == 1 else out.sum(0).to(bias.dtype)
