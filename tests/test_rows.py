"""softmax, log_softmax, logsumexp: forward and backward on each backend, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from inputs import draw, guarded
from tolerances import assert_close_to
from torch import Tensor

import flashsoft
from flashsoft.tuning import rows as tuning
from flashsoft.tuning.rows import RowConfig

F64 = torch.float64
INF, NAN = float("inf"), float("nan")
HALF_AND_SINGLE = (torch.float32, torch.float16, torch.bfloat16)
OPS = ("softmax", "log_softmax", "logsumexp")

# Where another way begins: under the interpreter rows are shared beyond 1,024 and read twice beyond 2,048; on an H200
# they have other tiles beyond each of EDGES, are shared beyond 11,264 (16 bits, backward), 16,384 and 32,768, and read
# twice beyond 262,144 (float32 and backward) or 524,288.
LENGTHS = (1, 2, 3, 64, 127, 128, 129, 255, 257, 511, 512, 513, 1017, 1023, 1024, 1025, 2047, 2048, 2049)
EDGES = (3072, 6144, 8192, 11264, 16384, 32768, 65536, 163840, 1 << 18, 1 << 19)
LONG = (*(edge + by for edge in EDGES for by in (-1, 0, 1)), 50257, 128256, (1 << 20) + 3)


def theirs(op: str, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """torch's own; logsumexp in float32 for half precision, as ours is."""
    if op == "logsumexp":
        return torch.logsumexp(x if x.dtype == F64 else x.float(), dim)
    return getattr(torch, op)(x, dim, dtype=dtype)


def ours(op: str, x: Tensor, dim: int, backend: str, dtype: torch.dtype | None = None) -> Tensor:
    if op == "logsumexp":
        return flashsoft.logsumexp(x, dim, backend=backend)
    return getattr(flashsoft, op)(x, dim, dtype=dtype, backend=backend)


def gradient(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = function(x)
    (dx,) = torch.autograd.grad(y, x, dy.to(y.dtype))
    return y.detach(), dx


def magnitude(op: str, x: Tensor, dy: Tensor, dim: int) -> Tensor:
    """Of the terms a gradient is the difference of."""
    p = torch.softmax(x, dim)
    if op == "softmax":
        return p * (dy.abs() + (p * dy).square().sum(dim, keepdim=True).sqrt())
    if op == "log_softmax":
        return dy.abs() + p * dy.square().sum(dim, keepdim=True).sqrt()
    # exp(x - lse) is only as good as lse, which is rounded: a relative error of eps * |lse|
    lse = torch.logsumexp(x, dim, keepdim=True)
    return p * dy.unsqueeze(dim).abs() * (1 + lse.abs())


def check(
    op: str,
    x: Tensor,
    backend: str,
    dim: int = -1,
    dtype: torch.dtype | None = None,
    dy: Tensor | None = None,
) -> Tensor:
    """Values and the gradient for dy (random by default) lie within bounds; returns the result."""
    wide = x.detach().cpu().to(F64)
    shape = theirs(op, wide, dim).shape
    if dy is None:
        dy = torch.randn(shape).to(x.device, dtype or (torch.float32 if op == "logsumexp" else x.dtype))
    y, dx = gradient(lambda t: ours(op, t, dim, backend, dtype), x, dy)
    want, dwant = gradient(lambda t: theirs(op, t, dim), wide, dy.cpu().to(F64))
    same, dsame = gradient(lambda t: theirs(op, t, dim, dtype), x, dy)
    assert y.dtype == same.dtype and dx.dtype == x.dtype
    if x.numel():
        size = magnitude(op, wide, dy.cpu().to(F64), dim)
        assert_close_to(dx, dwant, dsame, size, name=f"gradient of {op}")
    assert dx.shape == x.shape
    # logsumexp is the sum of a maximum and a logarithm, which may cancel
    size = wide.abs().amax(dim) + 1 if op == "logsumexp" and x.numel() else None
    assert_close_to(y, want, same, size, name=op)
    return y


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("op", OPS)
def test_lengths(op: str, n: int, backend: str, device: torch.device, poisoned: None) -> None:
    for dtype in HALF_AND_SINGLE:
        check(op, guarded(draw(3, n, device=device, dtype=dtype, std=3.0)), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF_AND_SINGLE)
@pytest.mark.parametrize("n", LONG)
@pytest.mark.parametrize("op", OPS)
def test_long_rows(op: str, n: int, dtype: torch.dtype, device: torch.device, poisoned: None) -> None:
    check(op, guarded(draw(5, n, device=device, dtype=dtype, std=3.0)), "triton")


@pytest.mark.parametrize("op", OPS)
def test_many_tiles(op: str, backend: str, device: torch.device) -> None:
    check(op, guarded(draw(1, 20011, device=device, std=3.0)), backend)


@pytest.mark.parametrize(("rows", "n"), [(1, 5), (70, 5), (1025, 3), (2100, 1), (33, 130)])
@pytest.mark.parametrize("op", OPS)
def test_row_counts(op: str, rows: int, n: int, backend: str, device: torch.device, poisoned: None) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check(op, guarded(draw(rows, n, device=device, dtype=dtype)), backend)


@pytest.mark.parametrize("op", OPS)
def test_float64(op: str, device: torch.device) -> None:
    check(op, draw(4, 33, device=device, dtype=F64), "reference")


@pytest.mark.parametrize("op", OPS)
def test_dims(op: str, backend: str, device: torch.device, poisoned: None) -> None:
    x = draw(3, 5, 4, 6, device=device)
    for dim in (0, 1, 2, 3, -1, -2, -4):
        y = check(op, x, backend, dim)
        if op != "logsumexp":
            assert y.stride() == x.stride()
    check(op, draw(9, device=device), backend, 0)


@pytest.mark.parametrize("op", OPS)
def test_dim_outside_in_tiles(op: str, backend: str, device: torch.device, poisoned: None) -> None:
    """Rows lie side by side in memory and are longer than a tile."""
    for dtype in (torch.float32, torch.bfloat16):
        check(op, guarded(draw(2, 601, 19, device=device, dtype=dtype)), backend, 1)


LAYOUTS: dict[str, Callable[[int, int], Tensor]] = {
    "transposed": lambda rows, n: torch.randn(n, rows).T,
    "every other column": lambda rows, n: torch.randn(rows, 2 * n)[:, ::2],
    "every other row": lambda rows, n: torch.randn(2 * rows, n)[::2],
    "slice of columns": lambda rows, n: torch.randn(rows, n + 3)[:, 1:-2],
    "one row expanded": lambda rows, n: torch.randn(n).expand(rows, n),
    "one column expanded": lambda rows, n: torch.randn(rows, 1).expand(rows, n),
    "heads inside": lambda rows, n: torch.randn(2, rows, 3, n).transpose(1, 2),
    "all permuted": lambda rows, n: torch.randn(n, 2, rows, 3).permute(3, 1, 2, 0),
    "gaps everywhere": lambda rows, n: torch.randn(3, 2 * rows, 5, 3 * n)[:, ::2, 1:4, ::3],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_strides(op: str, layout: str, backend: str, device: torch.device, poisoned: None) -> None:
    for n, dtype in ((48, torch.bfloat16), (17, torch.float32), (1100, torch.float32)):
        if n > 1000 and layout in ("gaps everywhere", "all permuted"):
            continue
        x = guarded(LAYOUTS[layout](2, n), device=device, dtype=dtype)
        y = check(op, x, backend)
        expected = x.new_empty(x.shape[:-1]) if op == "logsumexp" else torch.empty_like(x)
        assert y.stride() == expected.stride()


@pytest.mark.parametrize("op", OPS)
def test_misaligned(op: str, backend: str, device: torch.device) -> None:
    for shift in (1, 3, 8):
        check(op, guarded(draw(3, 64, device=device, dtype=torch.float16), shift), backend)


@pytest.mark.parametrize("op", OPS)
def test_layouts_of_dy(op: str, backend: str, device: torch.device, poisoned: None) -> None:
    for n in (33, 700):
        x = draw(4, 3, n, device=device)
        shape = (4, 3) if op == "logsumexp" else (4, 3, n)
        for dy in (
            draw(1, device=device).expand(shape),
            draw(*shape[1:], device=device).expand(shape),
            draw(4, *[1] * (len(shape) - 1), device=device).expand(shape),
            draw(*reversed(shape), device=device).permute(*reversed(range(len(shape)))),
        ):
            check(op, x, backend, dy=dy)


def not_finite(n: int) -> Tensor:
    """Rows with -inf, +inf and NaN in every mixture, at the start, at the end and in a whole first half."""
    x = torch.randn(12, n)
    half = n // 2
    x[0] = -INF
    x[1, -1] = INF
    x[2, -1], x[2, 0] = NAN, 50.0
    x[3, 0], x[3, -1] = NAN, INF
    x[4, :half] = -INF
    x[5, half:] = -INF
    x[6, :-1] = -INF
    x[7], x[7, -1] = -INF, INF
    x[8], x[8, 0] = -INF, NAN
    x[9] = INF
    x[10] = NAN
    return x


@pytest.mark.parametrize("n", [3, 64, 1000, 1103])
@pytest.mark.parametrize("op", OPS)
def test_not_finite(op: str, n: int, backend: str, device: torch.device) -> None:
    for dtype in HALF_AND_SINGLE:
        x = not_finite(n).to(dtype)
        y = ours(op, x.to(device), -1, backend)
        # torch gives logsumexp of a row with both NaN and +inf as NaN too
        assert_close_to(y, theirs(op, x.to(F64), -1), theirs(op, x, -1), torch.tensor(10.0).expand(y.shape))
        finite = x[[4, 5, 6, 11]].to(device)
        dy = torch.randn(4, *y.shape[1:], device=device)
        _, dx = gradient(lambda t: ours(op, t, -1, backend), finite, dy)
        _, want = gradient(lambda t: theirs(op, t, -1), finite.cpu().to(F64), dy.cpu().to(F64))
        _, same = gradient(lambda t: theirs(op, t, -1), finite, dy)
        assert_close_to(dx, want, same, magnitude(op, finite.cpu().to(F64), dy.cpu().to(F64), -1))


def test_gradient_of_logsumexp_without_mass(backend: str, device: torch.device, poisoned: None) -> None:
    for n in (4, 1100):
        x = draw(3, n, device=device)
        x[1] = -INF
        _, dx = gradient(lambda t: flashsoft.logsumexp(t, backend=backend), x, torch.ones(3, device=device))
        assert bool((dx[1] == 0).all()) and bool((dx[0] > 0).all())


@pytest.mark.parametrize("n", [1, 5, 256, 1100])
def test_equal_values(n: int, backend: str, device: torch.device) -> None:
    for value in (0.0, 3.7, -65504.0, 3e38):
        x = torch.full((2, n), value, device=device)
        eps = torch.finfo(torch.float32).eps
        y = flashsoft.softmax(x, backend=backend)
        assert float((y.cpu().to(F64) * n - 1).abs().max()) <= 2 * eps
        y = flashsoft.log_softmax(x, backend=backend)
        assert float((y.cpu().to(F64) + math.log(n)).abs().max()) <= 2 * eps * max(1.0, math.log(n))


@pytest.mark.parametrize("offset", [1e4, -1e4, 1e7, -1e7])
@pytest.mark.parametrize("n", [7, 300, 1300])
def test_far_from_zero(n: int, offset: float, backend: str, device: torch.device) -> None:
    """Whole numbers are exact in float32 even at 1e7, so that the offset must not show."""
    near = torch.randint(-8, 9, (3, n))
    x = (near + offset).to(device=device, dtype=torch.float32)
    want = torch.log_softmax(near.to(F64), -1)
    assert float((flashsoft.log_softmax(x, backend=backend).cpu() - want).abs().max()) < 1e-5
    assert float((flashsoft.softmax(x, backend=backend).cpu() - want.exp()).abs().max()) < 1e-6
    for op in ("softmax", "log_softmax"):
        check(op, x, backend)


def test_range_of_float32(backend: str, device: torch.device) -> None:
    x = torch.tensor([[3e38, -3e38, 0.0], [3e38, 3e38, -INF], [-3e38, -3e38, -3.4e38]], device=device)
    for op in OPS:
        assert_close_to(ours(op, x, -1, backend), theirs(op, x.cpu().to(F64), -1).float(), None)


@pytest.mark.parametrize(("shape", "dim"), [((0, 5), 1), ((3, 0), 1), ((0,), 0), ((2, 0, 3), 1), ((2, 0, 3), 2)])
@pytest.mark.parametrize("op", OPS)
def test_empty(op: str, shape: tuple[int, ...], dim: int, backend: str, device: torch.device, poisoned: None) -> None:
    for dtype in HALF_AND_SINGLE:
        y = check(op, torch.empty(shape, device=device, dtype=dtype), backend, dim)
        if op == "logsumexp":
            assert bool((y == -INF).all())


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_output_dtype(op: str, backend: str, device: torch.device, poisoned: None) -> None:
    for source in HALF_AND_SINGLE:
        for dtype in HALF_AND_SINGLE:
            if (source, dtype) == (torch.float32, torch.float16):
                continue  # torch rounds x first: no yardstick
            x = guarded(draw(3, 300, device=device, dtype=source))
            y = ours(op, x, -1, backend, dtype)
            assert y.dtype == dtype
            own = theirs(op, x.float(), -1).to(dtype)
            assert_close_to(y, theirs(op, x.cpu().to(F64), -1), own, name=f"{source} -> {dtype}")
    for source in (torch.float16, torch.bfloat16):
        check(op, guarded(draw(3, 300, device=device, dtype=source)), backend, dtype=torch.float32)


@pytest.mark.parametrize("n", [1, 100, 600, 1500])
@pytest.mark.parametrize("op", OPS)
def test_bits_do_not_depend_on_batch_mates(op: str, n: int, backend: str, device: torch.device) -> None:
    if backend == "reference":
        pytest.skip("torch's own sums are cut by the number of rows")
    x = draw(6, n, device=device, std=2.0)
    dy = draw(*x.shape[: 1 if op == "logsumexp" else 2], device=device)
    y, dx = gradient(lambda t: ours(op, t, -1, backend), x, dy)
    for i in (0, 3, 5):
        alone, dx_alone = gradient(lambda t: ours(op, t, -1, backend), x[i : i + 1], dy[i : i + 1])
        assert torch.equal(alone[0], y[i]) and torch.equal(dx_alone[0], dx[i])
    again, dx_again = gradient(lambda t: ours(op, t, -1, backend), x, dy)
    assert torch.equal(again, y) and torch.equal(dx_again, dx)


@pytest.mark.parametrize("op", OPS)
def test_second_derivative(op: str, backend: str, device: torch.device) -> None:
    def twice(function: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        x, dy = x.detach().requires_grad_(), dy.detach().requires_grad_()
        (dx,) = torch.autograd.grad(function(x), x, dy, create_graph=True)
        return torch.autograd.grad((dx * weights).sum() + dx.square().sum(), (x, dy))

    x, weights = draw(3, 40, device=device), draw(3, 40, device=device)
    dy = draw(*((3,) if op == "logsumexp" else (3, 40)), device=device)
    got = twice(lambda t: ours(op, t, -1, backend), x, weights, dy)
    want = twice(lambda t: theirs(op, t, -1), *(t.cpu().to(F64) for t in (x, weights, dy)))
    same = twice(lambda t: theirs(op, t, -1), x, weights, dy)
    for name, value, oracle, own in zip(("x", "dy"), got, want, same, strict=True):
        size = torch.tensor(4.0).expand(oracle.shape)
        assert_close_to(value, oracle, own, size, name=f"second derivative in {name}")


@pytest.mark.parametrize("op", OPS)
def test_gradgradcheck(op: str) -> None:
    x = torch.randn(2, 5, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: ours(op, t, 0, "reference"), (x,))
    assert torch.autograd.gradgradcheck(lambda t: ours(op, t, 0, "reference"), (x,))


def test_input_is_not_written(backend: str, device: torch.device) -> None:
    x = draw(3, 600, device=device)
    before = x.clone()
    for op in OPS:
        ours(op, x, -1, backend)
    assert torch.equal(x, before)


def test_result_changed_in_place_is_noticed(backend: str, device: torch.device) -> None:
    for op in ("softmax", "log_softmax"):
        y = ours(op, draw(3, 6, device=device).requires_grad_(), -1, backend)
        y.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [((1 << 31) // 1000 + 9, 1000), (3, (1 << 30) + 8), (2, (1 << 31) + 24)])
def test_more_than_int32(shape: tuple[int, int], device: torch.device) -> None:
    if torch.cuda.mem_get_info()[0] < 100 << 30:
        pytest.skip("needs 100 GB of device memory")
    x = torch.randn(shape, device=device, dtype=torch.bfloat16)
    y = flashsoft.softmax(x)
    lse = flashsoft.logsumexp(x)
    for row in (0, shape[0] - 1):
        for columns in (slice(0, 1000), slice(shape[1] - 1000, None)):
            want = (x[row, columns].double() - lse[row].double()).exp()
            assert_close_to(y[row, columns], want, None)
    last = x[-1].float()
    assert_close_to(lse[-1:], last.double().logsumexp(-1, keepdim=True), last.logsumexp(-1, keepdim=True))


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1000, 50257])
def test_bits_do_not_depend_on_the_size_of_the_tensor(n: int, device: torch.device) -> None:
    """Tensors beyond any cache are read with another hint."""
    x = draw((1 << 26) // n + 9, n, device=device, dtype=torch.bfloat16)
    for op in ("softmax", "log_softmax"):
        y = ours(op, x, -1, "triton")
        for i in (0, 8, 32):
            assert torch.equal(ours(op, x[i : i + 8], -1, "triton"), y[i : i + 8])


# ---- every way to take a row -------------------------------------------------------------------------------------

# config: lengths at which it changes its way: rows held whole, shared and held, shared or alone and read twice
FORCED: dict[RowConfig, tuple[int, ...]] = {
    RowConfig(8, 32, 4): (31, 32, 33, 70),
    RowConfig(1, 128, 4): (127, 128, 129),
    RowConfig(1, 64, 4, tiles=3): (65, 128, 129, 192, 193),
    RowConfig(1, 64, 4, tiles=2, max_parts=3): (128, 129, 257, 384, 385),
    RowConfig(1, 128, 4, max_parts=2): (128, 129, 256, 300),
}


@pytest.fixture
def forced(request: pytest.FixtureRequest) -> Iterator[RowConfig]:
    """The config that every row problem gets meanwhile."""
    launch = pytest.importorskip("flashsoft.kernels.launch")
    launch.forget()
    with tuning.forcing(request.param):
        yield request.param
    launch.forget()


@pytest.mark.parametrize("forced", FORCED, indirect=True, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_every_way(op: str, forced: RowConfig, device: torch.device, poisoned: None) -> None:
    for n in FORCED[forced]:
        for dtype in (torch.float32, torch.bfloat16):
            check(op, guarded(draw(2, n, device=device, dtype=dtype, std=3.0)), "triton")


SHARED = RowConfig(1, 64, 4, tiles=2, max_parts=2)


@pytest.mark.parametrize("forced", [SHARED], indirect=True, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_not_finite_parts(op: str, forced: RowConfig, device: torch.device) -> None:
    """Parts of -inf only, of +inf, of NaN: each alone is not the row."""
    test_not_finite(op, 140, "triton", device)


@pytest.mark.parametrize(
    "op, forced",
    [("softmax", RowConfig(1, 256, 4)), ("softmax", RowConfig(1, 64, 4)), *((op, SHARED) for op in OPS)],
    indirect=["forced"],
    ids=str,
)
def test_rows_that_begin_anywhere(op: str, forced: RowConfig, device: torch.device, poisoned: None) -> None:
    """Rows at every distance from 16 bytes, alike in all tensors or not, with NaN between them."""
    for dtype, n, gap in (
        (torch.float32, 5, 0),
        (torch.float32, 61, 4),
        (torch.float32, 255, 1),
        (torch.bfloat16, 125, 2),
        (torch.bfloat16, 249, 8),
        (torch.bfloat16, 301, 0),
    ):
        apart = torch.full((9, n + gap), NAN, device=device, dtype=dtype)
        apart[:, :n] = draw(9, n, device=device, dtype=dtype)
        check(op, apart[:, :n], "triton")
    check(op, guarded(draw(3, 251, device=device, dtype=torch.bfloat16), 1), "triton")


@pytest.mark.parametrize("forced", [SHARED], indirect=True, ids=str)
def test_boards_are_left_clean(forced: RowConfig, device: torch.device) -> None:
    from flashsoft.kernels import exchange

    for rows in (1, 4):
        for op in OPS:
            check(op, draw(rows, 200, device=device), "triton")
    boards = list(exchange._boards.values())
    assert boards and not any(bool(board.any()) for board in boards)


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_shared_rows_give_the_same_bits_on_any_stream(op: str, device: torch.device) -> None:
    x = draw(67, 128256, device=device, dtype=torch.bfloat16, std=3.0)
    dy = draw(*x.shape[: 1 if op == "logsumexp" else 2], device=device)
    want = gradient(lambda t: ours(op, t, -1, "triton"), x, dy)
    torch.cuda.synchronize()
    got, streams = [], [torch.cuda.Stream() for _ in range(4)]
    for _ in range(10):
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append(gradient(lambda t: ours(op, t, -1, "triton"), x, dy))
    torch.cuda.synchronize()
    for y, dx in got:
        assert torch.equal(y, want[0]) and torch.equal(dx, want[1])
