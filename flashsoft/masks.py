"""Masks as values: what a query may attend to, said without building it.

`Causal` and `Window` are bands around a diagonal: key j is visible to query i iff lo <= j - i <= hi. A boolean
tensor (True = takes part) is a mask too. All of them combine with `&`, and every combination comes down to one
`MaskSpec`: two optional integers and an optional tensor, which is all that kernels ever see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Align = str | int
FAR = 1 << 40  # further than any key: what lies beyond makes no difference, and must fit the operators' integers


class MaskSpec(NamedTuple):
    """Key j is visible to query i iff lo <= j - i <= hi and keep[..., i, j]; None sets no limit."""

    lo: int | None = None
    hi: int | None = None
    keep: torch.Tensor | None = None


class Mask:
    """Base of the mask values. `a & b` keeps what both keep; `b` may be a boolean tensor."""

    def __and__(self, other: Mask | torch.Tensor) -> Mask:
        if not isinstance(other, Mask | torch.Tensor):
            return NotImplemented
        return All((self, other))

    __rand__ = __and__

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Tensor & mask comes here from torch, in eager code and when torch.compile traces either order."""
        joins = (torch.Tensor.__and__, torch.Tensor.__rand__, torch.Tensor.bitwise_and, torch.bitwise_and)
        return All(tuple(args)) if func in joins else NotImplemented

    def _parts(self) -> tuple[Mask | torch.Tensor, ...]:
        return (self,)


@dataclass(frozen=True)
class Causal(Mask):
    """Key j is visible to query i iff j <= i + offset.

    `align` sets the offset: `"lower_right"` = Sk - Sq, so that the last query sees every key (FlashAttention,
    cuDNN, a KV cache); `"upper_left"` = 0 (torch's `is_causal`); or any integer.

    >>> Causal() & Window(left=4095)
    All(terms=(Causal(align='lower_right'), Window(left=4095, right=0, align='lower_right')))
    """

    align: Align = "lower_right"

    def __post_init__(self) -> None:
        _check_align(self.align)


@dataclass(frozen=True)
class Window(Mask):
    """Key j is visible to query i iff i + offset - left <= j <= i + offset + right, both ends included.

    `left` and `right` count keys beside the diagonal; None sets no limit on that side. A causal window of W
    keys, the own one among them, is `Window(left=W - 1)`. `align` is as in `Causal`.
    """

    left: int | None
    right: int | None = 0
    align: Align = "lower_right"

    def __post_init__(self) -> None:
        for name, reach in (("left", self.left), ("right", self.right)):
            if reach is not None and (isinstance(reach, bool) or not isinstance(reach, int)):
                raise TypeError(f"Window: {name} must be an int or None, got {type(reach).__name__}")
            if reach is not None and reach < 0:
                raise ValueError(f"Window: {name} must be >= 0, or None for no limit, got {reach}")
        _check_align(self.align)


@dataclass(frozen=True, eq=False)
class All(Mask):
    """What every term keeps: the value of `a & b`."""

    terms: tuple[Mask | torch.Tensor, ...]

    def _parts(self) -> tuple[Mask | torch.Tensor, ...]:
        return tuple(part for term in self.terms for part in (term._parts() if isinstance(term, Mask) else (term,)))


MaskLike = Mask | torch.Tensor | None


def banded(mask: MaskLike) -> bool:
    """Whether a mask is nothing but numbers."""
    return mask is None or type(mask) in (Causal, Window)


def terms(mask: MaskLike) -> tuple[Mask | torch.Tensor, ...]:
    """The bands and tensors that a mask is the conjunction of."""
    if mask is None:
        return ()
    return mask._parts() if isinstance(mask, Mask) else (mask,)


def resolve(mask: MaskLike, Sq: int, Sk: int) -> MaskSpec:
    """The one form kernels take, for Sq queries and Sk keys."""
    lo: int | None = None
    hi: int | None = None
    keep: torch.Tensor | None = None
    for term in terms(mask):
        term_lo: int | None = None
        term_hi: int | None = None
        if isinstance(term, torch.Tensor):
            keep = term if keep is None else keep & term
        elif isinstance(term, Causal):
            term_hi = _offset(term.align, Sq, Sk)
        elif isinstance(term, Window):
            offset = _offset(term.align, Sq, Sk)
            term_lo = None if term.left is None else offset - min(term.left, FAR)
            term_hi = None if term.right is None else offset + min(term.right, FAR)
        if term_lo is not None:
            lo = term_lo if lo is None else max(lo, term_lo)
        if term_hi is not None:
            hi = term_hi if hi is None else min(hi, term_hi)
    return MaskSpec(lo, hi, keep)


def clamp_band(lo: int | None, hi: int | None, Sq: int, Sk: int) -> tuple[int | None, int | None]:
    """The same band with bounds that 32-bit arithmetic on positions cannot overflow: j - i lies within -Sq..Sk."""
    if lo is not None and hi is not None and lo > hi:
        return Sk, -Sq  # nothing is visible, and so nothing is to be loaded either
    return None if lo is None else max(-Sq, min(lo, Sk)), None if hi is None else max(-Sq, min(hi, Sk))


def _offset(align: Align, Sq: int, Sk: int) -> int:
    if align == "lower_right":
        return Sk - Sq
    return 0 if isinstance(align, str) else max(-FAR, min(align, FAR))


def _check_align(align: Align) -> None:
    known = align in ("lower_right", "upper_left") if isinstance(align, str) else isinstance(align, int)
    if not known or isinstance(align, bool):
        raise ValueError(f'align must be "lower_right", "upper_left" or an int, got {align!r}')
