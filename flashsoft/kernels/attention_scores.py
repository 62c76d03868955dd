"""From products to scores: scale, softcap, bias and ALiBi, in that order; and what dropout keeps.

Where a bias or ALiBi leaves scores in their own units, `unit` is 1; else the products themselves are the scores, in
units of 1 / scale, or a softcap's tanh in those of the cap, and the exponent's one FMA scales them for nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .attention_terms import at_head, tile_of
from .softcap import tanh, tanh_slope

ROUNDS: tl.constexpr = tl.constexpr(7)  # of Philox4x32: enough for the statistical tests of its authors


@triton.jit
def _height(scale, terms):
    """What products are multiplied by, or, with a softcap, their tanh."""
    if terms.softcap is None:
        return scale
    else:
        return terms.softcap


@triton.jit
def unit(scale, terms):
    """What scores are to be multiplied by, for a head of this scale > 0."""
    if (terms.bias is None) and (terms.slopes is None):
        return _height(scale, terms)
    else:
        return 1.0


@triton.jit
def distance(row0, column0, rows, columns, place):
    """|i + Sk - Sq - j|, exact in float32 below 2^24."""
    return tl.abs(rows + (row0 + place.offset - column0) - columns).to(tl.float32)


@triton.jit
def bias_of(row0, column0, rows, columns, terms, place, TOGETHER: tl.constexpr):
    """The bias of a tile, if there is one.

    TOGETHER: so many neighbouring keys lie all below Sk or all beyond it, a power of two, and loads are no wider; None:
    all keys lie below.

    To be called before the product of queries and keys: then Triton computes scores in the layout that the product
    leaves them in, otherwise in the one that a bias is best loaded in, and some of them twice.
    """
    if terms.bias is None:
        return 0.0
    else:
        inside = rows < place.Sq - row0
        if TOGETHER is not None:
            inside = inside & (columns // TOGETHER * TOGETHER < place.Sk - column0)
        pointers = tile_of(terms.bias, terms.bias_strides, place, row0, column0, rows, columns)
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def scores(x, bias, row0, column0, rows, columns, scale, terms, place):
    """The scores of a tile, whose first are row0 and column0, shaped as its products x, before the mask."""
    if terms.softcap is not None:
        x = tanh(x * (scale * (1.0 / terms.softcap)))
    if (terms.bias is not None) or (terms.slopes is not None):
        x = x * _height(scale, terms)
    if terms.bias is not None:
        x += bias.to(tl.float32)
    if terms.slopes is not None:
        slope = tl.load(at_head(terms.slopes, terms.slopes_strides, place)).to(tl.float32)
        x -= slope * distance(row0, column0, rows, columns, place)
    return x


@triton.jit
def through_softcap(ds, x, scale, terms):
    """The gradient of scores as one of scale * x, for the products x."""
    if terms.softcap is not None:
        ds = ds * tanh_slope(x * (scale * (1.0 / terms.softcap)))
    return ds


@triton.jit
def _survives(quads, i, terms, place):
    """(rows of quads, columns of i, 2, 2) and so on: whether each of four words of Philox is at least the threshold."""
    a, b, c, d = tl.philox(tl.load(terms.seed), quads, i, place.stream, 0, ROUNDS)
    least = terms.threshold
    even = tl.join((a >= least).to(tl.int8), (c >= least).to(tl.int8))
    odd = tl.join((b >= least).to(tl.int8), (d >= least).to(tl.int8))
    return tl.join(even, odd)


@triton.jit
def kept(rows, column0, terms, place, BLOCK_N: tl.constexpr):
    """(rows, BLOCK_N): which weights of the keys from column0, a multiple of 4, dropout leaves."""
    quads = column0 // 4 + tl.arange(0, BLOCK_N // 4)
    words = _survives(quads[None, :], rows[:, None], terms, place)
    return tl.reshape(words, (rows.shape[0], BLOCK_N)) != 0


@triton.jit
def kept_by_keys(rows, column0, terms, place, BLOCK_N: tl.constexpr):
    """`kept`, keys by queries."""
    quads = column0 // 4 + tl.arange(0, BLOCK_N // 4)
    words = _survives(quads[:, None], rows[None, :], terms, place)
    return tl.reshape(tl.permute(words, (0, 2, 3, 1)), (BLOCK_N, rows.shape[0])) != 0
