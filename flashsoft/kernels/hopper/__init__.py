"""The Hopper backend: attention's forward in Gluon for sm_90a; its gradients are those of the portable kernels."""

from ..backward import attention_backward
from .forward import attention_forward

__all__ = ["attention_backward", "attention_forward"]
