"""flashsoft: fused attention and softmax for PyTorch, built on one primitive, online softmax.

>>> import torch, flashsoft
>>> q = k = v = torch.randn(1, 2, 5, 16)
>>> flashsoft.attention(q, k, v, mask=flashsoft.Causal()).shape
torch.Size([1, 2, 5, 16])
"""

from .alibi import ALiBi
from .api import (
    attention,
    attention_varlen,
    explain,
    fused_cross_entropy,
    fused_linear_cross_entropy,
    fused_softmax,
    log_softmax,
    logsumexp,
    merge,
    sample,
    scaled_dot_product_attention,
    softmax,
)
from .errors import BackendUnavailableError
from .masks import Causal, Padding, Segments, Window
from .modules import FusedAttention, FusedCrossEntropyLoss, FusedSoftmax, KVCache, LogSoftmax, Softmax

__version__ = "0.1.0"

__all__ = [
    "ALiBi",
    "BackendUnavailableError",
    "Causal",
    "FusedAttention",
    "FusedCrossEntropyLoss",
    "FusedSoftmax",
    "KVCache",
    "LogSoftmax",
    "Padding",
    "Segments",
    "Softmax",
    "Window",
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
