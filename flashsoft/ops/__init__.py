"""The registered operators: one boundary a public call, its fake, its gradient and its batching rule.

An operator chooses its backend when it runs, so that tracing never sees the choice; rows lie along the last dimension,
and options come resolved (masks as a band and a boolean tensor). `call` runs one.
"""

from . import attention, linear_losses, logits, losses, rows
from .registry import NAMESPACE, call

__all__ = ["NAMESPACE", "attention", "call", "linear_losses", "logits", "losses", "rows"]
