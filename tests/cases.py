"""The shapes, masks and options under test, as data.

Triton's interpreter takes some 4 ms for each tile of keys a tile of queries meets, so that what runs there is
kept to a few tiles; GPU_SHAPES come on top where there is a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import oracle
import torch
from torch import Tensor

import flashsoft
from flashsoft import Causal, Padding, Segments, Window

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttentionCase:
    """Sizes of query (B, Hq, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, Dv), and options by name."""

    B: int
    Hq: int
    Hkv: int
    Sq: int
    Sk: int
    D: int
    Dv: int
    mask: str = "none"
    layout: str = "contiguous"
    scale: float | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        return self.B, self.Hq, self.Hkv, self.Sq, self.Sk, self.D, self.Dv

    def __str__(self) -> str:
        heads = f"h{self.Hq}" if self.Hq == self.Hkv else f"h{self.Hq}over{self.Hkv}"
        width = f"d{self.D}" if self.D == self.Dv else f"d{self.D}v{self.Dv}"
        options = [name for name in (self.mask, self.layout) if name not in ("none", "contiguous")]
        options += [f"scale{self.scale}"] if self.scale is not None else []
        return "-".join([f"b{self.B}", heads, f"s{self.Sq}x{self.Sk}", width, *options])


@dataclass(frozen=True)
class MaskCase:
    """A mask as users write it, and as a dense boolean from its definition."""

    given: Callable[[AttentionCase, torch.device], flashsoft.masks.Mask | Tensor | None]
    keep: Callable[[AttentionCase], Tensor | None]


def _random_keep(*shape: int) -> Tensor:
    """The same values whenever it is called for a shape, half of them True."""
    generator = torch.Generator().manual_seed(sum((i + 1) * size for i, size in enumerate(shape)))
    return torch.rand(*shape, generator=generator) > 0.5


def _tensor(shape: Callable[[AttentionCase], tuple[int, ...]]) -> MaskCase:
    return MaskCase(lambda c, device: _random_keep(*shape(c)).to(device), lambda c: _random_keep(*shape(c)))


def _band(mask: flashsoft.masks.Mask, left: int | None, right: int | None, offset: int | None = None) -> MaskCase:
    return MaskCase(
        lambda c, device: mask,
        lambda c: oracle.band(c.Sq, c.Sk, left, right, c.Sk - c.Sq if offset is None else offset),
    )


def _padding(c: AttentionCase) -> Tensor:
    """The last third of the first batch's keys takes no part."""
    keep = torch.ones(c.B, 1, 1, c.Sk, dtype=torch.bool)
    keep[0, ..., c.Sk - c.Sk // 3 :] = False
    return keep


def _dead_rows(c: AttentionCase) -> Tensor:
    keep = _random_keep(c.Sq, c.Sk)
    keep[:: max(c.Sq // 3, 1)] = False
    return keep


def _late(c: AttentionCase) -> Tensor:
    """Whole tiles of masked keys before the first that is kept."""
    keep = torch.zeros(c.Sq, c.Sk, dtype=torch.bool)
    keep[:, -3:] = True
    return keep


def _ids(c: AttentionCase, batch: int) -> tuple[Tensor, Tensor]:
    """Ids of queries and of keys, (batch, S): runs, out of order, some of them on one side only."""
    generator = torch.Generator().manual_seed(c.Sq + 31 * c.Sk)
    query_ids, key_ids = (
        torch.randint(-2, 3, (batch, (S + 4) // 5), generator=generator).repeat_interleave(5, -1)[:, :S]
        for S in (c.Sq, c.Sk)
    )
    return query_ids, key_ids


def _lengths_of(c: AttentionCase) -> Tensor:
    """None of the first entry's keys, and most of the others'."""
    return torch.tensor([c.Sk - c.Sk // 3 if b else 0 for b in range(c.B)], dtype=torch.int64)


def _segments(c: AttentionCase, batch: int) -> Tensor:
    query_ids, key_ids = _ids(c, batch)
    return (query_ids.unsqueeze(-1) == key_ids.unsqueeze(-2)).unsqueeze(1)


def _used(c: AttentionCase) -> Tensor:
    return (torch.arange(c.Sk) < _lengths_of(c).unsqueeze(-1))[:, None, None]


MASKS: dict[str, MaskCase] = {
    "none": MaskCase(lambda c, device: None, lambda c: None),
    "causal": _band(Causal(), None, 0),
    "upper_left": _band(Causal("upper_left"), None, 0, 0),
    "offset_3": _band(Causal(3), None, 0, 3),
    "offset_-2": _band(Causal(-2), None, 0, -2),
    "window_7_0": _band(Window(7), 7, 0),
    "window_2_2": _band(Window(2, 2), 2, 2),
    "window_0_0": _band(Window(0, 0), 0, 0),
    "window_none_0": _band(Window(None, 0), None, 0),
    "window_3_none": _band(Window(3, None), 3, None),
    "window_upper_5_1": _band(Window(5, 1, "upper_left"), 5, 1, 0),
    "far_window": _band(Window(4, 0, align=10_000), 4, 0, 10_000),
    "causal_and_window": _band(Causal() & Window(5, 3), 5, 0),
    "bool_qk": _tensor(lambda c: (c.Sq, c.Sk)),
    "bool_bhqk": _tensor(lambda c: (c.B, c.Hq, c.Sq, c.Sk)),
    "bool_b11k": _tensor(lambda c: (c.B, 1, 1, c.Sk)),
    "bool_1hq1": _tensor(lambda c: (1, c.Hq, c.Sq, 1)),
    "bool_hqk": _tensor(lambda c: (c.Hq, c.Sq, c.Sk)),
    "bool_k": _tensor(lambda c: (c.Sk,)),
    "bool_1": _tensor(lambda c: (1,)),
    "dead_rows": MaskCase(lambda c, device: _dead_rows(c).to(device), _dead_rows),
    "nothing": MaskCase(
        lambda c, device: torch.zeros(1, 1, dtype=torch.bool, device=device),
        lambda c: torch.zeros(1, 1, dtype=torch.bool),
    ),
    "late": MaskCase(lambda c, device: _late(c).to(device), _late),
    "segments": MaskCase(
        lambda c, device: Segments(tuple(ids[0].to(device) for ids in _ids(c, 1))), lambda c: _segments(c, 1)
    ),
    "segments_b": MaskCase(
        lambda c, device: Segments(tuple(ids.int().to(device) for ids in _ids(c, c.B))), lambda c: _segments(c, c.B)
    ),
    "lengths_b": MaskCase(lambda c, device: Padding(_lengths_of(c).to(device)), _used),
    "padding_b": MaskCase(lambda c, device: Padding(_padding(c)[:, 0, 0].to(device)), _padding),
    "all_of_them_b": MaskCase(
        lambda c, device: (
            Causal()
            & Segments(tuple(ids.to(device) for ids in _ids(c, c.B)))
            & _random_keep(c.Sk).to(device)
            & Segments((torch.arange(c.Sq, device=device) // 9, torch.arange(c.Sk, device=device) // 9))
            & Padding(_lengths_of(c).int().to(device))
            & Padding((_lengths_of(c) - 1).clamp(0).to(device))
        ),
        lambda c: (
            oracle.causal(c.Sq, c.Sk)
            & _segments(c, c.B)
            & _random_keep(c.Sk)
            & (torch.arange(c.Sq).unsqueeze(-1) // 9 == torch.arange(c.Sk) // 9)
            & _used(c)
            & (torch.arange(c.Sk) < (_lengths_of(c) - 1).unsqueeze(-1))[:, None, None]
        ),
    ),
    "causal_and_bool_qk": MaskCase(
        lambda c, device: Causal() & _random_keep(c.Sq, c.Sk).to(device),
        lambda c: oracle.causal(c.Sq, c.Sk) & _random_keep(c.Sq, c.Sk),
    ),
    "causal_and_late_keys": MaskCase(
        lambda c, device: Causal() & _late(c)[:1].to(device), lambda c: oracle.causal(c.Sq, c.Sk) & _late(c)[:1]
    ),
    "window_and_segments_b": MaskCase(
        lambda c, device: Window(3, 1) & Segments(tuple(ids.to(device) for ids in _ids(c, c.B))),
        lambda c: oracle.band(c.Sq, c.Sk, 3, 1, c.Sk - c.Sq) & _segments(c, c.B),
    ),
    "causal_and_padding": MaskCase(
        lambda c, device: Causal() & _padding(c).to(device), lambda c: oracle.causal(c.Sq, c.Sk) & _padding(c)
    ),
}

_base = AttentionCase(1, 1, 1, 17, 33, 16, 16)


def _lengths() -> list[AttentionCase]:
    """Lengths of one, and around the sizes of tiles, full and causal."""
    pairs = [
        (1, 1),
        (1, 5),
        (5, 1),
        (1, 130),
        (130, 1),
        (15, 16),
        (16, 17),
        (17, 15),
        (63, 65),
        (64, 64),
        (65, 63),
    ]
    pairs += [(127, 129), (129, 64)]
    shapes = [replace(_base, Sq=Sq, Sk=Sk) for Sq, Sk in pairs]
    return shapes + [replace(shape, mask="causal") for shape in shapes]


def _head_sizes() -> list[AttentionCase]:
    sizes = [
        (1, 1),
        (8, 8),
        (40, 40),
        (64, 64),
        (72, 72),
        (80, 80),
        (96, 96),
        (128, 128),
        (63, 63),
        (192, 128),
    ]
    sizes += [(16, 40), (40, 16), (96, 1), (1, 96)]
    wide = [(192, 192), (256, 256), (256, 64), (576, 512), (512, 512), (320, 300)]
    return [replace(_base, D=D, Dv=Dv, mask="causal") for D, Dv in sizes] + [
        replace(_base, Sq=5, Sk=18, D=D, Dv=Dv) for D, Dv in wide
    ]


def _heads() -> list[AttentionCase]:
    groups = [(2, 2, 2), (2, 4, 1), (1, 6, 2), (1, 7, 1)]
    return [replace(_base, B=B, Hq=Hq, Hkv=Hkv, Sq=5, Sk=19, mask="causal") for B, Hq, Hkv in groups]


SHAPES: tuple[AttentionCase, ...] = (*_lengths(), *_head_sizes(), *_heads())
MASKED: tuple[AttentionCase, ...] = tuple(
    replace(_base, B=2 if "b" in name else 1, Hq=2, Hkv=1, Sq=Sq, Sk=Sk, mask=name)
    for name in MASKS
    if name not in ("none", "causal")
    for Sq, Sk in ((13, 37), (37, 13))
)
EMPTY: tuple[AttentionCase, ...] = (
    replace(_base, B=0),
    replace(_base, Sq=0),
    replace(_base, Sk=0),
    replace(_base, Sk=0, Hq=4, Hkv=2, mask="causal"),
    replace(_base, B=0, Sq=0, mask="bool_bhqk"),
    replace(_base, Sq=0, mask="causal"),
    replace(_base, B=2, Sk=0, mask="all_of_them_b"),
    replace(_base, B=2, Sq=0, mask="segments_b"),
    replace(_base, B=0, mask="lengths_b"),
)
LAYOUTS: tuple[AttentionCase, ...] = (
    *(
        replace(_base, B=2, Hq=2, Hkv=1, Sq=9, Sk=21, D=24, Dv=40, mask="causal", layout=layout)
        for layout in ("transposed", "columns", "columns_first", "expanded", "value_transposed")
    ),
    replace(_base, B=2, Hq=2, Hkv=2, Sq=21, Sk=21, mask="causal", layout="packed"),
)
SCALES: tuple[AttentionCase, ...] = tuple(
    replace(_base, Sq=9, Sk=70, D=24, Dv=24, mask=mask, scale=scale)
    for scale in (0.0, -1.0, -0.25, 3.0, 1)
    for mask in ("none", "causal")
)
GPU_SHAPES: tuple[AttentionCase, ...] = (
    *(
        AttentionCase(2, 4, Hkv, Sq, Sk, D, D, mask=mask, layout="transposed")
        for D in (32, 64, 80, 96, 128, 192, 256)
        for Sq, Sk, Hkv in ((512, 512, 4), (257, 1031, 2), (1031, 257, 1))
        for mask in ("none", "causal")
    ),
    *(AttentionCase(1, 8, 2, 1000, 1500, 64, 64, mask=name) for name in MASKS if name not in ("none", "causal")),
    AttentionCase(1, 2, 2, 4096, 4096, 128, 128, mask="causal"),
    AttentionCase(1, 2, 1, 1, 8192, 128, 128, mask="causal"),
    AttentionCase(2, 4, 2, 777, 777, 128, 64, mask="window_7_0"),
)


def dtypes(index: int, case: AttentionCase, backend: str, device: torch.device) -> tuple[torch.dtype, ...]:
    """The types a case runs in: all on a GPU, fewer where kernels are interpreted.

    The interpreter's arithmetic is the same in all of them up to roundings; float64 runs on the reference.
    """
    if device.type == "cuda":
        return FLOATS
    kinds = FLOATS[index % 3], FLOATS[(index + 1) % 3]
    return (*kinds, torch.float64) if backend == "reference" else kinds[: 1 + (case.mask in ("none", "causal"))]
