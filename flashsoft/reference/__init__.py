"""Online softmax and tiled attention in plain PyTorch: the specification, and the backend of CPU tensors.

Every function here has a twin of the same name and arguments in `kernels`; `ops` calls either. Rows lie along the
last dimension, tensors may have any strides, and half precision is computed in float32 (float64 in float64).
"""

from .attention import attention_backward, attention_forward
from .logits import fused_softmax_backward, fused_softmax_forward, sample_forward
from .losses import (
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_overwrite_forward,
    cross_entropy_state_forward,
    scale_backward,
)
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
