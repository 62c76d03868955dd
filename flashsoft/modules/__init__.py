"""The functions of `api` as modules, and multi-head attention built on them.

The state_dict of every module holds parameters only: masks, rotary angles and caches are not part of it.
"""

from ..cache import KVCache
from .attention import FusedAttention
from .losses import FusedCrossEntropyLoss
from .rows import FusedSoftmax, LogSoftmax, Softmax

__all__ = ["FusedAttention", "FusedCrossEntropyLoss", "FusedSoftmax", "KVCache", "LogSoftmax", "Softmax"]
