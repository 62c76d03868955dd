"""The Triton backend: the functions of `reference`, as kernels."""

from triton import knobs as _knobs

if _knobs.runtime.interpret:
    from . import interpreter  # noqa: F401  (before any kernel is launched)

from .backward import attention_backward
from .cross_entropy import cross_entropy_forward, cross_entropy_overwrite_forward, cross_entropy_state_forward
from .cross_entropy_backward import cross_entropy_backward, scale_backward
from .forward import attention_forward
from .logits import fused_softmax_forward, sample_forward
from .logits_backward import fused_softmax_backward
from .rows import (
    log_softmax_backward,
    log_softmax_forward,
    logsumexp_backward,
    logsumexp_forward,
    softmax_backward,
    softmax_forward,
)

__all__ = [
    "attention_backward",
    "attention_forward",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "cross_entropy_overwrite_forward",
    "cross_entropy_state_forward",
    "fused_softmax_backward",
    "fused_softmax_forward",
    "log_softmax_backward",
    "log_softmax_forward",
    "logsumexp_backward",
    "logsumexp_forward",
    "sample_forward",
    "scale_backward",
    "softmax_backward",
    "softmax_forward",
]
