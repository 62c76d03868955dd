"""The law of (m, s), at tile scale (kernels/softmax.py under small kernels) and in reference/softmax.py.

States form a commutative monoid under merge, and update is the merge with a fresh tile: so however a row is
cut, its state is that of the row taken at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import conftest
import inputs
import oracle
import pytest
import torch
from torch import Tensor

from flashsoft.reference import softmax as reference

INF = float("inf")
NAN = float("nan")
F32_EPS = torch.finfo(torch.float32).eps

if conftest.HAS_TRITON:
    import triton
    import triton.language as tl

    from flashsoft.kernels import softmax as primitive

    @triton.jit
    def update_kernel(m, s, x, out, scale, ROWS: tl.constexpr, N: tl.constexpr, FOLD: tl.constexpr):
        """One program: out (4 + N, ROWS) <- the new m, s, alpha, a spare row, and p transposed."""
        row, column = tl.arange(0, ROWS), tl.arange(0, N)
        tile = tl.load(x + row[:, None] * N + column[None, :])
        if FOLD:
            m_new, s_new, alpha, p = primitive.update_folded(tl.load(m + row), tl.load(s + row), tile, scale)
        else:
            m_new, s_new, alpha, p = primitive.update(tl.load(m + row), tl.load(s + row), tile, scale)
        tl.store(out + row, m_new)
        tl.store(out + ROWS + row, s_new)
        tl.store(out + 2 * ROWS + row, alpha)
        tl.store(out + (4 + column[None, :]) * ROWS + row[:, None], p)

    @triton.jit
    def merge_kernel(m_a, s_a, m_b, s_b, out, scale, ROWS: tl.constexpr):
        row = tl.arange(0, ROWS)
        m, s, scale_a, scale_b = primitive.merge(
            tl.load(m_a + row), tl.load(s_a + row), tl.load(m_b + row), tl.load(s_b + row), scale
        )
        tl.store(out + row, m)
        tl.store(out + ROWS + row, s)
        tl.store(out + 2 * ROWS + row, scale_a)
        tl.store(out + 3 * ROWS + row, scale_b)

    @triton.jit
    def finish_kernel(m, s, out, scale, ROWS: tl.constexpr):
        row = tl.arange(0, ROWS)
        inverse, lse = primitive.finish(tl.load(m + row), tl.load(s + row), scale)
        tl.store(out + row, inverse)
        tl.store(out + ROWS + row, lse)


State = tuple[Tensor, Tensor]


class Kernels:
    """The primitive at tile scale: rows and columns are powers of two."""

    def __init__(self, fold: bool) -> None:
        self.fold = fold

    def own_scale(self, scale: float) -> float:
        """That of the state, for scores of `scale`: a folded state is in base 2."""
        return math.log(2) if self.fold else scale

    def maximum(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """m of a row x."""
        return x.amax(1) * (scale / self.own_scale(scale))

    def exact(self, scale: float) -> bool:
        """Whether m goes through update unrounded."""
        return True

    def update(self, m: Tensor, s: Tensor, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, n = x.shape
        out = x.new_full((4 + n, rows), NAN)
        update_kernel[(1,)](m, s, x.contiguous(), out, scale, ROWS=rows, N=n, FOLD=self.fold)
        return out[0], out[1], out[2], out[4:].T

    def merge(self, a: State, b: State, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out = a[0].new_full((4, a[0].shape[0]), NAN)
        merge_kernel[(1,)](*a, *b, out, self.own_scale(scale), ROWS=a[0].shape[0])
        return out[0], out[1], out[2], out[3]

    def finish(self, m: Tensor, s: Tensor, scale: float = 1.0) -> State:
        out = m.new_full((2, m.shape[0]), NAN)
        finish_kernel[(1,)](m, s, out, self.own_scale(scale), ROWS=m.shape[0])
        return out[0], out[1]


class Reference:
    """The same in plain PyTorch; scores come scaled, as reference/attention.py takes them."""

    fold = False

    def maximum(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x.amax(1)

    def exact(self, scale: float) -> bool:
        """x * scale is rounded, and m with it, unless the scale is a power of two."""
        return math.frexp(scale)[0] == 0.5

    def update(self, m: Tensor, s: Tensor, x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        m, s, alpha, p = reference.update(m[:, None] * scale, s[:, None], x * scale)
        return m[:, 0] / scale, s[:, 0], alpha[:, 0], p

    def merge(self, a: State, b: State, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        m, s, scale_a, scale_b = reference.merge_states(a[0] * scale, a[1], b[0] * scale, b[1])
        return m / scale, s, scale_a, scale_b

    def finish(self, m: Tensor, s: Tensor, scale: float = 1.0) -> State:
        return reference.finish(m, s, scale)


Law = Kernels | Reference
needs_triton = pytest.mark.skipif(not conftest.HAS_TRITON, reason="triton is not installed")


@pytest.fixture(
    params=[
        pytest.param(lambda: Kernels(fold=False), id="kernels", marks=needs_triton),
        pytest.param(lambda: Kernels(fold=True), id="kernels_fold", marks=needs_triton),
        pytest.param(Reference, id="reference"),
    ]
)
def law(request: pytest.FixtureRequest) -> Law:
    make: Callable[[], Law] = request.param
    return make()


ROWS = 8


def empty(device: torch.device) -> State:
    return torch.full((ROWS,), -INF, device=device), torch.zeros(ROWS, device=device)


def state(law: Law, x: Tensor, scale: float = 1.0) -> State:
    m, s, _, _ = law.update(*empty(x.device), x, scale)
    return m, s


def same_state(law: Law, a: State, b: State, scale: float = 1.0) -> None:
    """Equal as states: m exactly (a maximum is never rounded), s up to rounding, in it that of the exponents."""
    if law.exact(scale):
        assert torch.equal(a[0], b[0])
        spread = 0.0
    else:
        torch.testing.assert_close(a[0], b[0], rtol=2 * F32_EPS, atol=0)
        spread = abs(scale) * torch.where(a[0].isfinite(), a[0].abs(), 0.0)
    assert ((a[1] - b[1]).abs() <= 8 * F32_EPS * (1.0 + spread) * b[1]).all()


def rows_of_every_kind(device: torch.device) -> Tensor:
    """(8, 32): random, equal, far from zero either way, wide in range, part -inf, one finite, all -inf."""
    x = torch.randn(ROWS, 32)
    x[1] = 3.25
    x[2] += 1e4
    x[3] -= 1e4
    x[4] *= 50.0
    x[5, ::3] = -INF
    x[6] = -INF
    x[6, 17] = -2.0
    x[7] = -INF
    return x.to(device)


def test_a_state_is_the_maximum_and_the_sum_relative_to_it(law: Law, device: torch.device) -> None:
    x = rows_of_every_kind(device)
    m, s, alpha, p = law.update(*empty(device), x)
    wide = x.double()
    want = torch.exp(wide - torch.where(wide.amax(1) == -INF, 0.0, wide.amax(1))[:, None])
    torch.testing.assert_close(m, law.maximum(x), rtol=F32_EPS if law.fold else 0, atol=0)
    spread = torch.where(x.isfinite(), x.abs(), 0.0).amax(1, keepdim=True)
    assert ((p - want).abs() <= F32_EPS * (2 + 3 * spread) * want + 1e-37).all()
    assert ((s - want.sum(1)).abs() <= F32_EPS * (4 + 3 * spread[:, 0]) * want.sum(1)).all()
    assert ((alpha == 0) | (alpha == 1)).all()  # nothing was summed before: either does


@pytest.mark.parametrize("scale", [1.0, 0.125, 3.0])
def test_however_a_row_is_cut(law: Law, scale: float, device: torch.device) -> None:
    x = rows_of_every_kind(device)
    whole = state(law, x, scale)
    for width in (1, 2, 8, 16):
        m, s = empty(device)
        for tile in x.split(width, 1):
            m, s, alpha, p = law.update(m, s, tile, scale)
            assert not alpha.isnan().any() and not p.isnan().any()
        same_state(law, (m, s), whole, scale)


def test_alpha_rescales_what_was_summed_before(law: Law, device: torch.device) -> None:
    """acc <- acc * alpha + p @ v over tiles, over s, is the weighted mean over the row."""
    x, v = rows_of_every_kind(device), torch.randn(32, 4, device=device)
    m, s = empty(device)
    acc = torch.zeros(ROWS, 4, device=device)
    for tile, part in zip(x.split(8, 1), v.split(8), strict=True):
        m, s, alpha, p = law.update(m, s, tile)
        acc = acc * alpha[:, None] + p @ part
    inverse, lse = law.finish(m, s)
    p, want_lse = oracle.softmax(x.double())
    # rows 2 and 3 lie at 1e4, where the exponent itself is rounded to 1e4 * eps when it is folded
    torch.testing.assert_close((acc * inverse[:, None]).double(), p @ v.double(), atol=4e-3, rtol=0)
    near = [0, 1, 5, 6, 7]
    torch.testing.assert_close((acc * inverse[:, None])[near].double(), (p @ v.double())[near], atol=5e-6, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=5e-6, rtol=2 * F32_EPS)


def test_the_identity(law: Law, device: torch.device) -> None:
    some = state(law, rows_of_every_kind(device))
    for a, b, kept in ((some, empty(device), 2), (empty(device), some, 3)):
        result = law.merge(a, b)
        assert torch.equal(result[0], some[0]) and torch.equal(result[1], some[1])
        alive = some[1] > 0
        assert (result[kept][alive] == 1).all()
        assert not result[2].isnan().any() and not result[3].isnan().any()


def test_two_empty_states_are_empty(law: Law, device: torch.device) -> None:
    m, s, scale_a, scale_b = law.merge(empty(device), empty(device))
    assert (m == -INF).all() and (s == 0).all()
    assert not scale_a.isnan().any() and not scale_b.isnan().any()
    inverse, lse = law.finish(m, s)
    assert (inverse == 0).all() and (lse == -INF).all()


def test_an_empty_tile_changes_nothing(law: Law, device: torch.device) -> None:
    some = state(law, rows_of_every_kind(device))
    m, s, alpha, p = law.update(*some, torch.full((ROWS, 4), -INF, device=device))
    assert torch.equal(m, some[0]) and torch.equal(s, some[1])
    assert (p == 0).all() and (alpha[some[1] > 0] == 1).all()


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_commutative(law: Law, scale: float, device: torch.device) -> None:
    x = rows_of_every_kind(device)
    a, b = state(law, x, scale), state(law, torch.roll(x, 3, 0), scale)
    m, s, scale_a, scale_b = law.merge(a, b, scale)
    swapped = law.merge(b, a, scale)
    assert torch.equal(m, swapped[0]) and torch.equal(scale_a, swapped[3]) and torch.equal(scale_b, swapped[2])
    same_state(law, (m, s), (swapped[0], swapped[1]), scale)


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_associative(law: Law, scale: float, device: torch.device) -> None:
    x = rows_of_every_kind(device)
    a, b, c = (state(law, torch.roll(x, shift, 0), scale) for shift in (0, 1, 2))
    left = law.merge(law.merge(a, b, scale)[:2], c, scale)[:2]
    right = law.merge(a, law.merge(b, c, scale)[:2], scale)[:2]
    same_state(law, left, right, scale)


def test_update_is_the_merge_with_a_fresh_tile(law: Law, device: torch.device) -> None:
    x = rows_of_every_kind(device)
    first, second = x[:, :16], x[:, 16:]
    before = state(law, first)
    m, s, alpha, _ = law.update(*before, second)
    merged = law.merge(before, state(law, second))
    same_state(law, (m, s), (merged[0], merged[1]))
    torch.testing.assert_close(
        alpha, merged[2], rtol=1e-2, atol=0
    )  # at 1e4 in base 2, m and so its pivot are rounded to 1e-3


@pytest.mark.parametrize("shift", [-1024.0, 0.5, 4096.0, 2.0**20])
def test_a_shift_by_a_constant_shifts_m_alone(law: Law, shift: float, device: torch.device) -> None:
    """Scores on a coarse grid, so that the shifted ones are exact in float32 too."""
    x = torch.randint(-40, 40, (ROWS, 16), device=device).float() / 4
    m, s = state(law, x)
    m_shifted, s_shifted = state(law, x + shift)
    torch.testing.assert_close(m_shifted, law.maximum(x + shift), rtol=F32_EPS if law.fold else 0, atol=0)
    if law.fold:  # m * c is rounded, a shift of the whole row
        assert ((s_shifted - s).abs() <= 2 * F32_EPS * (4 + abs(shift)) * s).all()
    else:
        torch.testing.assert_close(s_shifted, s, rtol=4 * F32_EPS, atol=0)
    _, lse = law.finish(m, s)
    _, lse_shifted = law.finish(m_shifted, s_shifted)
    torch.testing.assert_close(
        lse_shifted.double(), lse.double() + shift, rtol=2 * F32_EPS, atol=1e-6 + 4e-7 * abs(shift)
    )


@pytest.mark.parametrize("value", [0.0, 1.0, -1e4, 1e4, 65_504.0, -3e38, 3e38, 1e-40])
def test_equal_values(law: Law, value: float, device: torch.device) -> None:
    """n equal scores: s = n, each weight is 1 relative to m."""
    if law.fold and abs(value) > 1e38:
        pytest.skip("x * c overflows where it is folded: such scores belong to the plain form")
    x = torch.full((ROWS, 16), value, device=device)
    m, s, _, p = law.update(*empty(device), x)
    torch.testing.assert_close(m, law.maximum(x))
    folded = 2 * F32_EPS * abs(value) if law.fold else 0.0
    torch.testing.assert_close(s, torch.full_like(s, 16.0), rtol=2 * F32_EPS + folded, atol=0)
    torch.testing.assert_close(p, torch.ones_like(p), rtol=2 * F32_EPS + folded, atol=0)


def test_extremes_do_not_overflow(law: Law, device: torch.device) -> None:
    x = torch.tensor([[-1e4, 1e4, 0.0, 1e4]], device=device).repeat(ROWS, 1)
    m, s = empty(device)
    for tile in x.split(1, 1):
        m, s, alpha, p = law.update(m, s, tile)
        assert alpha.isfinite().all() and p.isfinite().all()
    inverse, lse = law.finish(m, s)
    torch.testing.assert_close(s, torch.full_like(s, 2.0), rtol=3e-3, atol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, 1e4 + math.log(2)), rtol=4 * F32_EPS, atol=2e-3)
    torch.testing.assert_close(inverse * s, torch.ones_like(s))


@pytest.mark.parametrize("at", [0, 5, 15])
@pytest.mark.parametrize("width", [4, 16])
def test_nan_reaches_the_end_of_its_row(law: Law, at: int, width: int, device: torch.device) -> None:
    x = torch.randn(ROWS, 16, device=device)
    x[2, at] = NAN
    m, s = empty(device)
    for tile in x.split(width, 1):
        m, s, _, _ = law.update(m, s, tile)
    inverse, lse = law.finish(m, s)
    assert inverse[2].isnan() and lse[2].isnan()
    others = [row for row in range(ROWS) if row != 2]
    assert inverse[others].isfinite().all() and lse[others].isfinite().all()


@pytest.mark.parametrize("at", [0, 5, 15])
@pytest.mark.parametrize("width", [4, 16])
def test_plus_infinity_finishes_as_nan_and_infinity(law: Law, at: int, width: int, device: torch.device) -> None:
    x = torch.randn(ROWS, 16, device=device)
    x[2, at] = INF
    m, s = empty(device)
    for tile in x.split(width, 1):
        m, s, _, _ = law.update(m, s, tile)
    inverse, lse = law.finish(m, s)
    assert inverse[2].isnan() and lse[2] == INF
    others = [row for row in range(ROWS) if row != 2]
    assert inverse[others].isfinite().all() and lse[others].isfinite().all()


def test_merging_carries_nan_and_infinity(law: Law, device: torch.device) -> None:
    x = torch.randn(ROWS, 16, device=device)
    plain = state(law, x)
    x[0, 3], x[1, 3] = NAN, INF
    odd = state(law, x)
    for a, b in ((odd, plain), (plain, odd), (odd, empty(device)), (odd, odd)):
        inverse, lse = law.finish(*law.merge(a, b)[:2])
        assert lse[0].isnan() and lse[1] == INF and inverse[:2].isnan().all()
        assert lse[2:].isfinite().all() and inverse[2:].isfinite().all()


@pytest.mark.parametrize("scale", [0.125, 1.0, 2.5])
def test_finish(law: Law, scale: float, device: torch.device) -> None:
    x = rows_of_every_kind(device)
    inverse, lse = law.finish(*state(law, x, scale), scale)
    _, want = oracle.softmax(x.double() * scale)
    torch.testing.assert_close(lse.double(), want, atol=2e-6, rtol=4 * F32_EPS)
    assert inverse[7] == 0 and lse[7] == -INF


def test_every_way_of_taking_a_row_is_one_result(law: Law, device: torch.device) -> None:
    """A tree of merges, a loop of updates and the definition agree on random rows."""
    x = inputs.draw(ROWS, 64, device=device, std=4.0)
    states = [state(law, tile) for tile in x.split(8, 1)]
    while len(states) > 1:
        pairs = zip(states[::2], states[1::2], strict=True)
        states = [law.merge(a, b)[:2] for a, b in pairs]
    _, lse = law.finish(*states[0])
    torch.testing.assert_close(lse.double(), torch.logsumexp(x.double(), 1), atol=2e-6, rtol=4 * F32_EPS)
