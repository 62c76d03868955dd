"""The public functions: each states its semantics, checks its arguments, and makes one call of one operator."""

from .attention import attention, explain, merge
from .drop_in import scaled_dot_product_attention
from .linear_losses import fused_linear_cross_entropy
from .logits import fused_softmax, sample
from .losses import fused_cross_entropy
from .rows import log_softmax, logsumexp, softmax
from .varlen import attention_varlen

__all__ = [
    "attention",
    "attention_varlen",
    "explain",
    "fused_cross_entropy",
    "fused_linear_cross_entropy",
    "fused_softmax",
    "log_softmax",
    "logsumexp",
    "merge",
    "sample",
    "scaled_dot_product_attention",
    "softmax",
]
