"""The functions of `api` as modules, and multi-head attention built on them.

The state_dict of every module holds parameters only: masks, rotary angles and caches are not part of it.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from . import api, checks, masks
from .cache import KVCache

__all__ = ["FusedAttention", "FusedCrossEntropyLoss", "FusedSoftmax", "KVCache", "LogSoftmax", "Softmax"]


class Softmax(nn.Module):
    """`flashsoft.softmax` along `dim`, as `torch.nn.Softmax`.

    >>> Softmax()(torch.tensor([0.0, 0.0]))
    tensor([0.5000, 0.5000])
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return api.softmax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class LogSoftmax(nn.Module):
    """`flashsoft.log_softmax` along `dim`, as `torch.nn.LogSoftmax`.

    >>> LogSoftmax()(torch.tensor([0.0, 0.0]))
    tensor([-0.6931, -0.6931])
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return api.log_softmax(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class FusedSoftmax(nn.Module):
    """`flashsoft.fused_softmax`: softmax(softcap(scale * x) / temperature + bias) over what is kept.

    Args:
        temperature: a number > 0; an `nn.Parameter` makes it learned, any other tensor moves with the module.
        top_k: keep the k largest of each row, an integer >= 1, a tensor of integers, or None for all.
        dim: the dimension that sums to one.
        top_p, min_p: shares as `fused_softmax` takes them, numbers or tensors.
        scale, softcap, out_dtype: as there.

    `forward(x, mask=None, bias=None)` takes both as `fused_softmax` does (True = takes part), and raises what
    it raises.

    >>> FusedSoftmax(top_k=2)(torch.tensor([1.0, 2.0, 2.0]))
    tensor([0.0000, 0.5000, 0.5000])
    """

    temperature: float | Tensor
    top_k: int | Tensor | None
    top_p: float | Tensor | None
    min_p: float | Tensor | None

    def __init__(
        self,
        temperature: float | Tensor = 1.0,
        top_k: int | Tensor | None = None,
        dim: int = -1,
        *,
        top_p: float | Tensor | None = None,
        min_p: float | Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # the rules for numbers do not depend on x
        row = torch.empty(1, device="cpu")
        if not isinstance(temperature, Tensor):
            checks.temperature(temperature, row, 0)
        if not isinstance(top_k, Tensor):
            checks.top_k(top_k, row, 0)
        if not isinstance(top_p, Tensor):
            checks.share("top_p", top_p, row, 0, zero=False)
        if not isinstance(min_p, Tensor):
            checks.share("min_p", min_p, row, 0, zero=True)
        checks.output_dtype(out_dtype, "out_dtype")
        self.scale = None if scale is None else checks.number("scale", scale)
        self.softcap = None if softcap is None else checks.number("softcap", softcap, positive=True)
        self.out_dtype = out_dtype
        for name, value in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p), ("min_p", min_p)):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value, persistent=False)
            else:
                setattr(self, name, value)
        self.dim = dim

    def forward(self, x: Tensor, mask: masks.MaskLike = None, bias: Tensor | None = None) -> Tensor:
        return api.fused_softmax(
            x,
            self.temperature,
            mask,
            bias,
            self.top_k,
            self.dim,
            top_p=self.top_p,
            min_p=self.min_p,
            scale=self.scale,
            softcap=self.softcap,
            out_dtype=self.out_dtype,
        )

    def extra_repr(self) -> str:
        said: dict[str, object] = {"temperature": self.temperature, "top_k": self.top_k, "dim": self.dim}
        for name in ("top_p", "min_p", "scale", "softcap", "out_dtype"):
            if getattr(self, name) is not None:
                said[name] = getattr(self, name)
        return ", ".join(
            f"{name}={tuple(value.shape)}-tensor" if isinstance(value, Tensor) else f"{name}={value}"
            for name, value in said.items()
        )


class FusedCrossEntropyLoss(nn.Module):
    """`flashsoft.fused_cross_entropy` with fixed options, as `torch.nn.CrossEntropyLoss`, classes along `dim`.

    Args: as of `fused_cross_entropy`, whose errors for options that are out of range are raised here. `weight` moves
    with the module; a module with a `group` cannot be copied or pickled.

    >>> loss = FusedCrossEntropyLoss(label_smoothing=0.1)
    >>> loss(torch.zeros(3, 8), torch.tensor([0, 7, -100]))
    tensor(2.0794)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        dim: int = -1,
        inplace_backward: bool = False,
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        checks.loss_options(ignore_index, label_smoothing, z_loss, softcap, reduction)
        if weight is not None:
            checks.tensor("weight", weight)
        self.register_buffer("weight", weight, persistent=False)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.z_loss, self.softcap, self.dim = z_loss, softcap, dim
        self.inplace_backward, self.group = inplace_backward, group

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        return api.fused_cross_entropy(
            logits,
            target,
            weight=self._buffers["weight"],
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            reduction=self.reduction,
            dim=self.dim,
            inplace_backward=self.inplace_backward,
            group=self.group,
        )

    def extra_repr(self) -> str:
        said = [] if self._buffers["weight"] is None else [f"weight={tuple(self.get_buffer('weight').shape)}-tensor"]
        for name in ("ignore_index", "reduction", "label_smoothing", "z_loss", "softcap", "dim", "inplace_backward"):
            said.append(f"{name}={getattr(self, name)!r}")
        return ", ".join(said)


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
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attention of x to itself, to `context`, or to itself and what `cache` holds.

        Args:
            x: (B, S, embed_dim), in the dtype of the parameters or under autocast.
            context: (B, Sk, context_dim), read by keys and values in place of x.
            mask: joins (`&`) the module's own; a tensor broadcasts to (B, num_heads, S, Sk).
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
        out = self.attend(query, key, value, self._joined(mask))
        return self.out_proj(rearrange(out, "b h s d -> b s (h d)"))  # type: ignore[no-any-return]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: masks.MaskLike) -> Tensor:
        """The attention between the projections, on (B, H, S, D); override it to see or to replace it."""
        return api.attention(query, key, value, mask=mask, scale=self.scale)

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
            ValueError: bias_k and bias_v, add_zero_attn, dropout, or a vdim other than kdim.
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
        if module.dropout > 0:
            raise ValueError(f"module must have no dropout, got dropout={module.dropout}")
        if module.kdim != module.vdim:
            raise ValueError(f"module must have vdim equal to kdim {module.kdim}, got vdim={module.vdim}")
        weight, bias = module.out_proj.weight, module.in_proj_bias
        ours = cls(
            module.embed_dim,
            module.num_heads,
            context_dim=module.kdim,
            bias=bias is not None,
            mask=mask,
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
        for name in ("rotary_base", "scale"):
            if getattr(self, name) is not None:
                said.append(f"{name}={getattr(self, name)}")
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
