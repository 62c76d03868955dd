"""fused_softmax on each backend against float64: every option, alone and together, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from inputs import draw, guarded
from tolerances import assert_close_to
from torch import Tensor

import flashsoft
from flashsoft import Causal, Window
from flashsoft.tuning.logits import backward, bias_gradient, forward, power_of_two, wide

F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
INF, NAN = float("inf"), float("nan")
DTYPES = (F32, F16, BF16)
Value = float | Tensor


def results(
    function: Callable[..., tuple[Tensor, Tensor]], leaves: list[Tensor], dy: Tensor, dlse: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y, lse, and the gradients of the leaves."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y, lse = function(*leaves)
    gradients = torch.autograd.grad([y, lse], leaves, [dy.to(y.dtype), dlse.to(lse.dtype)])
    return y.detach(), lse.detach(), list(gradients)


def compare(
    x: Tensor,
    backend: str,
    temperature: Value = 1.0,
    mask: Any = None,
    keep: Tensor | None = None,
    bias: Tensor | None = None,
    top_k: int | Tensor | None = None,
    **others: Any,
) -> Tensor:
    """Values and gradients against float64 and against torch's operators in x's dtype; returns y.

    `keep` says in a tensor what `mask` keeps, if that is not one; a temperature or top_k tensor is (..., 1).
    """
    keep = mask if keep is None else keep
    given = [x] + [t for t in (temperature, bias) if isinstance(t, Tensor)]

    def call(function: Callable[..., Any], mask: Any, k: Any, fixed: Callable[[Tensor], Tensor]) -> Any:
        def run(*leaves: Tensor) -> tuple[Tensor, Tensor]:
            rest = iter(leaves[1:])
            t = fixed(next(rest)) if isinstance(temperature, Tensor) else temperature
            b = fixed(next(rest)) if bias is not None else None
            return function(fixed(leaves[0]), t, mask, bias=b, top_k=k, **others)

        return run

    def fused(x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return flashsoft.fused_softmax(x, *args, **options, return_lse=True, backend=backend)

    def plain(x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        y, lse = oracle.fused_softmax(x, *args, **options)
        return y.to(given[0].dtype if x.dtype == F32 else F64), lse

    dy, dlse = draw(*x.shape, device=x.device, dtype=x.dtype), draw(*x.shape[:-1], device=x.device)
    got = results(call(fused, mask, top_k, lambda t: t), given, dy, dlse)
    cpu = [t.detach().cpu() for t in given]
    cpu_keep = None if keep is None else keep.cpu()
    cpu_k = top_k.cpu() if isinstance(top_k, Tensor) else top_k
    want = results(
        call(plain, cpu_keep, cpu_k, lambda t: t),
        [t.to(F64) for t in cpu],
        dy.cpu().to(F64),
        dlse.cpu().to(F64),
    )
    wide = F64 if x.dtype == F64 else F32
    theirs = results(call(plain, cpu_keep, cpu_k, lambda t: t.to(wide)), cpu, dy.cpu(), dlse.cpu())

    y, lse, _ = want
    t = temperature.detach().cpu().to(F64) if isinstance(temperature, Tensor) else temperature
    fine = torch.where(y != 0, (cpu[0].to(F64) * others.get("scale", 1.0) / t).abs(), 0.0)
    assert_close_to(got[0], y, theirs[0], name="y")
    assert_close_to(got[1], lse, theirs[1], fine.amax(-1) if x.shape[-1] else None, name="lse")
    # the terms of dz, each as large as it is before they cancel
    g, gl = dy.cpu().to(F64), dlse.cpu().to(F64).unsqueeze(-1)
    size = y * (g.abs() + (y * g).square().sum(-1, keepdim=True).sqrt() + gl.abs())
    slope = abs(others.get("scale", 1.0))
    sizes = [size / t * slope]
    if isinstance(temperature, Tensor):
        terms = (size * torch.where(y != 0, cpu[0].to(F64), 0.0) * slope / t**2).square()
        sizes.append(terms.sum(-1, keepdim=True).sum_to_size(temperature.shape).sqrt())
    if bias is not None:
        sizes.append(size.square().sum_to_size(bias.shape).sqrt())
    for i, name in enumerate(["dx", "dtemperature", "dbias"] if isinstance(temperature, Tensor) else ["dx", "dbias"]):
        if i < len(sizes):
            # y is rounded to x's dtype before the backward reads it, also where the gradient's own is finer
            coarser = torch.finfo(x.dtype).eps / torch.finfo(got[2][i].dtype).eps
            scale = sizes[i] * max(coarser, 1.0)
            assert_close_to(got[2][i], want[2][i], theirs[2][i], scale, name=name)
    return got[0]


def temperatures(*rows: int, device: torch.device, dtype: torch.dtype = F32) -> Tensor:
    """0.5 to 2."""
    return (torch.rand(*rows, 1) * 1.5 + 0.5).to(device, dtype)


# ---- options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, F64])
def test_every_combination_of_options(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    if dtype == F64 and backend == "triton":
        pytest.skip("triton computes in float32")
    M, N = 6, 77
    for per_row, masked, biased, top_k in itertools.product(
        (False, True), (False, True), (False, True), (None, 9, "rows")
    ):
        x = guarded(draw(M, N, device=device, dtype=dtype))
        keep = torch.rand(M, N).to(device) < 0.6 if masked else None
        # a bias in steps of 1/8 with x in steps of 1/4: sums are exact, so that every precision chooses alike
        bias = draw(M, N, device=device).mul(8).round().div(8).to(dtype) if biased else None
        if biased and top_k is not None:
            x, per_row = x.mul(4).round().div(4), False
        k: Any = torch.tensor([[1], [5], [9], [40], [76], [1000]], device=device) if top_k == "rows" else top_k
        temperature: Value = temperatures(M, device=device, dtype=dtype) if per_row else 0.5
        compare(x, backend, temperature, keep, bias=bias, top_k=k)


@pytest.mark.parametrize("N", [1, 2, 3, 31, 32, 33, 127, 129, 1000, 2049])
def test_lengths(backend: str, device: torch.device, N: int) -> None:
    for top_k in {None, 1, max(N // 2, 1), max(N - 1, 1)}:
        y = compare(guarded(draw(3, N, device=device)), backend, 0.7, top_k=top_k)
        assert (y != 0).sum(-1).tolist() == [top_k or N] * 3


@pytest.mark.parametrize("shape", [(7,), (5, 1), (1, 7), (5, 7), (3, 1, 1), (2, 1, 5, 7), (1, 3, 1, 7), ()])
def test_a_mask_broadcasts(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    keep = torch.rand(shape).to(device) < 0.6
    compare(draw(2, 3, 5, 7, device=device), backend, mask=keep, keep=keep.expand(2, 3, 5, 7))


@pytest.mark.parametrize(("Sq", "Sk"), [(6, 6), (4, 9), (9, 4), (1, 40)])
def test_masks_that_are_values(backend: str, device: torch.device, Sq: int, Sk: int) -> None:
    x = draw(2, 3, Sq, Sk, device=device)
    tensor = torch.rand(3, 1, Sk).to(device) < 0.7
    diagonal = Sk - Sq
    bands = {
        Causal(): oracle.causal(Sq, Sk),
        Causal("upper_left"): oracle.band(Sq, Sk, None, 0, 0),
        Window(left=2): oracle.band(Sq, Sk, 2, 0, diagonal),
        Window(left=None, right=1): oracle.band(Sq, Sk, None, 1, diagonal),
        Window(left=1, right=None, align="upper_left"): oracle.band(Sq, Sk, 1, None, 0),
        Causal(10**12): oracle.band(Sq, Sk, None, 0, 10**12),
        Causal(-(10**12)): oracle.band(Sq, Sk, None, 0, -(10**12)),
    }
    for mask, keep in bands.items():
        compare(x, backend, mask=mask, keep=keep.to(device).expand(x.shape))
        both = keep.to(device) & tensor
        compare(x, backend, 0.8, mask=mask & tensor, keep=both.expand(x.shape), top_k=3 if Sk > 3 else None)


def test_another_dimension(backend: str, device: torch.device) -> None:
    x = draw(4, 9, 5, device=device)
    keep = torch.rand(9, 1).to(device) < 0.7
    T, k = temperatures(4, 5, device=device).squeeze(-1), torch.randint(1, 9, (4, 5), device=device)
    bias = draw(9, 5, device=device)
    y, lse = flashsoft.fused_softmax(x, T, keep, bias, k, dim=1, return_lse=True, backend=backend)
    assert y.shape == x.shape and lse.shape == (4, 5)
    x64, T64, bias64 = (t.cpu().double() for t in (x, T, bias))
    rows, row_lse = oracle.fused_softmax(
        x64.movedim(1, -1), T64.unsqueeze(-1), keep.cpu().mT, bias64.mT, k.cpu().unsqueeze(-1)
    )
    assert_close_to(y.movedim(1, -1), rows, None, rows * 4, name="y")
    assert_close_to(lse, row_lse, None, row_lse.abs() + 4, name="lse")
    # the dimension of size 1 may be left out of the temperature or not
    again = flashsoft.fused_softmax(x, T.unsqueeze(1), keep, bias, k.unsqueeze(1), dim=1, backend=backend)
    assert torch.equal(again, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    layouts = {
        "columns": draw(3, 4, 26, device=device, dtype=dtype)[..., ::2],
        "columns first": draw(13, 4, 3, device=device, dtype=dtype).permute(2, 1, 0),
        "rows swapped": draw(4, 3, 13, device=device, dtype=dtype).transpose(0, 1),
        "sliced": draw(3, 4, 20, device=device, dtype=dtype)[..., 3:16],
        "expanded": draw(1, 4, 13, device=device, dtype=dtype).expand(3, 4, 13),
    }
    T = temperatures(3, 4, device=device)
    keep = (torch.rand(4, 3, 13).to(device) < 0.8).transpose(0, 1)
    bias = draw(3, 13, 4, device=device).mT
    for x in layouts.values():
        compare(guarded(x), backend, T, keep, bias=bias)
        compare(guarded(x, shift=1), backend, T, keep, top_k=5)


# ---- top-k ---------------------------------------------------------------------------------------------


def adversarial(N: int) -> Tensor:
    """Rows that a threshold gets wrong."""
    x = torch.randn(10, N)
    x[0] = 1.5  # all equal
    x[1] = (x[1] > 0).float()  # two values
    x[2] = x[2].sort().values
    x[3] = x[3].sort(descending=True).values
    x[4, ::2] = -INF
    x[5] *= 1e-41  # denormal
    x[6] = (x[6] * 2).round()  # many equals around every threshold
    x[7] = torch.where(x[7] > 0, 0.0, -0.0)  # one value, two spellings
    x[8] = torch.where(x[8] > 1, -3.0, -INF)
    x[9, 1:] = -3e38
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [64, 257])
def test_exactly_k_survive_lowest_index_first(backend: str, device: torch.device, dtype: torch.dtype, N: int) -> None:
    x = adversarial(N).to(dtype)
    for k in (1, 7, N // 2, N - 1):
        y = flashsoft.fused_softmax(x.to(device), top_k=k, backend=backend)
        want, _ = oracle.fused_softmax(x.double(), top_k=k)
        assert torch.equal((y != 0).cpu(), want.to(dtype) != 0), k
        assert_close_to(y, want, None, want * 8, name=f"k = {k}")


def test_equals_are_chosen_alike_in_any_batch(backend: str, device: torch.device) -> None:
    x = torch.randint(0, 4, (33, 500)).float().to(device)
    alone = flashsoft.fused_softmax(x[32:], top_k=37, backend=backend)
    assert int((alone != 0).sum()) == 37
    for rows in (3, 33):
        assert torch.equal(flashsoft.fused_softmax(x[-rows:], top_k=37, backend=backend)[-1:], alone)


def test_top_k_of_the_length_and_more_keeps_all(backend: str, device: torch.device) -> None:
    x = draw(4, 7, device=device)
    k = torch.tensor([7, 8, 1000, 2**40], device=device)
    whole = flashsoft.fused_softmax(x, backend=backend)
    for top_k in (7, 8, 2**40, k):
        torch.testing.assert_close(flashsoft.fused_softmax(x, top_k=top_k, backend=backend), whole, rtol=1e-6, atol=0)


def test_top_k_below_one_in_a_tensor_keeps_nothing(backend: str, device: torch.device) -> None:
    x = draw(3, 7, device=device).requires_grad_()
    k = torch.tensor([0, -5, 2], device=device, dtype=torch.int32)
    y, lse = flashsoft.fused_softmax(x, top_k=k, return_lse=True, backend=backend)
    assert (y != 0).sum(-1).tolist() == [0, 0, 2] and lse[:2].tolist() == [-INF, -INF]
    (dx,) = torch.autograd.grad([y, lse], x, [draw(3, 7, device=device), torch.ones_like(lse)])
    assert bool((dx[:2] == 0).all()) and bool(dx.isfinite().all())


def test_top_k_takes_only_what_the_mask_keeps(backend: str, device: torch.device) -> None:
    x = torch.tensor([[9.0, 1.0, 8.0, 2.0, 3.0]], device=device)
    keep = torch.tensor([False, True, False, True, True], device=device)
    y = flashsoft.fused_softmax(x, mask=keep, top_k=2, backend=backend)
    assert (y != 0).tolist() == [[False, False, False, True, True]]
    y = flashsoft.fused_softmax(x, mask=keep, top_k=4, backend=backend)
    assert (y != 0).tolist() == [keep.tolist()]


# ---- what is not finite, and rows of nothing -----------------------------------------------------------


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 3e38])
@pytest.mark.parametrize("top_k", [None, 3])
def test_nothing_leaks_from_masked_places(
    backend: str, device: torch.device, garbage: float, top_k: int | None
) -> None:
    x, keep = draw(5, 12, device=device), torch.rand(5, 12).to(device) < 0.6
    keep[2] = False
    T, bias = temperatures(5, device=device), draw(5, 12, device=device)
    dy, dlse = draw(5, 12, device=device), draw(5, device=device)
    outcomes = []
    for fill in (0.0, garbage):
        dirty = [torch.where(keep, t, fill) for t in (x, bias)]
        leaves = [dirty[0], T, dirty[1]]

        def run(x: Tensor, T: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
            return flashsoft.fused_softmax(x, T, keep, bias, top_k, return_lse=True, backend=backend)

        outcomes.append(results(run, leaves, torch.where(keep, dy, fill), dlse))
    for clean, dirty in zip((*outcomes[0][:2], *outcomes[0][2]), (*outcomes[1][:2], *outcomes[1][2]), strict=True):
        assert torch.equal(clean, dirty)
    y, lse, gradients = outcomes[1]
    assert bool((y[2] == 0).all()) and float(lse[2]) == -INF and all(bool((g[2] == 0).all()) for g in gradients)


def test_what_is_kept_and_not_finite_makes_its_row_nan(backend: str, device: torch.device) -> None:
    for top_k in (None, 2):
        x = draw(5, 9, device=device)
        x[1, 4], x[2, 8], x[3] = NAN, INF, -INF
        y, lse = flashsoft.fused_softmax(x, top_k=top_k, return_lse=True, backend=backend)
        assert y.isnan().all(-1).tolist() == [False, True, True, False, False]
        assert bool(lse[1].isnan()) and float(lse[2]) == INF and float(lse[3]) == -INF
        assert bool((y[3] == 0).all()) and bool(y[[0, 4]].isfinite().all())


@pytest.mark.parametrize("shape", [(0, 7), (4, 0), (0, 0), (2, 0, 3), (0,)])
def test_no_rows_and_no_columns(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, device=device).requires_grad_()
    T = torch.ones(*shape[:-1], 1, device=device).requires_grad_()
    bias = torch.zeros(shape, device=device).requires_grad_()
    y, lse = flashsoft.fused_softmax(x, T, bias=bias, top_k=2, return_lse=True, backend=backend)
    assert y.shape == shape and lse.shape == shape[:-1] and bool((lse == -INF).all())
    gradients = torch.autograd.grad([y, lse], [x, T, bias], [torch.ones_like(y), torch.ones_like(lse)])
    assert all(bool((g == 0).all()) for g in gradients)


def test_rows_of_nothing_do_not_touch_others(backend: str, device: torch.device) -> None:
    keep = torch.rand(6, 10).to(device) < 0.7
    keep[1] = keep[4] = False
    x = draw(6, 10, device=device)
    y = compare(x, backend, temperatures(6, device=device), keep)
    assert bool((y[[1, 4]] == 0).all())


# ---- temperature ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "T"), [(F16, 1e-5), (F32, 1e-12), (F32, 1e-38), (F32, 1e-44), (BF16, 1e-30)])
def test_tiny_temperatures_put_all_on_the_maximum(
    backend: str, device: torch.device, dtype: torch.dtype, T: float
) -> None:
    x = torch.tensor([[1.0, 5.0, 2.0, -3.0], [-9.0, -7.0, -8.0, -7.5]], device=device, dtype=dtype)
    one_hot = torch.tensor([[0.0, 1.0, 0.0, 0.0]] * 2, device=device, dtype=dtype)
    row = torch.full((2, 1), T, device=device)
    for temperature, top_k in itertools.product((T, row), (None, 2)):
        leaf = x.clone().requires_grad_()
        y = flashsoft.fused_softmax(leaf, temperature, top_k=top_k, backend=backend)
        assert torch.equal(y, one_hot)
        (dx,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        assert bool((dx == 0).all())


def test_a_temperature_of_zero_in_a_tensor_shares_among_the_largest(backend: str, device: torch.device) -> None:
    x = torch.tensor([[1.0, 3.0, 3.0], [1.0, 3.0, 2.0], [1.0, 2.0, 3.0]], device=device)
    y = flashsoft.fused_softmax(x, torch.tensor([0.0, -0.0, 1e-40], device=device), backend=backend)
    assert y.tolist() == [[0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    # what is no temperature is not taken for one
    y = flashsoft.fused_softmax(x, torch.tensor([-1.0, NAN, 1.0], device=device), backend=backend)
    assert y.isnan().all(-1).tolist() == [True, True, False]


def test_huge_temperatures_are_uniform(backend: str, device: torch.device) -> None:
    x, keep = draw(2, 8, device=device), torch.tensor([True, False] * 4, device=device)
    for T in (1e38, torch.full((2, 1), INF, device=device)):
        y = flashsoft.fused_softmax(x, T, keep, backend=backend)
        assert torch.equal(y, keep.float().expand(2, 8) / 4)


@pytest.mark.parametrize("shape", [(3, 4, 1), (1, 4, 1), (3, 1, 1), (1, 1, 1), (1,)])
def test_the_gradient_of_a_broadcast_temperature(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    compare(draw(3, 4, 20, device=device), backend, temperatures(*shape[:-1], device=device))


# ---- gradients -----------------------------------------------------------------------------------------

BIASES = [
    (2, 3, 5, 7),
    (1, 3, 5, 7),
    (2, 1, 5, 7),
    (1, 1, 1, 7),
    (2, 3, 1, 7),
    (5, 7),
    (7,),
    (3, 5, 1),
    (2, 1, 1, 1),
    (1,),
]


@pytest.mark.parametrize("shape", BIASES)
def test_the_gradient_of_a_broadcast_bias(backend: str, device: torch.device, shape: tuple[int, ...]) -> None:
    keep = torch.rand(5, 7).to(device) < 0.8
    x = draw(2, 5, 3, 7, device=device).transpose(1, 2)
    compare(x, backend, 0.8, keep, bias=draw(*shape, device=device))
    compare(x.to(BF16), backend, bias=draw(*shape, device=device, dtype=F16))


def test_a_bias_broadcast_over_many_rows_is_summed_in_parts(backend: str, device: torch.device) -> None:
    M, N = 1000, 24
    assert bias_gradient(N, 1, M).splits > 1
    compare(draw(M, N, device=device), backend, bias=draw(N, device=device))


def test_either_result_alone_has_its_gradient(backend: str, device: torch.device) -> None:
    x = draw(3, 9, device=device).requires_grad_()
    y, lse = flashsoft.fused_softmax(x, 0.5, top_k=4, return_lse=True, backend=backend)
    (of_lse,) = torch.autograd.grad(lse.sum(), x, retain_graph=True)
    torch.testing.assert_close(of_lse, y.detach() / 0.5)
    (of_y,) = torch.autograd.grad(y.sum(), x)  # a gradient of stride 0
    torch.testing.assert_close(of_y, torch.zeros_like(x), rtol=0, atol=1e-6)


def test_gradcheck() -> None:
    x, T, bias = (
        torch.randn(2, 3, 6, dtype=F64),
        torch.rand(2, 3, 1, dtype=F64) + 0.5,
        torch.randn(3, 1, dtype=F64),
    )
    keep = torch.rand(2, 3, 6) < 0.8

    def run(x: Tensor, T: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return flashsoft.fused_softmax(x, T, Window(left=4, right=2) & keep, bias, 4, return_lse=True)

    keep[..., 0] = True
    assert torch.autograd.gradcheck(run, [t.requires_grad_() for t in (x, T, bias)])


def test_the_same_bits_twice(backend: str, device: torch.device) -> None:
    x, T, bias = draw(40, 50, device=device), temperatures(40, device=device), draw(50, device=device)
    dy, dlse = draw(40, 50, device=device), draw(40, device=device)

    def run(x: Tensor, T: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return flashsoft.fused_softmax(x, T, None, bias, 9, return_lse=True, backend=backend)

    first, second = (results(run, [x, T, bias], dy, dlse) for _ in range(2))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))


# ---- wide rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_rows(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    N = 40000 if device.type == "cuda" else 20000
    x = guarded(draw(2, N, device=device, dtype=dtype))
    compare(x, backend, temperatures(2, device=device), bias=draw(N, device=device))
    for k in (50, N // 2):
        y = compare(x[:1], backend, 0.7, top_k=k)
        assert int((y != 0).sum()) <= k
    k = torch.tensor([[30], [N]], device=device)
    compare(x, backend, mask=torch.rand(N).to(device) < 0.5, keep=None, top_k=k)


def test_wide_rows_of_equals(backend: str, device: torch.device) -> None:
    x = adversarial(20000)[[0, 6, 7, 8]].to(device)
    for top_k in (1, 9000):
        y = flashsoft.fused_softmax(x, top_k=top_k, backend=backend)
        want, _ = oracle.fused_softmax(x.cpu().double(), top_k=top_k)
        assert torch.equal((y != 0).cpu(), want.float() != 0)
        assert_close_to(y, want, None, want * 8, name="y")


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_of_wide_rows(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    """Each chunk has fewer than k, k, or many more of the largest; the last part has few columns."""
    x = adversarial(16500).to(dtype)
    x[5, -1] = x[5].max()
    x[0, 7892:8182] = torch.arange(2, 292) / 16  # the largest of a part stand behind more equals than it may leave
    for k in (1, 60, 300):
        y = flashsoft.fused_softmax(x.to(device), top_k=k, backend=backend)
        want, _ = oracle.fused_softmax(x.double(), top_k=k)
        assert torch.equal((y != 0).cpu(), want.to(dtype) != 0), k
        assert_close_to(y, want, None, want * 8, name=f"k = {k}")
    keep = (torch.rand(16500) < 0.002).to(device)
    compare(guarded(x[2:4].to(device), shift=1), backend, temperatures(2, device=device), mask=keep, top_k=50)
    compare(draw(40, 3, 16500, device=device)[:2, 1], backend, 0.3, bias=draw(16500, device=device), top_k=9)


def test_few_of_wide_rows_that_are_not_finite(device: torch.device) -> None:
    pytest.importorskip("triton")
    x = draw(8, 20000, device=device)
    x[0, 9000] = NAN
    x[1, 19999] = INF
    x[2] = -INF
    x[3, 3:] = -INF
    x[4, 0], x[4, -1] = NAN, INF
    T = torch.tensor([1.0, 1.0, NAN, 0.0, 1.0, 0.0, -1.0, NAN], device=device)
    for temperature in (1.0, T):
        got, want = (
            flashsoft.fused_softmax(x, temperature, top_k=40, return_lse=True, backend=backend)
            for backend in ("triton", "reference")
        )
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_wide_rows_of_a_band(backend: str, device: torch.device) -> None:
    Sq, Sk = 3, 20000
    x = draw(1, Sq, Sk, device=device)
    for mask, keep in (
        (Window(left=9000, right=100, align=10000), oracle.band(Sq, Sk, 9000, 100, 10000)),
        (Causal(align=-1), oracle.band(Sq, Sk, None, 0, -1)),
        (Window(left=0, right=None), oracle.band(Sq, Sk, 0, None, Sk - Sq)),
    ):
        for top_k in (None, 2):
            compare(x, backend, mask=mask, keep=keep.to(device).expand(x.shape), top_k=top_k)


def test_a_vocabulary(backend: str, device: torch.device) -> None:
    x = draw(1, 128256, device=device, dtype=BF16, std=3.0)
    y = compare(x, backend, 0.7, top_k=64)
    assert int((y != 0).sum()) == 64


def test_leading_tiles_of_nothing(backend: str, device: torch.device) -> None:
    x = torch.full((3, 100000), -INF, device=device)
    for row, place in enumerate((0, 50000, 99999)):
        x[row, place] = 10.0
    for top_k in (None, 5):
        y, lse = flashsoft.fused_softmax(x, top_k=top_k, return_lse=True, backend=backend)
        assert y.argmax(-1).tolist() == [0, 50000, 99999] and y.sum(-1).tolist() == [1.0] * 3
        assert lse.tolist() == [10.0] * 3


# ---- configs, and what only a GPU shows ----------------------------------------------------------------


@pytest.mark.parametrize("N", [1, 2, 63, 64, 1000, 8192, 8193, 16384, 16385, 1_000_000])
def test_configs_hold_their_rows(N: int) -> None:
    for config in (forward(N, False), forward(N, True), backward(N)):
        assert config.block == power_of_two(config.block) and config.rows == power_of_two(config.rows)
        assert config.block >= N or (not config.one_tile and config.rows == 1)
        assert config.num_warps <= 16 and config.rows * config.block <= 64 * 32 * config.num_warps
    for bias_rows, reduced_rows in ((1, 1), (1, 10**6), (4096, 3)):
        share = bias_gradient(N, bias_rows, reduced_rows)
        assert 1 <= share.splits <= max(reduced_rows, 1) and share.rows * share.block <= 64 * 32 * share.num_warps


@pytest.mark.parametrize("N", [8193, 16385, 128256, 262145, 1_000_000, 2**27])
def test_configs_hold_what_a_wide_row_chooses(N: int) -> None:
    for k in (None, 1, 50, 256, 257, 1024, 1025, 10**6):
        config = wide(N, True, k)
        assert config.part % config.chunk == 0 and power_of_two(-(-N // config.chunk)) <= 16384
        assert config.chosen * config.chunk <= 8192 and (config.chosen == 0 or config.chosen >= (k or 1))
        assert config.chosen > 0 or (k or 0) > 8192 // config.chunk
    assert wide(N, False, None).chosen == 0


@pytest.mark.gpu
def test_nothing_of_the_size_of_x_beside_y() -> None:
    x = torch.randn(512, 128256, device="cuda", dtype=BF16)
    flashsoft.fused_softmax(x[:2], 0.7, top_k=50)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = flashsoft.fused_softmax(x, 0.7, top_k=50)
    maxima = 512 * (4008 + 64) * 4  # of chunks of 32, and places of the chosen ones
    assert torch.cuda.max_memory_allocated() - before < 1.01 * y.numel() * y.element_size() + maxima


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.zeros(65600, 32800, device="cuda", dtype=BF16)
    x[-1] = torch.randn(32800)
    y = flashsoft.fused_softmax(x, 0.5, Causal(align=40000), top_k=20)
    alone = flashsoft.fused_softmax(x[-1:], 0.5, top_k=20)
    assert torch.equal(y[-1:], alone) and int((y[-1] != 0).sum()) == 20


@pytest.mark.parametrize("temperature", [0.0, 1e-38, 1e-12])
def test_a_tiny_temperature_beside_a_bias(temperature: float, backend: str, device: torch.device) -> None:
    """x / T stays finite, so all mass is where x is largest, whatever the bias."""
    x = torch.tensor([[3.0, 10.0, 2.0]], device=device)
    bias = torch.tensor([5.0, -5.0, 0.0], device=device)
    row = torch.tensor([temperature], device=device)
    for T in (row, temperature) if temperature > 0 else (row,):
        y = flashsoft.fused_softmax(x, T, bias=bias, backend=backend)
        assert y.tolist() == [[0.0, 1.0, 0.0]]


def test_per_row_tensors_of_other_dimensions_are_refused(device: torch.device) -> None:
    x = torch.zeros(2, 2, 5, device=device)
    with pytest.raises(ValueError, match=r"temperature must have x's 3 dimensions, or 2 without dim"):
        flashsoft.fused_softmax(x, torch.ones(2, device=device))
    one = flashsoft.fused_softmax(x, torch.tensor(2.0, device=device))
    assert torch.equal(one, flashsoft.fused_softmax(x, 2.0))
