"""What `flashsoft verify` checks, as data, and a case computed three ways: ours, torch's, exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import api, masks
from ..masks import Causal, Window

Tensors = dict[str, Tensor]
IGNORED = -100


@dataclass(frozen=True)
class Rows:
    """One of the row functions on x of `shape`, along `dim`."""

    op: str
    shape: tuple[int, ...]
    dim: int = -1
    spread: float = 3.0

    def __str__(self) -> str:
        return f"{self.op} {_sizes(self.shape)}" + ("" if self.dim == -1 else f" dim={self.dim}")


@dataclass(frozen=True)
class Logits:
    """fused_softmax on x of `shape`; `kept` of 1 means no boolean mask, `empty_row` masks row 0 wholly."""

    shape: tuple[int, ...]
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    kept: float = 1.0
    band: masks.Mask | None = None
    bias: bool = False
    empty_row: bool = False

    def __str__(self) -> str:
        said = [f"fused_softmax {_sizes(self.shape)}"]
        said += [f"T={self.temperature}"] * (self.temperature != 1.0) + [f"top_k={self.top_k}"] * bool(self.top_k)
        said += [f"top_p={self.top_p}"] * bool(self.top_p) + ["mask"] * (self.kept < 1.0)
        said += ["causal"] * (self.band is not None) + ["bias"] * self.bias
        return " ".join(said + ["empty row"] * self.empty_row)


@dataclass(frozen=True)
class Losses:
    """fused_cross_entropy of each row of x of `shape`; every fifth label is ignored."""

    shape: tuple[int, ...]
    label_smoothing: float = 0.0

    def __str__(self) -> str:
        said = f"cross_entropy {_sizes(self.shape)}"
        return said + (f" smoothing={self.label_smoothing}" if self.label_smoothing else "")


@dataclass(frozen=True)
class Attention:
    """attention on query (B, H, Sq, D) and key, value (B, Hkv, Sk, D or Dv); `kept` as in `Logits`."""

    name: str
    B: int = 1
    H: int = 2
    Hkv: int = 2
    Sq: int = 64
    Sk: int = 64
    D: int = 64
    Dv: int = 64
    band: masks.Mask | None = None
    kept: float = 1.0
    empty_row: bool = False

    def __str__(self) -> str:
        return f"attention {self.name}, {self.B}x{self.H}/{self.Hkv}x{self.Sq}/{self.Sk}x{self.D}" + (
            f"/{self.Dv}" if self.Dv != self.D else ""
        )


Case = Rows | Logits | Losses | Attention

QUICK: tuple[Case, ...] = (
    Rows("softmax", (7, 33)),
    Rows("log_softmax", (7, 33)),
    Rows("logsumexp", (7, 33)),
    Logits((5, 70), temperature=0.7, top_k=9, kept=0.7, empty_row=True),
    Losses((6, 70)),
    Attention("plain", Sq=17, Sk=33, D=16, Dv=16),
    Attention("causal, GQA", H=4, Hkv=2, Sq=33, Sk=65, D=32, Dv=24, band=Causal()),
    Attention("mask, empty row", Sq=17, Sk=33, D=16, Dv=16, kept=0.6, empty_row=True),
)
ALL: tuple[Case, ...] = (
    *(Rows(op, shape) for op in ("softmax", "log_softmax", "logsumexp") for shape in ((1, 1), (64, 63), (9, 5000))),
    *(Rows(op, (2, 40, 5), dim=1) for op in ("softmax", "log_softmax", "logsumexp")),
    Rows("softmax", (2, 131072), spread=1.0),
    Rows("log_softmax", (4, 300), spread=1000.0),
    Logits((6, 257)),
    Logits((6, 257), temperature=0.5, bias=True),
    Logits((6, 257), kept=0.5, empty_row=True),
    Logits((6, 1000), temperature=0.8, top_k=50),
    Logits((4, 3000), top_k=1),
    Logits((6, 257), top_p=0.8),
    Logits((3, 20000), temperature=0.7, top_k=50),
    Logits((3, 20000), temperature=2.0, top_k=5000, top_p=0.9, kept=0.9),
    Losses((10, 257)),
    Losses((10, 5000), label_smoothing=0.1),
    Losses((5, 50257)),
    Logits((2, 3, 20, 31), band=Causal()),
    Logits((2, 3, 31, 20), band=Causal(), temperature=2.0, top_k=5, kept=0.8),
    Attention("plain", D=64, Dv=64),
    Attention("causal", Sq=129, Sk=129, band=Causal()),
    Attention("causal, Sq < Sk", Sq=33, Sk=150, band=Causal()),
    Attention("causal, Sq > Sk", Sq=150, Sk=33, band=Causal()),
    Attention("causal upper left", Sq=33, Sk=70, band=Causal("upper_left")),
    Attention("window", Sq=150, Sk=150, band=Window(left=31)),
    Attention("window, both sides", Sq=70, Sk=130, band=Window(left=9, right=5)),
    Attention("mask", Sq=70, Sk=77, kept=0.7),
    Attention("mask, empty row", B=2, Sq=70, Sk=77, kept=0.7, empty_row=True),
    Attention("causal and mask", Sq=70, Sk=77, band=Causal(), kept=0.7),
    Attention("GQA", H=6, Hkv=2, Sq=65, Sk=65, band=Causal()),
    Attention("MQA", H=4, Hkv=1, Sq=33, Sk=65),
    Attention("odd lengths", Sq=37, Sk=131, D=40, Dv=40),
    Attention("D 128", Sq=130, Sk=130, D=128, Dv=128, band=Causal()),
    Attention("D 256", H=1, Hkv=1, D=256, Dv=256),
    Attention("Dv below D", Sq=40, Sk=70, D=96, Dv=64),
    Attention("Dv above D", Sq=40, Sk=70, D=16, Dv=72, band=Causal()),
    Attention("one query", H=4, Hkv=2, Sq=1, Sk=200, band=Causal()),
    Attention("one key", Sq=5, Sk=1),
)


def inputs(case: Case, generator: torch.Generator) -> tuple[Tensors, Tensor | None]:
    """The case's float64 tensors, and its boolean mask or its labels, on the CPU."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if isinstance(case, Rows):
        return {"x": normal(*case.shape) * case.spread}, None
    if isinstance(case, Losses):
        labels = torch.randint(0, case.shape[-1], case.shape[:-1], generator=generator)
        labels.view(-1)[4::5] = IGNORED
        return {"x": normal(*case.shape) * 3.0}, labels
    if isinstance(case, Logits):
        tensors = {"x": normal(*case.shape) * 3.0}
        if case.bias:
            tensors["bias"] = normal(1, case.shape[-1])
        return tensors, _keep(case, case.shape, generator)
    tensors = {
        "query": normal(case.B, case.H, case.Sq, case.D),
        "key": normal(case.B, case.Hkv, case.Sk, case.D),
        "value": normal(case.B, case.Hkv, case.Sk, case.Dv),
    }
    return tensors, _keep(case, (case.B, 1, case.Sq, case.Sk), generator)


def _keep(case: Logits | Attention, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
    if case.kept == 1.0 and not case.empty_row:
        return None
    keep = torch.rand(shape, generator=generator) < case.kept
    if case.empty_row:
        keep[..., 0, :] = False
    return keep


def ours(case: Case, tensors: Tensors, keep: Tensor | None, backend: str) -> Tensor:
    """The case by flashsoft; the band goes in as a value."""
    if isinstance(case, Rows):
        function: Callable[..., Tensor] = getattr(api, case.op)
        return function(tensors["x"], case.dim, backend=backend)
    if isinstance(case, Losses):
        assert keep is not None
        smoothing = case.label_smoothing
        return api.fused_cross_entropy(tensors["x"], keep, label_smoothing=smoothing, reduction="none", backend=backend)
    mask = _joined(case.band, keep)
    if isinstance(case, Logits):
        bias = tensors.get("bias")
        return api.fused_softmax(
            tensors["x"], case.temperature, mask, bias, case.top_k, top_p=case.top_p, backend=backend
        )
    return api.attention(tensors["query"], tensors["key"], tensors["value"], mask=mask, backend=backend)


def _joined(band: masks.Mask | None, keep: Tensor | None) -> masks.MaskLike:
    if band is None:
        return keep
    return band if keep is None else band & keep


def whole_mask(case: Case, tensors: Tensors, keep: Tensor | None) -> Tensor | None:
    """What the case keeps as one tensor, with bands, top-k and top-p built in, from float64 tensors; or its labels."""
    if isinstance(case, Rows | Losses):
        return keep
    Sq, Sk = (case.Sq, case.Sk) if isinstance(case, Attention) else case.shape[-2:]
    if case.band is not None:
        spec = masks.resolve(case.band, Sq, Sk)
        distance = torch.arange(Sk) - torch.arange(Sq)[:, None]
        band = torch.ones(Sq, Sk, dtype=torch.bool)
        if spec.lo is not None:
            band &= distance >= spec.lo
        if spec.hi is not None:
            band &= distance <= spec.hi
        keep = band if keep is None else band & keep
    if isinstance(case, Logits) and (case.top_k is not None or case.top_p is not None):
        x = tensors["x"] if keep is None else tensors["x"].masked_fill(~keep, float("-inf"))
        ordered, places = x.sort(dim=-1, descending=True, stable=True)
        first = torch.arange(x.shape[-1]) < (case.top_k or x.shape[-1])
        p = torch.softmax((ordered / case.temperature).masked_fill(~first, float("-inf")), -1)
        first = first & (p.cumsum(-1) - p < (case.top_p or 2.0))
        top = torch.zeros_like(x, dtype=torch.bool).scatter(-1, places, first.expand(x.shape))
        keep = top if keep is None else top & keep
    return keep


def torchs(case: Case, tensors: Tensors, whole: Tensor | None, exact: bool) -> Tensor:
    """The case by torch, in the dtype of the tensors: its own fused path, or plain formulas if `exact`."""
    if isinstance(case, Rows):
        function: Callable[..., Tensor] = getattr(torch, case.op)
        return function(tensors["x"], case.dim)
    if isinstance(case, Losses):
        assert whole is not None
        return torch.nn.functional.cross_entropy(
            tensors["x"], whole, ignore_index=IGNORED, reduction="none", label_smoothing=case.label_smoothing
        )
    if isinstance(case, Logits):
        x = tensors["x"] / case.temperature
        return _masked_softmax(x + tensors["bias"] if case.bias else x, whole)
    query, key, value = tensors["query"], tensors["key"], tensors["value"]
    if not exact:
        gqa: dict[str, Any] = {"enable_gqa": True} if case.H != case.Hkv else {}
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=whole, **gqa)
    key, value = (t.repeat_interleave(case.H // case.Hkv, 1) for t in (key, value))
    return _masked_softmax(query @ key.mT * case.D**-0.5, whole) @ value


def cancelling_terms(tensors: Tensors, whole: Tensor | None, dout: Tensor) -> Tensors:
    """Root sums of squares of the terms of dquery and dkey: p * (dp - delta) times a key or a query."""
    query, key, value = (tensors[name].double() for name in ("query", "key", "value"))
    group, scale = query.shape[1] // key.shape[1], query.shape[3] ** -0.5
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    p = _masked_softmax(query @ keys.mT * scale, whole)
    squares = (p * (dout.double() @ values.mT) * scale).square()
    dkey = (squares.mT @ query.square()).unflatten(1, (-1, group)).sum(2)
    return {"dquery": (squares @ keys.square()).sqrt(), "dkey": dkey.sqrt()}


def _masked_softmax(x: Tensor, keep: Tensor | None) -> Tensor:
    """softmax over what is kept; a row of which nothing is kept is 0, and so is its gradient."""
    if keep is None:
        return torch.softmax(x, -1)
    alive = keep.any(-1, keepdim=True)
    return torch.softmax(x.masked_fill(~keep & alive, float("-inf")), -1).masked_fill(~alive, 0.0)


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)
