"""Masks as values: what a query may attend to, said without building it.

`Causal` and `Window` are bands around a diagonal: key j is visible to query i iff lo <= j - i <= hi. `Segments` lets
only equal ids meet, `Padding` hides the end of a batch entry's keys, and a boolean tensor (True = takes part) is a mask
too. All of them combine with `&`, and every combination comes down to one `MaskSpec`, which is all that kernels see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

Align = str | int
FAR = 1 << 40  # further than any key: what lies beyond makes no difference, and must fit the operators' integers


class MaskSpec(NamedTuple):
    """Key j is visible to query i iff it is by each of these; None sets no limit.

    lo, hi: lo <= j - i <= hi. keep: keep[..., i, j], broadcast to the scores.
    query_ids, key_ids: query_ids[b, i] == key_ids[b, j]; (B or 1, Sq) and (B or 1, Sk), both or neither.
    lengths: j < lengths[b]; (B,).
    """

    lo: int | None = None
    hi: int | None = None
    keep: torch.Tensor | None = None
    query_ids: torch.Tensor | None = None
    key_ids: torch.Tensor | None = None
    lengths: torch.Tensor | None = None


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
class Segments(Mask):
    """Query i sees key j iff their ids are equal: documents packed into one row do not see each other.

    `ids` is one int32 or int64 tensor (S,) or (B, S) for queries and keys alike, or a pair (query_ids, key_ids) of
    sizes (Sq,) or (B, Sq) and (Sk,) or (B, Sk). Ids are any integers in any order.

    >>> from flashsoft import attention, Causal
    >>> q = k = v = torch.randn(1, 2, 5, 8)
    >>> out = attention(q, k, v, mask=Causal() & Segments(torch.tensor([0, 0, 1, 1, 1])))
    >>> torch.allclose(out[:, :, 2], v[:, :, 2])  # the first of its document sees itself only
    True
    """

    ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor]

    def __post_init__(self) -> None:
        pair = self.ids if isinstance(self.ids, tuple) else (self.ids, self.ids)
        if len(pair) != 2 or not all(isinstance(ids, torch.Tensor) for ids in pair):
            got = "that" if isinstance(self.ids, tuple) else type(self.ids).__name__
            raise TypeError(f"Segments: ids must be a tensor or a pair (query_ids, key_ids), got {got}")
        for ids in pair:
            _check_integers("Segments: ids", ids)
            if ids.ndim not in (1, 2):
                raise ValueError(f"Segments: ids must be (S,) or (B, S), got shape {tuple(ids.shape)}")

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of queries and of keys, each (B or 1, S)."""
        query_ids, key_ids = self.ids if isinstance(self.ids, tuple) else (self.ids, self.ids)
        return (
            query_ids if query_ids.ndim == 2 else query_ids.unsqueeze(0),
            key_ids if key_ids.ndim == 2 else key_ids.unsqueeze(0),
        )


@dataclass(frozen=True, eq=False)
class Padding(Mask):
    """Keys that a batch entry does not use take no part: padding, or what a cache has not filled yet.

    `keys` is how many each entry uses, int32 or int64 (B,): key j takes part iff j < keys[b]. Or it is a boolean
    (B, Sk), True = takes part, for padding that is not at the end.

    >>> from flashsoft import attention
    >>> q, k, v = torch.randn(2, 1, 3, 8), torch.randn(2, 1, 4, 8), torch.randn(2, 1, 4, 8)
    >>> out = attention(q, k, v, mask=Padding(torch.tensor([4, 1])))
    >>> torch.allclose(out[1], v[1, :, :1].expand(1, 3, 8))
    True
    """

    keys: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.keys, torch.Tensor):
            raise TypeError(f"Padding: keys must be a tensor, got {type(self.keys).__name__}")
        if self.keys.dtype != torch.bool:
            _check_integers("Padding: keys", self.keys, "a boolean tensor, or ")
        expected, ndim = ("boolean (B, Sk)", 2) if self.keys.dtype == torch.bool else ("lengths (B,)", 1)
        if self.keys.ndim != ndim:
            raise ValueError(f"Padding: keys must be {expected}, got shape {tuple(self.keys.shape)}")


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


def resolve(mask: MaskLike, Sq: int, Sk: int, ndim: int = 4) -> MaskSpec:
    """The one form kernels take, for Sq queries and Sk keys, in scores of `ndim` dimensions."""
    lo: int | None = None
    hi: int | None = None
    keep: torch.Tensor | None = None
    ids: tuple[torch.Tensor, torch.Tensor] | None = None
    lengths: torch.Tensor | None = None
    for term in terms(mask):
        term_lo: int | None = None
        term_hi: int | None = None
        kept: torch.Tensor | None = None
        if isinstance(term, torch.Tensor):
            kept = term
        elif isinstance(term, Causal):
            term_hi = _offset(term.align, Sq, Sk)
        elif isinstance(term, Window):
            offset = _offset(term.align, Sq, Sk)
            term_lo = None if term.left is None else offset - min(term.left, FAR)
            term_hi = None if term.right is None else offset + min(term.right, FAR)
        elif isinstance(term, Segments):
            ids = term.pair if ids is None else _both(ids, term.pair)
        elif isinstance(term, Padding) and term.keys.dtype == torch.bool:
            kept = _by_entry(term.keys, ndim, keys=True)
        elif isinstance(term, Padding):
            lengths = term.keys if lengths is None else torch.minimum(lengths, term.keys)
        if kept is not None:
            keep = kept if keep is None else keep & kept
        if term_lo is not None:
            lo = term_lo if lo is None else max(lo, term_lo)
        if term_hi is not None:
            hi = term_hi if hi is None else min(hi, term_hi)
    query_ids, key_ids = ids or (None, None)
    return MaskSpec(lo, hi, keep, query_ids, key_ids, lengths)


def built(spec: MaskSpec, Sk: int, ndim: int) -> MaskSpec:
    """The same with ids and lengths built out to a boolean tensor, for scores of `ndim` dimensions."""
    keep = spec.keep
    if spec.query_ids is not None and spec.key_ids is not None:
        met = _by_entry(spec.query_ids, ndim, keys=False) == _by_entry(spec.key_ids, ndim, keys=True)
        keep = met if keep is None else keep & met
    if spec.lengths is not None:
        used = torch.arange(Sk, device=spec.lengths.device) < spec.lengths.unsqueeze(-1)
        used = _by_entry(used, ndim, keys=True)
        keep = used if keep is None else keep & used
    return MaskSpec(spec.lo, spec.hi, keep)


def _by_entry(x: torch.Tensor, ndim: int, *, keys: bool) -> torch.Tensor:
    """(B or 1, S) as scores of `ndim` dimensions, along keys or along queries."""
    size = (1, x.shape[1]) if keys else (x.shape[1], 1)
    return x.reshape(*((x.shape[0], *(1,) * (ndim - 3)) if ndim > 2 else ()), *size)


def _both(
    a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that are equal iff both are: each is replaced by its rank, of which there are no more than Sq + Sk."""
    length = a[0].shape[1]
    rank_a, rank_b = _ranks(torch.cat(_same_batch(*a), -1)), _ranks(torch.cat(_same_batch(*b), -1))
    rank = rank_a * rank_a.shape[1] + rank_b
    return rank[:, :length], rank[:, length:]


def _same_batch(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    size = max(x.shape[0], y.shape[0]) if x.shape[0] and y.shape[0] else 0
    return x.expand(size, -1), y.expand(size, -1)


def _ranks(ids: torch.Tensor) -> torch.Tensor:
    """Of each entry among the distinct ones of its row (B, S), int64."""
    ordered, order = ids.long().sort(-1)
    rank = (ordered.diff(dim=-1) != 0).cumsum(-1)
    return torch.zeros_like(order).scatter(-1, order[:, 1:], rank)


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


def _check_integers(name: str, value: torch.Tensor, other: str = "") -> None:
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be {other}int32 or int64, got {value.dtype}")
