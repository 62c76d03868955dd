"""flashsoft: fused attention and softmax for PyTorch, built on one primitive, online softmax.

>>> import torch, flashsoft
>>> q = k = v = torch.randn(1, 2, 5, 16)
>>> flashsoft.attention(q, k, v, mask=flashsoft.Causal()).shape
torch.Size([1, 2, 5, 16])
"""

from .api import (
    attention,
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
from .masks import Causal, Window
from .modules import FusedAttention, FusedCrossEntropyLoss, FusedSoftmax, KVCache, LogSoftmax, Softmax

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailableError",
    "Causal",
    "FusedAttention",
    "FusedCrossEntropyLoss",
    "FusedSoftmax",
    "KVCache",
    "LogSoftmax",
    "Softmax",
    "Window",
    "attention",
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
