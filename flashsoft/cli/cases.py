"""What `flashsoft verify` checks, as data, and a case computed three ways: ours, torch's, exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import api, masks
from ..alibi import ALiBi
from ..masks import Causal, Padding, Segments, Window
from ..reference import dropout

Tensors = dict[str, Tensor]
IGNORED = -100
SEED = 7  # of the generator that dropout draws from


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
    """attention on query (B, H, Sq, D) and key, value (B, Hkv, Sk, D or Dv); `kept` as in `Logits`.

    bias (H, Sq, Sk), slopes, sink and scale (H,) are tensors with gradients. documents: lengths of what lies end to end
    in queries and keys alike, told apart by `Segments`, or `packed` for attention_varlen. used: keys of each entry.
    """

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
    bias: bool = False
    slopes: bool = False
    softcap: float | None = None
    sink: bool = False
    scale: bool = False
    dropout_p: float = 0.0
    documents: tuple[int, ...] = ()
    packed: bool = False
    used: tuple[int, ...] = ()

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
    Attention(
        "all terms", Hkv=1, Sq=17, Sk=33, D=16, Dv=24, band=Causal(), used=(30,),
        bias=True, slopes=True, softcap=2.0, sink=True, scale=True, dropout_p=0.3,
    ),
    Attention("packed", Sq=20, Sk=20, D=16, Dv=16, band=Causal(), documents=(7, 1, 12), packed=True),
)  # fmt: skip
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
    Attention("D 576", H=1, Hkv=1, Sq=17, Sk=33, D=576, Dv=512, band=Causal()),
    Attention("bias", B=2, Sq=40, Sk=70, bias=True),
    Attention("ALiBi", H=4, Sq=40, Sk=70, slopes=True, band=Causal()),
    Attention("softcap", Sq=40, Sk=70, softcap=1.5),
    Attention("sink", H=4, Sq=70, Sk=40, sink=True, band=Causal()),
    Attention("tensor scale", H=4, Sq=40, Sk=70, scale=True),
    Attention("dropout", Sq=40, Sk=70, dropout_p=0.2),
    Attention("segments", Sq=70, Sk=70, band=Causal(), documents=(3, 40, 27)),
    Attention("lengths", B=3, Sq=40, Sk=70, used=(70, 0, 33)),
    Attention("packed", H=4, Sq=90, Sk=90, band=Window(left=20), documents=(33, 1, 0, 56), packed=True),
    Attention("packed, ALiBi, sink", H=4, Sq=50, Sk=50, slopes=True, sink=True, documents=(9, 41), packed=True),
    Attention(
        "all terms", B=2, H=4, Sq=40, Sk=70, D=32, Dv=48, band=Causal(), kept=0.8, used=(70, 50),
        bias=True, slopes=True, softcap=2.0, sink=True, scale=True, dropout_p=0.3,
    ),
)  # fmt: skip


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
    if case.bias:
        tensors["bias"] = normal(case.H, case.Sq, case.Sk)
    if case.slopes:
        tensors["slopes"] = 2.0 ** -torch.linspace(1, 4, case.H, dtype=torch.float64)
    if case.sink:
        tensors["sink"] = normal(case.H)
    if case.scale:
        tensors["scale"] = normal(case.H) * case.D**-0.5
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
    if isinstance(case, Logits):
        mask = _joined(case.band, keep)
        bias = tensors.get("bias")
        return api.fused_softmax(
            tensors["x"], case.temperature, mask, bias, case.top_k, top_p=case.top_p, backend=backend
        )
    query, key, value = tensors["query"], tensors["key"], tensors["value"]
    added: Any = tensors.get("bias")
    if case.slopes:
        added = ALiBi(tensors["slopes"]) if added is None else ALiBi(tensors["slopes"]) + added
    options: dict[str, Any] = {"bias": added, "scale": tensors.get("scale"), "sink": tensors.get("sink")}
    options |= {"softcap": case.softcap, "dropout_p": case.dropout_p, "backend": backend}
    with _seeded(query.device):
        if not case.packed:
            whole: Tensor = api.attention(query, key, value, mask=_mask(case, keep, query.device), **options)
            return whole
        ends = torch.tensor([0, *itertools.accumulate(case.documents)], dtype=torch.int32, device=query.device)
        longest = max(case.documents)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        out: Tensor = api.attention_varlen(q, k, v, ends, ends, longest, longest, mask=case.band, **options)
        return out.transpose(0, 1).unsqueeze(0)


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    """torch's generators in one state inside, and as they were after."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(SEED)
        yield


def _mask(case: Attention, keep: Tensor | None, device: torch.device) -> masks.MaskLike:
    mask = _joined(case.band, keep)
    if case.documents:
        mask = _joined(Segments(_ids(case).to(device)), mask)
    return _joined(Padding(torch.tensor(case.used, device=device)), mask) if case.used else mask


def _ids(case: Attention) -> Tensor:
    return torch.arange(len(case.documents)).repeat_interleave(torch.tensor(case.documents))


def _joined(band: masks.Mask | None, keep: masks.MaskLike) -> masks.MaskLike:
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
    if isinstance(case, Attention) and case.documents:
        own = _ids(case)[:, None] == _ids(case)
        keep = own if keep is None else own & keep
    if isinstance(case, Attention) and case.used:
        used = torch.arange(case.Sk) < torch.tensor(case.used)[:, None, None, None]
        keep = used if keep is None else used & keep
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
    if exact or case.softcap is not None or case.sink or case.scale or case.dropout_p > 0.0:
        return _formulas(case, tensors, whole)[0]
    gqa: dict[str, Any] = {"enable_gqa": True} if case.H != case.Hkv else {}
    if case.bias or case.slopes:  # its name for both is attn_mask
        added = _added(case, tensors)
        whole = added if whole is None else added.masked_fill(~whole, float("-inf"))
    query, key, value = tensors["query"], tensors["key"], tensors["value"]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=whole, **gqa)


def _added(case: Attention, tensors: Tensors) -> Tensor:
    """Bias and ALiBi's, (H, Sq, Sk)."""
    slopes = tensors.get("slopes")
    added = 0.0 if slopes is None else -slopes[:, None, None] * _distance(case, slopes)
    return added + tensors["bias"] if case.bias else torch.as_tensor(added)


def _distance(case: Attention, like: Tensor) -> Tensor:
    return (torch.arange(case.Sq)[:, None] + case.Sk - case.Sq - torch.arange(case.Sk)).abs().to(like)


def _formulas(case: Attention, tensors: Tensors, whole: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The result, the weights (of a sink too, last) before dropout, and what that multiplies them with."""
    query, group = tensors["query"], case.H // case.Hkv
    key, value = (tensors[name].repeat_interleave(group, 1) for name in ("key", "value"))
    x = query @ key.mT * (tensors["scale"][:, None, None] if case.scale else case.D**-0.5)
    if case.softcap is not None:
        x = case.softcap * torch.tanh(x / case.softcap)
    if case.bias or case.slopes:
        x = x + _added(case, tensors)
    if case.sink:
        x = torch.cat((x, tensors["sink"][:, None, None].expand(*x.shape[:3], 1)), -1)
        whole = None if whole is None else torch.nn.functional.pad(whole, (0, 1), value=True)
    p, drop = _masked_softmax(x, whole), torch.ones((), dtype=query.dtype, device=query.device)
    if case.dropout_p > 0.0:
        with _seeded(query.device):
            word = torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=query.device)
        heads = torch.arange(case.B * case.H, device=query.device).view(case.B, case.H)
        drop = dropout.kept(word, case.dropout_p, heads, (0, case.Sq), (0, case.Sk)).to(query)
    return (p[..., : case.Sk] * drop) @ value, p, drop


def cancelling_terms(case: Attention, tensors: Tensors, whole: Tensor | None, dout: Tensor) -> Tensors:
    """Root sums of squares of the terms of gradients of scores' parts: p * (dp - delta) times what each multiplies."""
    exact = {name: t.detach().double() for name, t in tensors.items()}
    query, group = exact["query"], case.H // case.Hkv
    key, value = (exact[name].repeat_interleave(group, 1) for name in ("key", "value"))
    scale = exact["scale"][:, None, None] if case.scale else torch.tensor(case.D**-0.5).to(query)
    _, weights, drop = _formulas(case, exact, whole)
    p = weights[..., : case.Sk]
    squares = (p * drop * (dout.double() @ value.mT)).square()

    def of_heads(by: Tensor) -> Tensor:
        """What is summed over queries and keys; the error of a row's delta is common to its keys."""
        common = squares.sum(-1) * (p * by).sum(-1).square()
        return ((squares * by.square()).sum((0, 2, 3)) + common.sum((0, 2))).sqrt()

    terms = {}
    if case.bias:
        terms["dbias"] = squares.sum(0).sqrt()
    if case.slopes:
        terms["dslopes"] = of_heads(_distance(case, query))
    if case.sink:
        terms["dsink"] = (squares.sum(-1) * weights[..., -1].square()).sum((0, 2)).sqrt()
    x = query @ key.mT
    slope = torch.ones_like(x) if case.softcap is None else 1.0 - torch.tanh(x * scale / case.softcap).square()
    if case.scale:
        terms["dscale"] = of_heads(slope * x)
    squares = squares * (slope * scale).square()
    dkey = (squares.mT @ query.square()).unflatten(1, (-1, group)).sum(2)
    return terms | {"dquery": (squares @ key.square()).sqrt(), "dkey": dkey.sqrt()}


def _masked_softmax(x: Tensor, keep: Tensor | None) -> Tensor:
    """softmax over what is kept; a row of which nothing is kept is 0, and so is its gradient."""
    if keep is None:
        return torch.softmax(x, -1)
    alive = keep.any(-1, keepdim=True)
    return torch.softmax(x.masked_fill(~keep & alive, float("-inf")), -1).masked_fill(~alive, 0.0)


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)
