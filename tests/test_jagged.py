"""Nested jagged tensors: each sequence as if it were alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import flashsoft
from flashsoft import ALiBi, Causal, Window

LENGTHS, KEYS = (3, 0, 5, 2), (4, 2, 0, 7)
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def jagged(lengths: tuple[int, ...], heads: int, size: int, device: torch.device) -> Tensor:
    """(B, j, H, D), a leaf."""
    parts = [torch.randn(length, heads, size, device=device) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def inputs(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    query, key = jagged(LENGTHS, 2, 8, device), jagged(KEYS, 1, 8, device)
    values = torch.randn(sum(KEYS), 1, 6, device=device, requires_grad=True)
    return query, key, torch.nested.nested_tensor_from_jagged(values, key.offsets())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": Causal()},
        {"mask": Causal("upper_left") & Window(2, align="upper_left"), "scale": 0.3},
        {
            "softcap": 2.0,
            "sink": torch.tensor([0.1, -1.0]),
            "bias": ALiBi(torch.tensor([0.5, 0.25])),
        },
    ],
    ids=["plain", "causal", "band", "terms"],
)
def test_each_sequence_alone(options: dict[str, Any], backend: str, device: torch.device) -> None:
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    if "bias" in options:
        options["bias"] = ALiBi(options["bias"].slopes.to(device))
    leaves = inputs(device)
    query, key, value = (x.transpose(1, 2) for x in leaves)
    options["backend"] = backend
    out, lse = flashsoft.attention(query, key, value, return_lse=True, **options)
    assert out.is_nested and out.shape[2] == query.shape[2] and lse.shape[2] == query.shape[2]
    total = torch.zeros((), device=device)
    for b, (q, k, v) in enumerate(zip(*(x.unbind() for x in leaves), strict=True)):
        alone = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        expected, expected_lse = flashsoft.attention(*alone, return_lse=True, **options)
        torch.testing.assert_close(out.transpose(1, 2).unbind()[b], expected[0].transpose(0, 1), **CLOSE)
        torch.testing.assert_close(lse.transpose(1, 2).unbind()[b], expected_lse[0].transpose(0, 1), **CLOSE)
        total = total + expected.sin().sum()
    want = torch.autograd.grad(total, leaves[:2])
    got = torch.autograd.grad(out.transpose(1, 2).values().sin().sum(), leaves[:2])
    for a, b_ in zip(got, want, strict=True):
        assert a.is_nested
        torch.testing.assert_close(a.values(), b_.values(), **CLOSE)


def test_refusals(device: torch.device) -> None:
    x = jagged(LENGTHS, 2, 8, device)
    q = x.transpose(1, 2)
    dense = torch.randn(4, 2, 3, 8, device=device)
    gaps = torch.nested.narrow(
        torch.randn(2, 6, 2, 8, device=device), 1, torch.tensor([0, 1], device=device),
        torch.tensor([2, 3], device=device), layout=torch.jagged,
    ).transpose(1, 2)  # fmt: skip
    other = jagged(KEYS, 2, 8, device).transpose(1, 2)
    for tensors, said in (
        ((q, dense, dense), "key must be a nested tensor with layout torch.jagged, as query is, got a dense tensor"),
        ((x, x, x), "query must be jagged (B, H, j, D), a (B, j, H, D) transposed"),
        ((gaps, gaps, gaps), "query must have no gaps between its sequences"),
        ((q, q, other), "key and value must share their offsets"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            flashsoft.attention(*tensors)
    with pytest.raises(TypeError):
        flashsoft.attention(q, q, q, mask=torch.ones(3, 3, dtype=torch.bool, device=device))


def test_compiled_in_one_graph(device: torch.device) -> None:
    torch.compiler.reset()

    def run(x: Tensor) -> Tensor:
        q = x.transpose(1, 2)
        return flashsoft.attention(q, q, q, mask=Causal(), backend="reference").transpose(1, 2).values()

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for lengths in (LENGTHS, (7, 1)):
        x = jagged(lengths, 2, 8, device)
        torch.testing.assert_close(compiled(x), run(x), **CLOSE)
