"""Cross entropy on each backend against float64: values, gradients, options, in place, and the faults of real users."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inputs import draw, guarded
from tolerances import assert_close_to
from torch import Tensor
from torch.nn import functional as F

import flashsoft
from flashsoft import ops

F64 = torch.float64
INF, NAN = float("inf"), float("nan")
HALF_AND_SINGLE = (torch.float32, torch.float16, torch.bfloat16)
IGNORED = -100

# Under the interpreter rows are cut beyond 1,024 (in place shared) and, in place, read twice beyond 2,048.
LENGTHS = (1, 2, 5, 48, 129, 1000, 1024, 1501, 2600)
LONG = (4095, 4096, 4100, 16384, 16392, 32000, 50257, 65537, 102400, 128256, 151936, 262144, 600_000, 2_097_153)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight": {"weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "weight and smoothing": {"weight": True, "label_smoothing": 0.2},
    "z-loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 3.0},
    "everything": {"weight": True, "label_smoothing": 0.3, "z_loss": 1e-3, "softcap": 5.0, "ignore_index": 0},
}


def defined(
    x: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    dim: int = -1,
) -> Tensor:
    """The loss by torch's own operations, in x's dtype."""
    rows = x.movedim(dim, -1)
    N = rows.shape[-1]
    if softcap is not None:
        rows = softcap * torch.tanh(rows / softcap)
    kept = target != ignore_index
    rows = torch.where(kept.unsqueeze(-1), rows, 0.0)  # F.cross_entropy has NaN from NaN in ignored rows
    flat, labels = rows.reshape(-1, N), target.reshape(-1).long()
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    w = None if weight is None else weight.to(x.dtype)
    loss = F.cross_entropy(flat, labels, w, reduction="none", **options).view(target.shape)
    if z_loss:
        loss = loss + torch.where(kept, z_loss * torch.logsumexp(rows, -1).square(), 0.0)
    if reduction == "none":
        return loss
    of = torch.ones_like(loss) if w is None else w[torch.where(kept, target, 0).long()]
    return loss.sum() / torch.where(kept, of, 0.0).sum() if reduction == "mean" else loss.sum()


def labels(shape: tuple[int, ...], N: int, device: torch.device | str, ignore_index: int = IGNORED) -> Tensor:
    """Random labels, the first and the last class among them, every fifth ignored."""
    target = torch.randint(0, N, shape)
    flat = target.view(-1)
    flat[1:2], flat[2:3] = N - 1, 0
    flat[4::5] = ignore_index
    return target.to(device)


def check(x: Tensor, target: Tensor, backend: str, *, inplace: bool = False, **options: Any) -> Tensor:
    """Loss and gradient lie within bounds of float64; `weight=True` draws weights. Returns the loss."""
    N = x.shape[options.get("dim", -1)]
    if options.get("weight") is True:
        options = options | {"weight": (torch.rand(N) + 0.1).to(x.device)}

    def run(call: Callable[..., Tensor], x: Tensor, target: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        own = options | ({"weight": options["weight"].to(x.device)} if "weight" in options else {})
        loss = call(leaf.clone() if inplace and call is not defined else leaf, target, **own, **more)
        g = torch.linspace(0.5, 1.5, max(loss.numel(), 1)).to(loss)[: loss.numel()].view(loss.shape)
        (dx,) = torch.autograd.grad(loss, leaf, g)
        return loss.detach(), dx

    loss, dx = run(flashsoft.fused_cross_entropy, x, target, inplace_backward=inplace, backend=backend)
    wide = x.detach().cpu().to(F64)
    want, dwant = run(defined, wide, target.cpu())
    float_x = x.detach() if x.dtype == F64 else x.detach().float()
    same, _ = run(defined, float_x, target)
    _, dsame = run(defined, x.detach(), target)
    assert loss.dtype == (F64 if x.dtype == F64 else torch.float32) and dx.dtype == x.dtype and dx.shape == x.shape
    if x.numel():
        top = float(wide[wide.isfinite()].abs().max()) + 1.0
        size = torch.full_like(want, top * (1 + 2 * options.get("z_loss", 0.0) * top) * (1.5 if want.ndim else 1))
        if options.get("reduction") == "sum":
            size = size * target.numel() ** 0.5
        assert_close_to(loss, want, same, size, name="loss")
        # p and the one-hot cancel, wholly so in rows of one class
        terms = max(float(dwant.abs().max()), 1e-3 / max(target.numel(), 1))
        assert_close_to(dx, dwant, dsame, torch.full_like(dwant, terms), name="gradient")
    return loss


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("n", LENGTHS)
def test_lengths(n: int, inplace: bool, backend: str, device: torch.device, poisoned: None) -> None:
    for dtype in HALF_AND_SINGLE[:: 1 if n < 1000 else 2]:
        x = guarded(draw(5 if n < 1000 else 3, n, device=device, dtype=dtype, std=3.0))
        check(x, labels(x.shape[:1], n, device), backend, inplace=inplace)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, inplace: bool, backend: str, device: torch.device, poisoned: None) -> None:
    for n, dtype, reduction in ((33, torch.float32, "mean"), (1103, torch.bfloat16, "sum")):
        options = OPTIONS[name] | {"reduction": reduction}
        target = labels((5,), n, device, options.get("ignore_index", IGNORED))
        check(guarded(draw(5, n, device=device, dtype=dtype, std=3.0)), target, backend, inplace=inplace, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", HALF_AND_SINGLE)
@pytest.mark.parametrize("n", LONG)
def test_long_rows(n: int, dtype: torch.dtype, inplace: bool, device: torch.device, poisoned: None) -> None:
    """B36 on a GPU, and every way to cut and to share a row."""
    x, target = guarded(draw(6, n, device=device, dtype=dtype, std=3.0)), labels((6,), n, device)
    check(x, target, "triton", inplace=inplace)
    check(x, target, "triton", inplace=inplace, **OPTIONS["everything"] | {"ignore_index": IGNORED})


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_reductions_and_shapes(reduction: str, backend: str, device: torch.device, poisoned: None) -> None:
    for shape in ((7,), (2, 3), ()):
        check(draw(*shape, 19, device=device), labels(shape, 19, device), backend, reduction=reduction, weight=True)
    int32 = labels((4,), 19, device).int()
    check(draw(4, 19, device=device), int32, backend, reduction=reduction)


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_float64(name: str, device: torch.device) -> None:
    for inplace in (False, True):
        check(draw(4, 33, device=device, dtype=F64), labels((4,), 33, device), "reference", inplace=inplace)
        options = OPTIONS[name] | {"ignore_index": IGNORED}
        check(draw(4, 33, device=device, dtype=F64), labels((4,), 33, device), "reference", inplace=inplace, **options)


LAYOUTS: dict[str, Callable[[int, int], Tensor]] = {
    "transposed": lambda rows, n: torch.randn(n, rows).T,
    "every other column": lambda rows, n: torch.randn(rows, 2 * n)[:, ::2],
    "every other row": lambda rows, n: torch.randn(2 * rows, n)[::2],
    "slice of columns": lambda rows, n: torch.randn(rows, n + 3)[:, 1:-2],
    "heads inside": lambda rows, n: torch.randn(2, rows, 3, n).transpose(1, 2),
    "gaps everywhere": lambda rows, n: torch.randn(3, 2 * rows, 5, 3 * n)[:, ::2, 1:4, ::3],
}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str, inplace: bool, backend: str, device: torch.device, poisoned: None) -> None:
    for n, dtype in ((48, torch.bfloat16), (17, torch.float32), (1100, torch.float32)):
        if n > 1000 and layout in ("gaps everywhere", "heads inside"):
            continue
        x = guarded(LAYOUTS[layout](3, n), device=device, dtype=dtype)
        check(x, labels(x.shape[:-1], n, device), backend, inplace=inplace, **OPTIONS["weight and smoothing"])


def test_dims_and_strided_targets(backend: str, device: torch.device, poisoned: None) -> None:
    x = draw(3, 5, 4, 6, device=device)
    for dim in (0, 1, -2):
        shape = list(x.shape)
        del shape[dim]
        target = labels((*shape, 2), x.shape[dim], device)[..., 1]
        check(x, target, backend, dim=dim, reduction="none")
        check(x, target, backend, dim=dim, inplace=True)
    check(draw(2, 601, 19, device=device, dtype=torch.bfloat16), labels((2, 19), 601, device), backend, dim=1)


def test_misaligned(backend: str, device: torch.device) -> None:
    for shift, n in ((1, 64), (3, 1152), (8, 64)):
        x = guarded(draw(3, n, device=device, dtype=torch.float16), shift)
        for inplace in (False, True):
            check(x, labels((3,), n, device), backend, inplace=inplace)


@pytest.mark.parametrize("n", [48, 1504])
def test_bits_do_not_depend_on_batch_mates(n: int, backend: str, device: torch.device) -> None:
    """B70 for losses; and two runs give the same bits."""
    if backend == "reference":
        pytest.skip("torch's own sums are cut by the number of rows")
    x, target = draw(4, n, device=device, std=2.0), labels((4,), n, device)

    def run(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        loss = flashsoft.fused_cross_entropy(x, target, label_smoothing=0.1, reduction="none", backend=backend)
        return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]

    loss, dx = run(x, target)
    for i in (0, 3):
        alone = run(x[i : i + 1], target[i : i + 1])
        assert torch.equal(alone[0][0], loss[i]) and torch.equal(alone[1][0], dx[i])
    assert all(torch.equal(a, b) for a, b in zip(run(x, target), (loss, dx), strict=True))


@pytest.mark.parametrize("n", [9, 1200])
def test_B07_B09_not_finite(n: int, backend: str, device: torch.device) -> None:
    """NaN and infinities as in torch; -inf in whole tiles before the only finite scores."""
    x = torch.randn(7, n)
    x[0, : n - 2] = -INF
    x[1] = -INF
    x[2, 3] = NAN
    x[3, 5] = INF
    x[4, 0] = -INF
    target = torch.tensor([n - 1, 2, 1, 5, 0, 3, n - 1])
    for smoothing in (0.0, 0.2):
        options = {"label_smoothing": smoothing, "reduction": "none"}
        want = F.cross_entropy(x.double(), target, **options)
        for dtype in (torch.float32, torch.bfloat16):
            leaf = x.to(device, dtype).requires_grad_()
            got = flashsoft.fused_cross_entropy(leaf, target.to(device), backend=backend, **options)
            own = F.cross_entropy(x.to(dtype).double(), target, **options)
            assert torch.equal(got.isnan().cpu(), want.isnan()) and torch.equal(got.isinf().cpu(), want.isinf())
            assert_close_to(got, own, None, torch.full_like(own, 20.0))
            if smoothing == 0.0:
                dx = torch.autograd.grad(got[[0, 5, 6]].sum(), leaf)[0][[0, 5, 6]]
                wide = x.to(dtype).double().requires_grad_()
                dwant = torch.autograd.grad(F.cross_entropy(wide, target, reduction="none")[[0, 5, 6]].sum(), wide)[0]
                assert_close_to(dx, dwant[[0, 5, 6]], None, torch.ones_like(dwant[[0, 5, 6]]))


@pytest.mark.parametrize("offset", [-1e4, 1e7])
@pytest.mark.parametrize("n", [3, 1300])
def test_B12_far_from_zero(n: int, offset: float, backend: str, device: torch.device) -> None:
    """Whole numbers are exact in float32 even at 1e7, so that the offset must not show, in the gradient either."""
    near = torch.randint(-8, 9, (4, n))
    target = labels((4,), n, "cpu", ignore_index=-1)
    for smoothing in (0.0, 0.1):
        wide = near.double().requires_grad_()
        options = {"ignore_index": -1, "label_smoothing": smoothing}
        want = F.cross_entropy(wide, target, **options)
        (dwant,) = torch.autograd.grad(want, wide)
        for inplace in (False, True):
            x = (near + offset).to(device, torch.float32).requires_grad_()
            loss = flashsoft.fused_cross_entropy(
                x.clone(), target.to(device), inplace_backward=inplace, backend=backend, **options
            )
            (dx,) = torch.autograd.grad(loss, x)
            assert (
                abs(float(loss.detach()) - float(want.detach())) < 1e-5 and float((dx.cpu() - dwant).abs().max()) < 1e-6
            )


def test_the_range_of_float32(backend: str, device: torch.device) -> None:
    rows = [[3e38, -3e38, 0.0], [3e38, 3e38, -INF], [-3e38, -3e38, -3.4e38], [2e9, 2e9, 1e9], [-1e30, -1e30, -1e30]]
    x, target = torch.tensor(rows), torch.tensor([0, 1, 0, 1, 2])
    got = flashsoft.fused_cross_entropy(x.to(device), target.to(device), reduction="none", backend=backend)
    want = F.cross_entropy(x.double(), target, reduction="none")
    assert_close_to(got, want, None)


def test_states_of_slices_merge_to_the_whole(backend: str, device: torch.device) -> None:
    """What ranks of a group exchange, here of slices of several parts each."""
    N, name = 2600, backend
    x, target, weight = draw(3, N, device=device, std=3.0), labels((3,), N, device), torch.rand(N, device=device)
    slices = [(x[:, i : i + 1300], weight[i : i + 1300], i) for i in (0, 1300)]
    options = (IGNORED, 0.1, 1e-3, 5.0, name)
    states = [ops.call("cross_entropy_state", s, target, w, i, IGNORED, True, 5.0, name) for s, w, i in slices]
    merged = ops.call("cross_entropy", *slices[0][:1], target, weight[:1300], torch.stack(states, -1), 0, N, *options)
    whole = ops.call("cross_entropy", x, target, weight, None, 0, N, *options)
    for a, b in zip(merged, whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_B31_one_column(backend: str, device: torch.device) -> None:
    x = draw(5, 1, device=device).requires_grad_()
    loss = flashsoft.fused_cross_entropy(x, torch.zeros(5, dtype=torch.int64, device=device), backend=backend)
    loss.backward()
    assert float(loss.detach()) == 0.0 and float(x.grad.abs().max()) < 1e-6


@pytest.mark.parametrize("shape", [(0, 9), (3, 0, 9), (0, 0)])
def test_B32_no_rows(shape: tuple[int, ...], backend: str, device: torch.device) -> None:
    for inplace in (False, True):
        x = torch.empty(shape, device=device, requires_grad=True)
        target = torch.empty(shape[:-1], dtype=torch.int64, device=device)
        for reduction in ("mean", "sum") if inplace else ("mean", "sum", "none"):
            loss = flashsoft.fused_cross_entropy(
                x * 1, target, reduction=reduction, inplace_backward=inplace, backend=backend
            )
            (dx,) = torch.autograd.grad(loss.sum(), x)
            assert dx.shape == x.shape and bool(loss.isnan().all() if reduction == "mean" else (loss == 0).all())


def test_no_classes(backend: str, device: torch.device) -> None:
    """Only rows that are ignored can have none."""
    x = torch.empty(2, 0, device=device, requires_grad=True)
    target = torch.full((2,), IGNORED, device=device)
    loss = flashsoft.fused_cross_entropy(x, target, reduction="sum", backend=backend)
    loss.backward()
    assert float(loss.detach()) == 0.0 and x.grad.shape == (2, 0)


@pytest.mark.parametrize("n", [65537, 128256])
def test_B36_wide_rows(n: int, backend: str, device: torch.device) -> None:
    n = n if backend == "reference" or device.type == "cuda" else n // 20
    for inplace in (False, True):
        check(draw(2, n, device=device, dtype=torch.bfloat16), labels((2,), n, device), backend, inplace=inplace)


@pytest.mark.gpu
def test_B37_more_than_two_to_the_31_elements(device: torch.device) -> None:
    x = torch.zeros(16500, 131072, device=device, dtype=torch.bfloat16)
    x[-2:] = draw(2, 131072, device=device, dtype=torch.bfloat16)
    target = torch.full((16500,), 131071, device=device)
    x.requires_grad_()
    loss = flashsoft.fused_cross_entropy(x, target, reduction="none")
    want = F.cross_entropy(x[-2:].detach().double(), target[-2:], reduction="none")
    assert_close_to(loss[-2:], want, None, torch.full_like(want, 20.0))
    (dx,) = torch.autograd.grad(loss.sum(), x)
    last = x[-2:].detach().double()
    own = torch.softmax(last, -1) - F.one_hot(target[-2:], 131072)
    assert_close_to(dx[-2:], own, None, torch.ones_like(own))


def test_B41_gradients_with_stride_0(backend: str, device: torch.device) -> None:
    x, target = draw(6, 21, device=device).requires_grad_(), labels((6,), 21, device)
    loss = flashsoft.fused_cross_entropy(x, target, reduction="none", backend=backend)
    (dense,) = torch.autograd.grad(loss, x, torch.full((6,), 0.7, device=device), retain_graph=True)
    (expanded,) = torch.autograd.grad(loss, x, torch.tensor(0.7, device=device).expand(6))
    assert torch.equal(dense, expanded)


def test_B48_a_second_derivative_says_that_there_is_none(backend: str, device: torch.device) -> None:
    for inplace, says in ((False, "cross_entropy can be"), (True, "whose gradient is computed in the forward can be")):
        x = draw(3, 7, device=device).requires_grad_()
        loss = flashsoft.fused_cross_entropy(x * 1, labels((3,), 7, device), inplace_backward=inplace, backend=backend)
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match=f"{says} differentiated once only; for second derivatives use"):
            torch.autograd.grad(dx.square().sum(), x)


def test_B49_logits_changed_before_the_backward_are_noticed(backend: str, device: torch.device) -> None:
    for inplace in (False, True):
        x = draw(3, 7, device=device).requires_grad_()
        logits = x * 1
        loss = flashsoft.fused_cross_entropy(logits, labels((3,), 7, device), inplace_backward=inplace, backend=backend)
        with torch.no_grad():
            logits.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("inplace", [False, True])
def test_B54_every_target_ignored(inplace: bool, backend: str, device: torch.device) -> None:
    target = torch.full((5,), IGNORED, device=device)
    for reduction, want in (("mean", NAN), ("sum", 0.0)):
        x = draw(5, 10, device=device).requires_grad_()
        loss = flashsoft.fused_cross_entropy(
            x * 1, target, reduction=reduction, inplace_backward=inplace, backend=backend
        )
        loss.backward()
        assert bool(loss.isnan()) if reduction == "mean" else float(loss.detach()) == want
        assert bool((x.grad == 0).all())


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_B55_ignored_rows_add_nothing_whatever_stands_there(
    name: str, inplace: bool, backend: str, device: torch.device
) -> None:
    options = OPTIONS[name] | {"ignore_index": IGNORED}
    if options.get("weight"):
        options["weight"] = torch.rand(37, device=device)
    target = labels((6,), 37, device)
    target[2] = IGNORED
    kept = target != IGNORED
    x = draw(6, 37, device=device)
    x[4], x[2] = NAN, INF

    def run(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        loss = flashsoft.fused_cross_entropy(x * 1, target, inplace_backward=inplace, backend=backend, **options)
        return loss.detach(), torch.autograd.grad(loss, x)[0]

    loss, dx = run(x, target)
    want, dwant = run(x[kept], target[kept])
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(dx[kept], dwant)
    assert bool((dx[~kept] == 0).all())


def test_B56_a_loss_without_a_gradient(backend: str, device: torch.device) -> None:
    x, target = draw(4, 3, device=device), labels((4,), 3, device)
    want = F.cross_entropy(x, target)
    before = x.clone()
    torch.testing.assert_close(flashsoft.fused_cross_entropy(x, target, backend=backend), want)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            for inplace in (False, True):
                loss = flashsoft.fused_cross_entropy(
                    x.requires_grad_() if not torch.is_inference_mode_enabled() else x, target,
                    inplace_backward=False if x.requires_grad and inplace else inplace, backend=backend,
                )  # fmt: skip
                torch.testing.assert_close(loss, want)
                assert not loss.requires_grad and torch.equal(x, before)


def test_B58_logits_stay_as_they_are(backend: str, device: torch.device) -> None:
    z, target = draw(4, 9, device=device).requires_grad_(), labels((4,), 9, device)
    p = torch.softmax(z, -1)
    before = p.detach().clone()
    loss = flashsoft.fused_cross_entropy(p, target, backend=backend) + p.square().sum()
    (first,) = torch.autograd.grad(loss, z, retain_graph=True)
    (second,) = torch.autograd.grad(loss, z)
    wide = z.detach().double().requires_grad_()
    q = torch.softmax(wide, -1)
    (want,) = torch.autograd.grad(F.cross_entropy(q, target) + q.square().sum(), wide)
    assert torch.equal(p, before) and torch.equal(first, second)
    torch.testing.assert_close(first.double(), want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("ignore_index", [2, 0, -1, -100])
def test_B60_ignore_index_as_a_value(ignore_index: int, backend: str, device: torch.device) -> None:
    x, target = draw(10, 7, device=device), labels((10,), 7, device, ignore_index)
    check(x, target, backend, ignore_index=ignore_index)
    check(x, target, backend, ignore_index=ignore_index, inplace=True, **OPTIONS["weight and smoothing"])


@pytest.mark.parametrize("n", [9, 1200])
def test_labels_that_are_no_classes(
    n: int, backend: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = torch.tensor([1, n, -1, 2**40, -(2**40), IGNORED], device=device)
    for inplace in (False, True):
        x = guarded(draw(6, n, device=device)).requires_grad_()
        loss = flashsoft.fused_cross_entropy(
            x * 1, bad, reduction="sum", weight=torch.ones(n, device=device), inplace_backward=inplace, backend=backend
        )
        (dx,) = torch.autograd.grad(loss, x)
        assert bool(loss.isnan()) and bool(dx[[0, 5]].isfinite().all()) and bool(dx[1:5].isnan().all())
    rows = flashsoft.fused_cross_entropy(x, bad, reduction="none", backend=backend)
    assert rows.isnan().tolist() == [False, True, True, True, True, False]
    monkeypatch.setattr("flashsoft.env.CHECK", True)
    with pytest.raises(ValueError, match=rf"target must be in \[0, {n - 1}\] or ignore_index -100, got {n}"):
        flashsoft.fused_cross_entropy(x, bad, backend=backend)
    flashsoft.fused_cross_entropy(x, bad.clamp(0, n - 1), backend=backend)


# ---- in place -----------------------------------------------------------------------------------------------


def test_the_gradient_lies_in_the_logits_memory(backend: str, device: torch.device) -> None:
    x, target = draw(4, 1100, device=device).requires_grad_(), labels((4,), 1100, device)
    logits = x * 1
    seen: list[Tensor] = []
    logits.register_hook(lambda g: seen.append(g) or None)
    loss = flashsoft.fused_cross_entropy(logits, target, inplace_backward=True, backend=backend)
    written = logits.detach().clone()
    loss.backward()
    assert seen[0].data_ptr() == logits.data_ptr() and torch.equal(seen[0], written)
    torch.testing.assert_close(written, torch.autograd.grad(F.cross_entropy(x, target), x)[0])
    if backend == "triton":
        from flashsoft.kernels.exchange import _boards

        assert all(not bool(kept.any()) for kept in _boards.values())


@pytest.mark.parametrize("factor", [1.0, -2.5, 0.0])
def test_the_incoming_gradient_scales_it(factor: float, backend: str, device: torch.device) -> None:
    for shape in ((4, 9), (3, 1100), (2, 5, 7)):
        x, target = (
            draw(*shape, device=device, dtype=torch.bfloat16).requires_grad_(),
            labels(shape[:-1], shape[-1], device),
        )
        plain = flashsoft.fused_cross_entropy(x, target, backend=backend) * factor
        loss = flashsoft.fused_cross_entropy(x * 1, target, inplace_backward=True, backend=backend) * factor
        for a, b in zip(torch.autograd.grad(loss, x), torch.autograd.grad(plain, x), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=2**-6)


def test_whoever_saved_the_logits_is_told(backend: str, device: torch.device) -> None:
    z, target = draw(4, 9, device=device).requires_grad_(), labels((4,), 9, device)

    def overwrite(logits: Tensor) -> Tensor:
        return flashsoft.fused_cross_entropy(logits, target, inplace_backward=True, backend=backend)

    uses: list[Callable[[], Tensor]] = [
        lambda: overwrite(torch.softmax(z, -1)),  # saved its result
        lambda: overwrite(z.exp()[:, :].view(4, 9)),  # through views
        lambda: (lambda p: p.square().sum() + overwrite(p))(z * 1),  # another loss, before
        lambda: (lambda p: flashsoft.fused_cross_entropy(p, target, backend=backend) + overwrite(p))(z * 1),
        lambda: (lambda p: overwrite(p) + overwrite(p))(z * 1),  # a second write over the first
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            use().backward()


def test_a_second_backward_raises(backend: str, device: torch.device) -> None:
    z, target = draw(4, 9, device=device).requires_grad_(), labels((4,), 9, device)
    loss = flashsoft.fused_cross_entropy(z * 1, target, inplace_backward=True, backend=backend)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_uses_that_saved_nothing_are_right(backend: str, device: torch.device) -> None:
    """A sum before, and a view in between: the base's other part keeps its own gradient."""
    z, target = draw(4, 9, device=device).requires_grad_(), labels((4,), 7, device)
    whole = z * 1
    loss = whole.sum() + flashsoft.fused_cross_entropy(whole[:, 1:8], target, inplace_backward=True, backend=backend)
    (dz,) = torch.autograd.grad(loss, z)
    (want,) = torch.autograd.grad(z.sum() + F.cross_entropy(z[:, 1:8], target), z)
    torch.testing.assert_close(dz, want)


def test_under_checkpoint(backend: str, device: torch.device) -> None:
    from torch.utils.checkpoint import checkpoint

    z, target = draw(4, 9, device=device).requires_grad_(), labels((4,), 9, device)

    def head(z: Tensor) -> Tensor:
        return flashsoft.fused_cross_entropy(z * 2, target, inplace_backward=True, backend=backend)

    (dz,) = torch.autograd.grad(checkpoint(head, z, use_reentrant=False), z)
    torch.testing.assert_close(dz, torch.autograd.grad(F.cross_entropy(z * 2, target), z)[0])


def test_what_cannot_be_overwritten(device: torch.device) -> None:
    target = torch.tensor([1, 2], device=device)
    leaf = draw(2, 5, device=device).requires_grad_()
    for logits in (leaf, leaf.view(2, 5), leaf[:, :4]):
        with pytest.raises(ValueError, match="logits must not be a leaf that requires grad, or a view of one"):
            flashsoft.fused_cross_entropy(logits, target, inplace_backward=True)
    with pytest.raises(ValueError, match="logits must not be expanded"):
        flashsoft.fused_cross_entropy((leaf[:1] * 1).expand(2, 5), target, inplace_backward=True)
    with pytest.raises(ValueError, match="reduction must be mean or sum with inplace_backward"):
        flashsoft.fused_cross_entropy(leaf * 1, target, inplace_backward=True, reduction="none")


# ---- arguments, modules, compilation --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "says", "change"),
    [
        (TypeError, "logits must be float32", {"logits": torch.ones(2, 3, dtype=torch.int64)}),
        (TypeError, "target must be class indices, int64 or int32, got torch.float32", {"target": torch.rand(2, 3)}),
        (
            ValueError,
            r"target must have logits' shape without dim, \(2,\), got \(3,\)",
            {"target": torch.zeros(3).long()},
        ),
        (ValueError, "weight must have a weight for each of 3 classes", {"weight": torch.ones(2)}),
        (ValueError, "weight must not require a gradient", {"weight": torch.ones(3, requires_grad=True)}),
        (ValueError, r"label_smoothing must be in \[0, 1\], got 1.5", {"label_smoothing": 1.5}),
        (ValueError, "z_loss must be >= 0", {"z_loss": -1.0}),
        (ValueError, "softcap must be finite and > 0", {"softcap": 0.0}),
        (ValueError, "reduction must be one of none, mean, sum, got 'max'", {"reduction": "max"}),
        (TypeError, "ignore_index must be an int", {"ignore_index": 1.0}),
        (ValueError, "dim must be in", {"dim": 2}),
        (TypeError, "group must be a torch.distributed.ProcessGroup", {"group": "all"}),
        (ValueError, "logits must have at least one dimension", {"logits": torch.tensor(1.0)}),
    ],
)
def test_arguments(error: type[Exception], says: str, change: dict[str, Any]) -> None:
    arguments = {"logits": torch.zeros(2, 3), "target": torch.tensor([0, 2])} | change
    with pytest.raises(error, match=says):
        flashsoft.fused_cross_entropy(**arguments)


def test_the_module(device: torch.device) -> None:
    x, target = draw(4, 9, device=device), labels((4,), 9, device)
    weight = torch.rand(9)
    options: dict[str, Any] = {"ignore_index": IGNORED, "label_smoothing": 0.1, "reduction": "sum"}
    ours, theirs = flashsoft.FusedCrossEntropyLoss(weight, **options), torch.nn.CrossEntropyLoss(weight, **options)
    torch.testing.assert_close(copy.deepcopy(ours).to(device)(x, target), theirs.to(device)(x, target))
    assert not ours.state_dict() and "label_smoothing=0.1" in repr(ours) and "weight=(9,)-tensor" in repr(ours)
    with pytest.raises(ValueError, match="z_loss must be >= 0"):
        flashsoft.FusedCrossEntropyLoss(z_loss=-1.0)


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled(inplace: bool, backend: str, device: torch.device) -> None:
    """In place is a permission that a compiled call makes no use of."""
    torch._dynamo.reset()
    z, target = draw(4, 9, device=device).requires_grad_(), labels((4,), 9, device)

    def step(z: Tensor, target: Tensor) -> Tensor:
        return flashsoft.fused_cross_entropy(
            z * 2, target, label_smoothing=0.1, inplace_backward=inplace, backend=backend
        )

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for rows in (4, 3):
        (got,) = torch.autograd.grad(compiled(z[:rows], target[:rows]), z)
        (want,) = torch.autograd.grad(step(z[:rows], target[:rows]), z)
        torch.testing.assert_close(got, want)
    torch._dynamo.reset()


def test_func_and_vmap(device: torch.device) -> None:
    x, target = draw(3, 4, 9, device=device).double(), labels((3, 4), 9, device)
    weight = torch.rand(9, device=device, dtype=F64)

    def ours(x: Tensor, target: Tensor) -> Tensor:
        return flashsoft.fused_cross_entropy(x, target, weight=weight, label_smoothing=0.1)

    def theirs(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x, target, weight, label_smoothing=0.1)

    for transform in (lambda f: f, torch.func.grad):  # vmap has no rule for torch's own loss with ignored rows
        one_by_one = torch.stack([transform(theirs)(x[i], target[i]) for i in range(3)])
        torch.testing.assert_close(torch.func.vmap(transform(ours))(x, target), one_by_one)
    torch.testing.assert_close(torch.func.grad(ours)(x[0], target[0]), torch.func.grad(theirs)(x[0], target[0]))


@pytest.mark.gpu
def test_captured_in_a_cuda_graph(device: torch.device) -> None:
    x, target = draw(8, 50264, device=device, dtype=torch.bfloat16), labels((8,), 50264, device)

    def work() -> tuple[Tensor, Tensor]:
        z = x.detach().requires_grad_()
        loss = flashsoft.fused_cross_entropy(z * 1, target, inplace_backward=True)
        return loss.detach(), torch.autograd.grad(loss, z)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(got, want) for got, want in zip(captured, work(), strict=True))
