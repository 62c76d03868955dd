"""Attention against float64: values, lse and every gradient, on each backend, within tolerances.py."""

from __future__ import annotations

import cases
import inputs
import oracle
import pytest
import tolerances
import torch
import twin
from cases import AttentionCase
from tolerances import assert_close_to

import flashsoft
from flashsoft import Causal, Window

pytestmark = pytest.mark.usefixtures("poisoned")

NEG_INF = float("-inf")


def check(case: AttentionCase, dtype: torch.dtype, backend: str, device: torch.device, *, dlse: bool = True) -> None:
    """out, lse, dq, dk and dv of one case, the gradient of lse included."""
    q, k, v = inputs.attention_inputs(*case.sizes, device=device, dtype=dtype, layout=case.layout)
    mask = cases.MASKS[case.mask].given(case, device)
    keep = cases.MASKS[case.mask].keep(case)
    out, lse = flashsoft.attention(q, k, v, mask=mask, scale=case.scale, return_lse=True, backend=backend)
    assert out.dtype == dtype and out.shape == (case.B, case.Hq, case.Sq, case.Dv)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert lse.shape == (case.B, case.Hq, case.Sq)
    dout = inputs.draw(*out.shape, device=device, dtype=dtype)
    douts, outputs = [dout], [out]
    dlse_ = inputs.draw(*lse.shape, device=device, dtype=lse.dtype) if dlse else None
    if dlse_ is not None:
        douts, outputs = [dout, dlse_], [out, lse]
    grads = torch.autograd.grad(outputs, (q, k, v), douts)
    for x, gradient in zip((q, k, v), grads, strict=True):
        assert gradient.shape == x.shape and gradient.dtype == dtype
    compare(case, (q, k, v), keep, (out, lse, *grads), dout, dlse_)


def compare(
    case: AttentionCase,
    qkv: tuple[torch.Tensor, ...],
    keep: torch.Tensor | None,
    got: tuple[torch.Tensor, ...],
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
) -> None:
    want, size = oracle.attention(*qkv, keep, case.scale, dout, dlse)
    own = twin.attention(*qkv, keep, case.scale, dout, dlse)
    for name, result in zip(("out", "lse", "dq", "dk", "dv"), got, strict=True):
        half = name == "lse" and qkv[0].dtype in (torch.float16, torch.bfloat16)
        assert_close_to(
            result,
            getattr(want, name),
            getattr(own, name),
            getattr(size, name),
            floor=tolerances.FLOOR_LSE_HALF if half else None,
            name=name,
        )


def check_in_all(index: int, case: AttentionCase, backend: str, device: torch.device) -> None:
    for dtype in cases.dtypes(index, case, backend, device):
        check(case, dtype, backend, device)


def numbered(table: tuple[AttentionCase, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("index, case", list(enumerate(table)), ids=[str(case) for case in table])


@numbered(cases.SHAPES)
def test_shapes(index: int, case: AttentionCase, backend: str, device: torch.device) -> None:
    check_in_all(index, case, backend, device)


@numbered(cases.MASKED)
def test_masks(index: int, case: AttentionCase, backend: str, device: torch.device) -> None:
    check_in_all(index, case, backend, device)


@numbered(cases.LAYOUTS)
def test_strides(index: int, case: AttentionCase, backend: str, device: torch.device) -> None:
    check_in_all(index, case, backend, device)


@numbered(cases.SCALES)
def test_scales(index: int, case: AttentionCase, backend: str, device: torch.device) -> None:
    check_in_all(index, case, backend, device)


@pytest.mark.gpu
@numbered(cases.GPU_SHAPES)
def test_large_shapes(index: int, case: AttentionCase, device: torch.device) -> None:
    check_in_all(index, case, "triton", device)


@numbered(cases.EMPTY)
def test_empty(index: int, case: AttentionCase, backend: str, device: torch.device) -> None:
    q, k, v = inputs.attention_inputs(*case.sizes, device=device)
    mask = cases.MASKS[case.mask].given(case, device)
    out, lse = flashsoft.attention(q, k, v, mask=mask, return_lse=True, backend=backend)
    assert out.shape == (case.B, case.Hq, case.Sq, case.Dv) and (out == 0).all()
    assert lse.shape == (case.B, case.Hq, case.Sq) and (lse == NEG_INF).all()
    for x, gradient in zip((q, k, v), torch.autograd.grad((out.sum(), lse.sum()), (q, k, v)), strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


@pytest.mark.parametrize("Sq, Sk", [(5, 2), (40, 3), (70, 65)])
def test_queries_before_the_first_key_are_empty(Sq: int, Sk: int, backend: str, device: torch.device) -> None:
    """Lower right, Sq > Sk: the first Sq - Sk rows see nothing, exactly."""
    q, k, v = inputs.attention_inputs(1, 2, 2, Sq, Sk, 16, 16, device=device)
    out, lse = flashsoft.attention(q, k, v, mask=Causal(), return_lse=True, backend=backend)
    assert (out[:, :, : Sq - Sk] == 0).all() and (lse[:, :, : Sq - Sk] == NEG_INF).all()
    assert lse[:, :, Sq - Sk :].isfinite().all()
    dq, dk, dv = torch.autograd.grad((out.sum(), lse.sum()), (q, k, v))
    assert (dq[:, :, : Sq - Sk] == 0).all()
    assert all(gradient.isfinite().all() for gradient in (dq, dk, dv))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), NEG_INF])
@pytest.mark.parametrize("mask", ["tensor", "window", "causal_and_padding"])
def test_what_is_masked_for_all_queries_never_leaks(bad: float, mask: str, backend: str, device: torch.device) -> None:
    """Values and gradients are those over the live keys, with anything behind the mask."""
    Sq, Sk, live = 5, 41, 27
    q, k, v = inputs.attention_inputs(2, 2, 1, Sq, Sk, 16, 16, device=device)
    keep = torch.ones(Sq, Sk, dtype=torch.bool)
    keep[:, live:] = False
    given = keep.to(device)
    if mask == "window":  # queries at live - Sq .. live - 1
        keep &= oracle.band(Sq, Sk, None, 0, live - Sq)
        given = Causal(live - Sq)
    elif mask == "causal_and_padding":
        keep &= oracle.causal(Sq, Sk)
        given = Causal() & given
    with torch.no_grad():
        k[:, :, live:] = bad
        v[:, :, live:] = bad
    case = AttentionCase(2, 2, 1, Sq, Sk, 16, 16)
    out, lse = flashsoft.attention(q, k, v, mask=given, return_lse=True, backend=backend)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    assert (grads[1][:, :, live:] == 0).all() and (grads[2][:, :, live:] == 0).all()
    compare(case, (q, k, v), keep, (out, lse, *grads), dout, dlse)


@pytest.mark.parametrize("mask", ["causal", "window", "tensor"])
def test_a_query_that_sees_nothing_leaves_no_trace(mask: str, backend: str, device: torch.device) -> None:
    """NaN in it, and in the gradient of its output, reaches nobody."""
    Sq, Sk = 41, 27
    case = AttentionCase(1, 2, 1, Sq, Sk, 16, 16)
    q, k, v = inputs.attention_inputs(*case.sizes, device=device)
    if mask == "causal":
        given, keep = Causal(), oracle.causal(Sq, Sk)
    elif mask == "window":  # the last queries have gone past the last key
        given, keep = Window(5, 0, "upper_left"), oracle.band(Sq, Sk, 5, 0, 0)
    else:
        keep = oracle.causal(Sq, Sk)
        given = keep.to(device)
    dead = ~keep.any(-1)
    assert dead.any()
    with torch.no_grad():
        q[:, :, dead.to(device)] = float("nan")
    out, lse = flashsoft.attention(q, k, v, mask=given, return_lse=True, backend=backend)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    dout[:, :, dead.to(device)] = float("nan")
    dlse[:, :, dead.to(device)] = float("nan")
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    assert (grads[0][:, :, dead.to(device)] == 0).all() and (out[:, :, dead.to(device)] == 0).all()
    clean = torch.where(dead[:, None].to(device), 0.0, q.detach())
    dout, dlse = torch.where(dead[:, None].to(device), 0.0, dout), torch.where(dead.to(device), 0.0, dlse)
    compare(case, (clean, k, v), keep, (out, lse, *grads), dout, dlse)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_kept_and_not_finite_makes_its_rows_nan(bad: float, backend: str, device: torch.device) -> None:
    q, k, v = inputs.attention_inputs(1, 1, 1, 20, 20, 16, 16, device=device)
    with torch.no_grad():
        q.fill_(1.0)
        k[0, 0, 13] = bad  # its score is NaN, or +inf
        out, lse = flashsoft.attention(q, k, v, mask=Causal(), return_lse=True, backend=backend)
    assert out[0, 0, 13:].isnan().all() and out[0, 0, :13].isfinite().all()
    assert lse[0, 0, :13].isfinite().all()
    assert (lse[0, 0, 13:].isnan() if bad != bad else lse[0, 0, 13:] == bad).all()


def test_nan_in_a_kept_value_stays_in_its_column(backend: str, device: torch.device) -> None:
    q, k, v = inputs.attention_inputs(1, 1, 1, 20, 20, 16, 16, device=device)
    with torch.no_grad():
        v[0, 0, 13, 5] = float("nan")
        out = flashsoft.attention(q, k, v, backend=backend)
    assert out[..., 5].isnan().all()
    assert out.isnan().sum() == 20


def test_an_expanded_gradient(backend: str, device: torch.device) -> None:
    """out.sum().backward() hands in strides of 0."""
    case = AttentionCase(2, 2, 1, 9, 21, 16, 24, mask="causal")
    q, k, v = inputs.attention_inputs(*case.sizes, device=device)
    out, lse = flashsoft.attention(q, k, v, mask=Causal(), return_lse=True, backend=backend)
    one = torch.ones((), device=device)
    dout, dlse = one.expand(out.shape), one.expand(lse.shape)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    compare(case, (q, k, v), oracle.causal(9, 21), (out, lse, *grads), dout, dlse)


@pytest.mark.parametrize("layout", ["transposed", "every_other"])
def test_a_strided_gradient(layout: str, backend: str, device: torch.device) -> None:
    case = AttentionCase(2, 2, 2, 9, 21, 16, 24)
    q, k, v = inputs.attention_inputs(*case.sizes, device=device)
    out, lse = flashsoft.attention(q, k, v, return_lse=True, backend=backend)
    if layout == "transposed":
        dout, dlse = torch.randn(2, 9, 2, 24).transpose(1, 2), torch.randn(2, 9, 2).transpose(1, 2)
    else:
        dout, dlse = torch.randn(2, 2, 9, 48)[..., ::2], torch.randn(2, 2, 18)[..., ::2]
    dout, dlse = inputs.guarded(dout, device=device), inputs.guarded(dlse, device=device)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    compare(case, (q, k, v), None, (out, lse, *grads), dout, dlse)


@pytest.mark.parametrize("which", [0, 1])
def test_a_gradient_of_one_output_only(which: int, backend: str, device: torch.device) -> None:
    case = AttentionCase(1, 2, 1, 9, 21, 16, 16, mask="causal")
    q, k, v = inputs.attention_inputs(*case.sizes, device=device)
    out, lse = flashsoft.attention(q, k, v, mask=Causal(), return_lse=True, backend=backend)
    dout = torch.randn_like(out) if which == 0 else torch.zeros_like(out)
    dlse = torch.randn_like(lse) if which == 1 else torch.zeros_like(lse)
    grads = torch.autograd.grad((out, lse)[which], (q, k, v), (dout, dlse)[which])
    compare(case, (q, k, v), oracle.causal(9, 21), (out, lse, *grads), dout, dlse)


@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_addresses_off_any_alignment(shift: int, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    case = AttentionCase(1, 2, 2, 9, 21, 16, 16)
    q, k, v = (
        inputs.guarded(torch.randn(1, 2, S, 16), shift, device=device, dtype=dtype).requires_grad_()
        for S in (9, 21, 21)
    )
    out, lse = flashsoft.attention(q, k, v, return_lse=True, backend=backend)
    dout = inputs.guarded(torch.randn(out.shape), shift, device=device, dtype=dtype)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    compare(case, (q, k, v), None, (out, lse, *grads), dout, None)


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_out_lies_like_query(layout: str, backend: str, device: torch.device) -> None:
    q, k, v = inputs.attention_inputs(2, 4, 2, 9, 21, 16, 24, device=device, layout=layout)
    out, lse = flashsoft.attention(q, k, v, return_lse=True, backend=backend)
    assert (out.transpose(1, 2) if layout == "transposed" else out).is_contiguous()
    assert lse.is_contiguous()
    for x, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert gradient.stride() == x.stride()


def test_the_same_inputs_give_the_same_bits(backend: str, device: torch.device) -> None:
    torch.use_deterministic_algorithms(False)  # the fixture's switch would hide an order left to chance
    B, S = (4, 1000) if device.type == "cuda" else (1, 70)
    q, k, v = inputs.attention_inputs(B, 2, 1, S, S + 20, 32, 32, device=device, dtype=torch.float16)
    dout = torch.randn(B, 2, S, 32).to(q)

    def once() -> tuple[torch.Tensor, ...]:
        out, lse = flashsoft.attention(q, k, v, mask=Causal(), return_lse=True, backend=backend)
        return out, lse, *torch.autograd.grad(out, (q, k, v), dout)

    first = once()
    for _ in range(9 if device.type == "cuda" else 1):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_a_row_does_not_depend_on_its_batch(backend: str, device: torch.device) -> None:
    q, k, v = (x.detach() for x in inputs.attention_inputs(5, 2, 1, 9, 21, 16, 16, device=device))
    out = flashsoft.attention(q, k, v, backend=backend)
    alone = flashsoft.attention(q[3:4], k[3:4], v[3:4], backend=backend)
    if backend == "triton":
        assert torch.equal(alone[0], out[3])
    else:  # torch.matmul may choose another kernel for another batch
        torch.testing.assert_close(alone[0], out[3])


@pytest.mark.parametrize("B, H", [(10_923, 6), (65_537, 1), (1, 65_537)])
def test_more_than_65535_heads(B: int, H: int, backend: str, device: torch.device) -> None:
    if device.type == "cpu" and backend == "triton":
        pytest.skip("65,538 programs take minutes under the interpreter, which has no limit on grids either")
    case = AttentionCase(B, H, H, 2, 3, 16, 16)
    q, k, v = inputs.attention_inputs(*case.sizes, device=device)
    out, lse = flashsoft.attention(q, k, v, return_lse=True, backend=backend)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    compare(case, (q, k, v), None, (out, lse, *grads), dout, None)


@pytest.mark.parametrize("window", [Window(None, 0), Window(69), Window(70), Window(10_000), Causal() & Window(10_000)])
def test_a_window_without_effect_is_causal(window: flashsoft.Window, backend: str, device: torch.device) -> None:
    q, k, v = (x.detach() for x in inputs.attention_inputs(1, 1, 1, 70, 70, 16, 16, device=device))
    plain = flashsoft.attention(q, k, v, mask=Causal(), backend=backend)
    assert plain.abs().sum() > 0
    torch.testing.assert_close(flashsoft.attention(q, k, v, mask=window, backend=backend), plain)


def test_scores_far_from_zero(backend: str, device: torch.device) -> None:
    """Scores of 1e4 and more: a maximum taken off late would overflow."""
    case = AttentionCase(1, 1, 1, 9, 40, 16, 16)
    q, k, v = inputs.attention_inputs(*case.sizes, device=device)
    with torch.no_grad():
        q.mul_(300.0)
        k.mul_(100.0)
    out, lse = flashsoft.attention(q, k, v, return_lse=True, backend=backend)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert lse.abs().max() > 1e4
    compare(case, (q, k, v), None, (out, lse, *grads), dout, None)


def test_inputs_and_their_gradients_stay_apart(backend: str, device: torch.device) -> None:
    q, k, v = inputs.attention_inputs(1, 1, 1, 9, 21, 16, 16, device=device)
    before = [x.detach().clone() for x in (q, k, v)]
    out = flashsoft.attention(q, k, v, backend=backend)
    dout = torch.randn_like(out)
    dout_before = dout.clone()
    out.backward(dout)
    assert torch.equal(dout, dout_before)
    assert all(torch.equal(x.detach(), was) for x, was in zip((q, k, v), before, strict=True))


@pytest.mark.parametrize("mask", ["none", "causal", "window_2_2", "dead_rows", "causal_and_padding"])
def test_gradcheck(mask: str) -> None:
    case = AttentionCase(2, 4, 2, 5, 7, 3, 2, mask=mask)
    q, k, v = (
        x.to(torch.float64).detach().requires_grad_() for x in inputs.attention_inputs(*case.sizes, device="cpu")
    )
    given = cases.MASKS[mask].given(case, torch.device("cpu"))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flashsoft.attention(q, k, v, mask=given, return_lse=True)
        return out, torch.where(lse == NEG_INF, 0.0, lse)

    assert torch.autograd.gradcheck(run, (q, k, v))


@pytest.mark.parametrize("TILE", [4, 7])
def test_the_reference_in_many_tiles(TILE: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tiles are larger than most shapes here: the same cases through small ones."""
    monkeypatch.setattr("flashsoft.reference.scores.TILE", TILE)
    for case in (*cases.MASKED, *cases.LAYOUTS):
        check(case, torch.float64, "reference", torch.device("cpu"))


@pytest.mark.gpu
def test_memory_is_linear_in_length(device: torch.device) -> None:
    """Peak beyond the inputs, forward and backward, grows with the length and not with its square."""
    H, D = 4, 64

    def peak(S: int) -> int:
        q, k, v = (torch.randn(1, H, S, D, device=device, dtype=torch.float16, requires_grad=True) for _ in range(3))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        flashsoft.attention(q, k, v, mask=Causal()).sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    peak(8192)
    short, long = peak(8192), peak(32_768)
    assert long <= 4.5 * short
    # out, dout, dq, dk, dv at two bytes, lse and delta, and one float32 accumulator's worth to spare
    assert long <= H * 32_768 * (5 * 2 * D + 16 + 4 * D)


@pytest.mark.gpu
def test_offsets_beyond_two_to_the_31(device: torch.device) -> None:
    B, H, S, D = 4100, 64, 64, 128
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of free GPU memory")
    torch.use_deterministic_algorithms(False)
    q, k, v = (torch.zeros(B, H, S, D, device=device, dtype=torch.bfloat16) for _ in range(3))
    for x in (q, k, v):
        x[-1] = torch.randn(H, S, D, device=device)
    out = flashsoft.attention(q, k, v)
    last = tuple(x[-1:] for x in (q, k, v))
    want, size = oracle.attention(*last)
    assert_close_to(out[-1:], want.out, twin.attention(*last).out, size.out, name="out")
