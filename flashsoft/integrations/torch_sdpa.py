"""flashsoft in torch's registry of flash attention, behind `F.scaled_dot_product_attention` and `varlen_attn`.

    from flashsoft.integrations import torch_sdpa
    torch_sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("flashsoft")

From then on, where torch chooses flash attention on a GPU, its four operators are these; what torch does not give to
flash attention (a mask, float32) stays with it. `restore_flash_attention_impl()` brings torch's own back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..terms import Gradients, Terms

NAME = "flashsoft"
_NEEDS = tuple(name in ("query", "key", "value") for name in Gradients._fields)


def register() -> None:
    """Make "flashsoft" known to `torch.nn.attention.activate_flash_attention_impl`; activates nothing."""
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_activate)


class _Active:
    """Keeps the operators in place until it is removed."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library: torch.library.Library | None = library

    def remove(self) -> None:
        self.library = None


def _activate(device: str = "CUDA") -> _Active:
    library = torch.library.Library("aten", "IMPL")
    for name, run in {
        "_scaled_dot_product_flash_attention": _dense_forward,
        "_scaled_dot_product_flash_attention_backward": _dense_backward,
        "_flash_attention_forward": _forward,
        "_flash_attention_backward": _backward,
    }.items():
        library.impl(name, run, device)
    return _Active(library)


def _dense_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """query (B, H, Sq, D)."""
    _refuse(return_debug_mask=return_debug_mask)
    terms = _terms(query, key, is_causal, scale, dropout_p, _draw(query, dropout_p))
    out, lse = ops.call("attention", query, key, value, *terms, "")
    return _like(out, query), lse, None, None, query.shape[2], key.shape[2], *_left_over(query, terms.seed)


def _dense_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    terms = _terms(query, key, is_causal, scale, dropout_p, _drawn(philox_seed, dropout_p))
    return _gradients(grad_out, query, key, value, out, logsumexp, terms)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> tuple[Any, ...]:
    """query (B, Sq, H, D), or (T, H, D) of packed sequences, whose lse is (H, T)."""
    _refuse(return_debug_mask=return_debug_mask, seqused_k=seqused_k, alibi_slopes=alibi_slopes)
    q, k, v = (_heads_first(x) for x in (query, key, value))
    packed = (cum_seq_q, cum_seq_k, max_q, max_k)
    window = (window_size_left, window_size_right)
    terms = _terms(q, k, is_causal, scale, dropout_p, _draw(query, dropout_p), packed, window)
    out, lse = ops.call("attention", q, k, v, *terms, "")
    out = out.transpose(1, 2)
    if cum_seq_q is not None:
        out, lse = out[0], lse[0]
    return _like(out, query), lse, *_left_over(query, terms.seed)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    dout, q, k, v, o = (_heads_first(x) for x in (grad_out, query, key, value, out))
    packed = (cum_seq_q, cum_seq_k, max_q, max_k)
    window = (window_size_left, window_size_right)
    terms = _terms(q, k, is_causal, scale, dropout_p, _drawn(rng_state, dropout_p), packed, window)
    lse = logsumexp if cum_seq_q is None else logsumexp.unsqueeze(0)
    gradients = (x.transpose(1, 2) for x in _gradients(dout, q, k, v, o, lse, terms))
    return tuple(gradients) if cum_seq_q is None else tuple(x[0] for x in gradients)


def _terms(
    query: Tensor,
    key: Tensor,
    is_causal: bool,
    scale: float | None,
    dropout_p: float,
    seed: Tensor | None,
    packed: tuple[Tensor | None, Tensor | None, int, int] = (None, None, 0, 0),
    window: tuple[int | None, int | None] = (None, None),
) -> Terms:
    """torch aligns bands in the lower right; a window of None or less than 0 has no limit on that side."""
    cu_q, cu_k, max_q, max_k = packed
    left, right = (None if reach is None or reach < 0 else reach for reach in window)
    right = 0 if is_causal else right
    offset = key.shape[2] - query.shape[2] if cu_q is None else 0
    return Terms(
        scale=query.shape[3] ** -0.5 if scale is None else scale,
        lo=None if left is None else offset - left,
        hi=None if right is None else offset + right,
        dropout_p=dropout_p,
        seed=seed,
        cu_q=cu_q,
        cu_k=cu_k,
        max_q=0 if cu_q is None else max_q,
        max_k=0 if cu_q is None else max_k,
        lower_right=cu_q is not None,
    )


def _gradients(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv, *_ = ops.call("attention_backward", dout, None, query, key, value, out, lse, *terms, *_NEEDS, "")
    return dq, dk, dv


def _heads_first(x: Tensor) -> Tensor:
    """(B, S, H, D) or (T, H, D) as (B or 1, H, S or T, D)."""
    return (x if x.ndim == 4 else x.unsqueeze(0)).transpose(1, 2)


def _like(out: Tensor, query: Tensor) -> Tensor:
    """In memory as query is, which is what torch's compiler takes for granted."""
    result = torch.empty_like(query)
    return out if out.stride() == result.stride() else result.copy_(out)


def _draw(query: Tensor, dropout_p: float) -> Tensor | None:
    return None if dropout_p == 0.0 else torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=query.device)


def _drawn(rng_state: Tensor, dropout_p: float) -> Tensor | None:
    return None if dropout_p == 0.0 else rng_state.view(torch.int64)[:1]


def _left_over(query: Tensor, seed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The random state, uint64 (2,), of which the seed is the first; what torch has no more use for; no debug mask."""
    state = torch.zeros(2, dtype=torch.int64, device=query.device)
    if seed is not None:
        state[:1] = seed
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return state.view(torch.uint64), unused, query.new_empty(0)


def _refuse(**options: object) -> None:
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(f"flashsoft's flash attention takes no {name}: restore_flash_attention_impl() for it")
