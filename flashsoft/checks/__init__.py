"""Every rule an argument must obey, and the sentence that says so when it does not.

No rule reads a value on the device, except the content checks that FLASHSOFT_CHECK=1 turns on.
"""

from .attention import (
    MAX_HEAD_DIM,
    MAX_VALUE_DIM,
    attention,
    dropout_p,
    packed,
    packed_mask,
    partial_results,
    scale,
    sink,
    slopes,
)
from .losses import class_weight, group, labels, linear_loss, loss_options, overwritable, target
from .scores import bias, mask, share, temperature, top_k
from .values import backend, broadcastable, dimension, generator, number, on_device, output_dtype, per_row, size, tensor

__all__ = [
    "MAX_HEAD_DIM",
    "MAX_VALUE_DIM",
    "attention",
    "backend",
    "bias",
    "broadcastable",
    "class_weight",
    "dimension",
    "dropout_p",
    "generator",
    "group",
    "labels",
    "linear_loss",
    "loss_options",
    "mask",
    "number",
    "on_device",
    "output_dtype",
    "overwritable",
    "packed",
    "packed_mask",
    "partial_results",
    "per_row",
    "scale",
    "share",
    "sink",
    "size",
    "slopes",
    "target",
    "temperature",
    "tensor",
    "top_k",
]
