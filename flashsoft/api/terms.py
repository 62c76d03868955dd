"""What callers add to scores, checked and in the form operators take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..alibi import ALiBi
from ..terms import Terms


def terms_of(
    query: Tensor,
    scores: tuple[int, int, int, int],
    *,
    bias: Any,
    scale: Any,
    softcap: Any,
    sink: Any,
    dropout_p: Any,
    batch: tuple[int, str] | None = None,
) -> Terms:
    """All but masks, for query (..., D) and scores (B, Hq, Sq, Sk). `batch` says what slopes (B, Hq) are for."""
    B, Hq = scores[:2]
    device = query.device
    slopes: Tensor | None = None
    if isinstance(bias, ALiBi):
        checks.slopes(bias.slopes, Hq, *(batch or (B, "batch entries")), device)
        slopes = bias.slopes if bias.slopes.ndim == 2 else bias.slopes.unsqueeze(0)
        bias = bias.bias
    if bias is not None:
        checks.bias(bias, scores, "query", device)
        if bias.dtype not in (query.dtype, torch.float32):
            raise TypeError(f"bias must have query's dtype {query.dtype} or float32, got {bias.dtype}")
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    factor = checks.scale(scale, query.shape[-1], Hq, device)
    checks.sink(sink, Hq, device)
    share = checks.dropout_p(dropout_p)
    return Terms(
        bias=bias,
        slopes=slopes,
        sink=sink,
        factor=factor.reshape(-1).expand(Hq) if isinstance(factor, Tensor) else None,
        # drawn by torch's generator, so that what replays that replays this: checkpoints, captured graphs
        seed=torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device) if share > 0.0 else None,
        scale=1.0 if isinstance(factor, Tensor) else factor,
        softcap=None if softcap is None else checks.number("softcap", softcap, positive=True),
        dropout_p=share,
    )
