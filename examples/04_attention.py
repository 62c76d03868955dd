"""Attention in O(S) memory: against torch, with masks as values, and merged from two halves of the keys."""

import torch
from torch.nn import functional as F

import flashsoft
from flashsoft import Causal, Window


def main() -> None:
    torch.manual_seed(0)
    query = torch.randn(2, 8, 300, 64, requires_grad=True)
    key = torch.randn(2, 2, 300, 64, requires_grad=True)  # grouped queries: 4 query heads share a key head
    value = torch.randn(2, 2, 300, 64, requires_grad=True)
    print(flashsoft.explain(query, key, value))

    ours = flashsoft.attention(query, key, value, mask=Causal())
    torchs = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    dout = torch.randn_like(ours)
    mine = torch.autograd.grad(ours, (query, key, value), dout)
    theirs = torch.autograd.grad(torchs, (query, key, value), dout)
    print(f"\nagainst scaled_dot_product_attention: out differs by {(ours - torchs).abs().max():.1e}, ", end="")
    print("gradients by", ", ".join(f"{(a - b).abs().max():.1e}" for a, b in zip(mine, theirs, strict=True)))

    # masks are values, and combine with each other and with a boolean tensor (True = takes part)
    padding = torch.ones(2, 1, 1, 300, dtype=torch.bool)
    padding[1, ..., 250:] = False
    print("\nkeys that the queries 0, 99 and 299 of the second sequence see (value = 1, scores = 0):")
    zeros = torch.zeros(2, 1, 300, 8)
    for name, mask in {
        "everything": None,
        "Causal()": Causal(),
        "Causal() & Window(left=31)": Causal() & Window(left=31),
        "Causal() & padding": Causal() & padding,
    }.items():
        _, lse = flashsoft.attention(zeros, zeros, zeros, mask=mask, return_lse=True)
        # each visible key adds exp(0) = 1 to the sum, so exp(lse) counts them
        print(f"  {name:<28}", lse[1, 0, [0, 99, 299]].exp().round().int().tolist())

    # the law of (m, s) at user scale: two disjoint sets of keys, attended apart, merge exactly
    with torch.no_grad():
        near = flashsoft.attention(query, key[:, :, :100], value[:, :, :100], return_lse=True)
        far = flashsoft.attention(query, key[:, :, 100:], value[:, :, 100:], return_lse=True)
        out, lse = flashsoft.merge(*near, *far)
        whole, whole_lse = flashsoft.attention(query, key, value, return_lse=True)
    print(f"\nkeys split in two and merged: out differs by {(out - whole).abs().max():.1e}, ", end="")
    print(f"lse by {(lse - whole_lse).abs().max():.1e}")


if __name__ == "__main__":
    main()
