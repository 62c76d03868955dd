"""What generation keeps of the tokens it has seen."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks


class KVCache:
    """Keys and values of the tokens seen so far, for generation: one cache a layer and a batch of sequences.

    Args:
        batch, num_kv_heads, max_length, head_dim: sizes of the two tensors that are allocated here.
        device, dtype: torch's defaults if None; dtype must be that of the keys that are appended.

    What is stored takes no gradient. `length` counts the tokens stored.

    >>> cache = KVCache(batch=1, num_kv_heads=2, max_length=16, head_dim=8)
    >>> keys, values = cache.append(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))
    >>> keys.shape, cache.length
    (torch.Size([1, 2, 3, 8]), 3)
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        max_length: int,
        head_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"batch": batch, "num_kv_heads": num_kv_heads, "max_length": max_length, "head_dim": head_dim}
        for name, value in sizes.items():
            checks.size(name, value, least=0 if name in ("batch", "max_length") else 1)
        self.key = torch.zeros(*sizes.values(), device=device, dtype=dtype)
        checks.tensor("dtype", self.key)
        self.value = torch.zeros_like(self.key)
        self.length = 0

    @property
    def max_length(self) -> int:
        """The number of tokens there is room for."""
        return self.key.shape[2]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores key and value (B, Hkv, S, D) behind what is there; returns views of all that is stored.

        Raises:
            ValueError: another shape or device than the cache's, or no room for S more; nothing is stored.
            TypeError: another dtype than the cache's.
        """
        batch, heads, _, head_dim = self.key.shape
        for name, given in (("key", key), ("value", value)):
            checks.tensor(name, given, 4, "(B, Hkv, S, D)")
            if given.dtype != self.key.dtype:
                raise TypeError(f"{name} must have the cache's dtype {self.key.dtype}, got {given.dtype}")
            checks.on_device(name, given, "the cache", self.key.device)
            if (given.shape[0], given.shape[1], given.shape[3]) != (batch, heads, head_dim):
                raise ValueError(
                    f"{name} must have the cache's sizes ({batch}, {heads}, S, {head_dim}), "
                    f"got shape {tuple(given.shape)}"
                )
        if value.shape != key.shape:
            raise ValueError(f"value must have key's shape {tuple(key.shape)}, got {tuple(value.shape)}")
        start, end = self.length, self.length + key.shape[2]
        if end > self.max_length:
            raise ValueError(f"cache has room for {self.max_length} tokens and holds {start}, got {key.shape[2]} more")
        with torch.no_grad():
            self.key[:, :, start:end].copy_(key)
            self.value[:, :, start:end].copy_(value)
        self.length = end
        return self.key[:, :, :end], self.value[:, :, :end]

    def reset(self) -> None:
        """Forgets everything stored; the memory stays allocated."""
        self.length = 0

    def __repr__(self) -> str:
        sizes = "batch={}, num_kv_heads={}, max_length={}, head_dim={}".format(*self.key.shape)
        return f"KVCache({sizes}, device={str(self.key.device)!r}, dtype={self.key.dtype}, length={self.length})"
