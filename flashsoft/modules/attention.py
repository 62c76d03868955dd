"""Multi-head attention as a module."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from .. import api, checks, masks
from ..alibi import Bias
from ..cache import KVCache


class FusedAttention(nn.Module):
    """Multi-head attention over `flashsoft.attention`: project, attend in O(S) memory, project back.

    Args:
        embed_dim: size of x and of the result.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of num_heads; num_heads by default, 1 is multi-query.
        head_dim: size of a head, 1 to 512; embed_dim / num_heads by default.
        context_dim: size of the context of cross-attention; embed_dim by default.
        bias: the four projections have a bias.
        mask: what every call keeps: `Causal()`, `Window(...)`, a boolean tensor (True = takes part, the
            opposite of `nn.MultiheadAttention`), or several joined with `&`. Its tensors move along.
        rotary_base: base of rotary embedding, such as 10000.0; None for none. Half-split: element i of a head
            is turned together with element i + head_dim / 2, by the angle position / base^(2i / head_dim),
            computed in float32. Positions count from 0 and go on from the cache's length.
        qk_norm: RMSNorm over head_dim on queries and on keys, before the rotary embedding.
        scale: of the scores, 1 / sqrt(head_dim) by default.
        softcap: a number > 0: scores become softcap * tanh(score / softcap).
        sinks: a learned score a head beside those of the keys, whose value is 0; the parameter `sinks`, 0 at first.
        dropout: the probability of leaving a weight out while training.

    Raises:
        ValueError: sizes that do not divide or are out of range, an odd head_dim with rotary_base.
        TypeError: sizes that are not integers, a mask that is not boolean.

    >>> layer = FusedAttention(64, 4, num_kv_heads=2, mask=masks.Causal(), rotary_base=10000.0)
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = True,
        mask: masks.MaskLike = None,
        rotary_base: float | None = None,
        qk_norm: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = checks.size("embed_dim", embed_dim)
        self.num_heads = checks.size("num_heads", num_heads)
        self.num_kv_heads = num_heads if num_kv_heads is None else checks.size("num_kv_heads", num_kv_heads)
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads {num_heads} without head_dim, got {embed_dim}")
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads {num_kv_heads}, got {num_heads}")
        self.head_dim = embed_dim // num_heads if head_dim is None else checks.size("head_dim", head_dim)
        if self.head_dim > checks.MAX_VALUE_DIM:
            raise ValueError(f"head_dim must be 1 to {checks.MAX_VALUE_DIM}, got {self.head_dim}")
        self.context_dim = embed_dim if context_dim is None else checks.size("context_dim", context_dim)
        self.rotary_base = None if rotary_base is None else checks.number("rotary_base", rotary_base, positive=True)
        if rotary_base is not None and self.head_dim % 2:
            raise ValueError(f"head_dim must be even with rotary_base, got {self.head_dim}")
        if rotary_base is not None and context_dim not in (None, embed_dim):
            raise ValueError(
                f"context_dim must be None with rotary_base, which is for self-attention, got {context_dim}"
            )
        self.scale = None if scale is None else checks.number("scale", scale)
        self.softcap = None if softcap is None else checks.number("softcap", softcap, positive=True)
        self.dropout = checks.dropout_p(dropout, "dropout")
        self.sinks = nn.Parameter(torch.zeros(self.num_heads, device=device, dtype=dtype)) if sinks else None

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias, device, dtype)

        self.q_proj = linear(embed_dim, self.num_heads * self.head_dim)
        self.k_proj = linear(self.context_dim, self.num_kv_heads * self.head_dim)
        self.v_proj = linear(self.context_dim, self.num_kv_heads * self.head_dim)
        self.out_proj = linear(self.num_heads * self.head_dim, embed_dim)
        self.q_norm = nn.RMSNorm(self.head_dim, device=device, dtype=dtype) if qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, device=device, dtype=dtype) if qk_norm else None

        if mask is not None:
            _mask(mask)
        for term in masks.terms(mask):
            if not isinstance(term, masks.Causal | masks.Window | Tensor):
                raise ValueError(f"mask must go to forward if it is of a batch, got {type(term).__name__}")
        # tensors of the mask are buffers, so that they follow the module to its device
        try:
            keep = masks.resolve(mask, 0, 0).keep
        except RuntimeError as error:
            raise ValueError(f"mask must be made of tensors that broadcast to one another: {error}") from None
        if keep is not None and keep.dtype != torch.bool:
            raise TypeError(f"mask must be boolean (True = takes part), got {keep.dtype}")
        self.register_buffer("keep", keep if keep is None or device is None else keep.to(device), persistent=False)
        self.band: masks.Mask | None = None
        for term in masks.terms(mask):
            if isinstance(term, masks.Mask):
                self.band = term if self.band is None else self.band & term

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: masks.MaskLike = None,
        bias: Bias = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attention of x to itself, to `context`, or to itself and what `cache` holds.

        Args:
            x: (B, S, embed_dim), in the dtype of the parameters or under autocast.
            context: (B, Sk, context_dim), read by keys and values in place of x.
            mask: joins (`&`) the module's own; a tensor broadcasts to (B, num_heads, S, Sk).
            bias: added to the scores, as in `flashsoft.attention`: a tensor, or `ALiBi(slopes)`.
            cache: x's keys and values are appended to it and all it holds is attended to (Sk = its length),
                so that with `Causal()` decoding in steps equals one full pass. It takes no gradient.

        Returns:
            (B, S, embed_dim).

        Raises:
            ValueError: shapes that do not fit, a full cache, a cache or a rotary embedding beside a context.
            TypeError: x or context not floating, a mask that is not boolean.
        """
        _sequence("x", x, self.embed_dim)
        if cache is not None and not isinstance(cache, KVCache):
            raise TypeError(f"cache must be a KVCache, got {type(cache).__name__}")
        source = x
        if context is not None:
            _sequence("context", context, self.context_dim)
            if context.shape[0] != x.shape[0]:
                raise ValueError(f"context must have x's batch size {x.shape[0]}, got shape {tuple(context.shape)}")
            if cache is not None:
                raise ValueError("cache must be None with a context, whose keys do not grow, got both")
            if self.rotary_base is not None:
                raise ValueError("context must be None with rotary_base, which is for self-attention, got both")
            source = context
        elif self.context_dim != self.embed_dim:
            raise ValueError(f"context must be given, (B, Sk, {self.context_dim}), got None")
        query = rearrange(self.q_proj(x), "b s (h d) -> b s h d", d=self.head_dim)
        key = rearrange(self.k_proj(source), "b s (h d) -> b s h d", d=self.head_dim)
        value = rearrange(self.v_proj(source), "b s (h d) -> b h s d", d=self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            # in the dtype of its weight, also under autocast
            query = self.q_norm(query.to(self.q_norm.weight.dtype))
            key = self.k_norm(key.to(self.k_norm.weight.dtype))
        if self.rotary_base is not None:
            start = 0 if cache is None else cache.length
            query, key = _rotate(query, start, self.rotary_base), _rotate(key, start, self.rotary_base)
        query = rearrange(query, "b s h d -> b h s d").to(value.dtype)
        key = rearrange(key, "b s h d -> b h s d").to(value.dtype)
        if cache is not None:
            key, value = cache.append(key, value)
        out = self.attend(query, key, value, self._joined(mask), bias)
        return self.out_proj(rearrange(out, "b h s d -> b s (h d)"))  # type: ignore[no-any-return]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: masks.MaskLike, bias: Bias = None) -> Tensor:
        """The attention between the projections, on (B, H, S, D); override it to see or to replace it."""
        return api.attention(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            scale=self.scale,
            softcap=self.softcap,
            sink=self.sinks,
            dropout_p=self.dropout if self.training else 0,
        )

    def _joined(self, mask: masks.MaskLike) -> masks.MaskLike:
        """The module's mask and the call's."""
        parts = [part for part in (self.band, self._buffers["keep"], mask) if part is not None]
        for part in parts:
            _mask(part)
        if len(parts) > 1:
            return masks.All(tuple(parts))
        return parts[0] if parts else None

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, mask: masks.MaskLike = None) -> FusedAttention:
        """The same attention with a copy of the weights; always batch first, as `batch_first=True` there.

        A mask becomes `mask` here with the opposite meaning of True. The result equals
        `module(x, context, context, need_weights=False)[0]`.

        Raises:
            ValueError: bias_k and bias_v, add_zero_attn, or a vdim other than kdim.
            TypeError: not an `nn.MultiheadAttention`.

        >>> theirs = nn.MultiheadAttention(32, 4, batch_first=True)
        >>> x = torch.randn(2, 5, 32)
        >>> torch.allclose(FusedAttention.from_torch(theirs)(x), theirs(x, x, x)[0], atol=1e-5)
        True
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(f"module must be an nn.MultiheadAttention, got {type(module).__name__}")
        if module.bias_k is not None or module.bias_v is not None:
            raise ValueError("module must have no bias_k and bias_v, got add_bias_kv=True")
        if module.add_zero_attn:
            raise ValueError("module must not append a zero key, got add_zero_attn=True")
        if module.kdim != module.vdim:
            raise ValueError(f"module must have vdim equal to kdim {module.kdim}, got vdim={module.vdim}")
        weight, bias = module.out_proj.weight, module.in_proj_bias
        ours = cls(
            module.embed_dim,
            module.num_heads,
            context_dim=module.kdim,
            bias=bias is not None,
            mask=mask,
            dropout=module.dropout,
            device=weight.device,
            dtype=weight.dtype,
        )
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        inward = (ours.q_proj, ours.k_proj, ours.v_proj)
        with torch.no_grad():
            for linear, carried in zip(inward, weights, strict=True):
                linear.weight.copy_(carried)
            ours.out_proj.weight.copy_(weight)
            if bias is not None:
                for linear, carried in zip(inward, bias.chunk(3), strict=True):
                    linear.bias.copy_(carried)
                ours.out_proj.bias.copy_(module.out_proj.bias)
        return ours.train(module.training)

    def extra_repr(self) -> str:
        said = [str(self.embed_dim), str(self.num_heads), f"num_kv_heads={self.num_kv_heads}"]
        said.append(f"head_dim={self.head_dim}")
        if self.context_dim != self.embed_dim:
            said.append(f"context_dim={self.context_dim}")
        if self.band is not None:
            said.append(f"mask={self.band}")
        if self._buffers["keep"] is not None:
            said.append(f"mask={tuple(self.get_buffer('keep').shape)}-tensor")
        if self.sinks is not None:
            said.append("sinks=True")
        for name in ("rotary_base", "scale", "softcap"):
            if getattr(self, name) is not None:
                said.append(f"{name}={getattr(self, name)}")
        if self.dropout:
            said.append(f"dropout={self.dropout}")
        return ", ".join(said)


def _mask(value: object) -> None:
    if not isinstance(value, masks.Mask | Tensor):
        raise TypeError(f"mask must be a boolean tensor or a mask such as Causal(), got {type(value).__name__}")


def _sequence(name: str, value: Tensor, size: int) -> None:
    checks.tensor(name, value, 3, f"(B, S, {size})")
    if value.shape[2] != size:
        raise ValueError(f"{name} must be (B, S, {size}), got shape {tuple(value.shape)}")


def _rotate(x: Tensor, start: int, base: float) -> Tensor:
    """Rotary embedding of x (B, S, H, D), half-split, for positions start, start + 1, ..."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    half = x.shape[-1] // 2
    frequency = base ** -(torch.arange(half, device=x.device, dtype=wide) / half)
    position = torch.arange(start, start + x.shape[1], device=x.device, dtype=wide)
    angle = (position[:, None] * frequency)[:, None, :]
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half].to(wide), x[..., half:].to(wide)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
