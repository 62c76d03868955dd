"""Every bound of the suite, and where it comes from.

Results are judged as FlashAttention judges them: against float64 on the same inputs, the error may be at most
twice that of torch's own path in the same dtype (SDPA's math backend, torch.softmax), in the maximum and in
the root mean square, plus a floor for the cases in which torch happens to be exact:

    error <= 2 * torch's error + FLOOR * eps * magnitude

The magnitude of a result is the larger of its absolute value and of the root sum of squares of the terms it
was added up from (oracle.py), since each term was rounded once and roundings are independent. A weight p =
exp(x) has the error of its exponent, eps * |x| of itself in the float32 of the exponent. eps is that of the
dtype a tensor is stored in: rounding the result alone costs eps / 2 of it, rounding p or ds for the tensor
core eps / 2 of each term. That makes one eps for out and dv, and with delta, taken from the rounded out, two
for dq and dk.
"""

from __future__ import annotations

import torch
from torch import Tensor

RATIO = 2.0
FLOOR = 2.0

# float64 is compared with an oracle of the same precision, whose own error is as large, and the terms of one
# sum may come in another order: n terms differ by sqrt(n) eps, and no sum in the suite has more than 256
# terms in the root-sum-of-squares sense.
FLOOR_FLOAT64 = 16.0

# lse of half-precision inputs is float32, from exact products that tensor cores add up with truncation, one
# ulp of the largest partial sum a step of 16 or less: D = 256 has 16 steps.
FLOOR_LSE_HALF = 16.0


class ToleranceError(AssertionError):
    """A result lies further from the oracle than its bound."""


def assert_close_to(
    got: Tensor,
    oracle: Tensor,
    same_dtype: Tensor | None,
    magnitude: Tensor | None = None,
    *,
    floor: float | None = None,
    name: str = "result",
) -> None:
    """`got` is as near to the float64 `oracle` as `same_dtype`, torch's own result, up to a bound.

    Infinities and NaN must stand in the same places. Where torch's own result is not finite, it allows
    nothing.
    """
    assert got.shape == oracle.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(oracle.shape)}"
    if got.numel() == 0:
        return
    eps = torch.finfo(got.dtype).eps
    if floor is None:
        floor = FLOOR_FLOAT64 if got.dtype == torch.float64 else FLOOR
    wide = got.detach().cpu().to(torch.float64)
    want = oracle.detach().cpu().to(torch.float64)
    finite = want.isfinite()
    same = torch.where(finite, wide.isfinite(), (wide == want) | (wide.isnan() & want.isnan()))
    if not bool(same.all()):
        at = tuple(torch.nonzero(~same)[0].tolist())
        raise ToleranceError(f"{name}[{at}] is {wide[at]}, expected {want[at]} ({int((~same).sum())} such places)")
    error = torch.where(finite, (wide - want).abs(), 0.0)
    scale = torch.where(finite, want.abs(), 0.0)
    if magnitude is not None:
        known = magnitude.detach().cpu().to(torch.float64)
        scale = torch.maximum(scale, torch.where(finite & known.isfinite(), known, 0.0))
    own = torch.zeros_like(error)
    if same_dtype is not None:
        theirs = same_dtype.detach().cpu().to(torch.float64)
        own = torch.where(finite & theirs.isfinite(), (theirs - want).abs(), 0.0)
    for measure, of in (("max", lambda t: t.max()), ("rms", lambda t: t.square().mean().sqrt())):
        bound = float(RATIO * of(own) + floor * eps * of(scale))
        if float(of(error)) > bound:
            at = tuple(torch.unravel_index(error.argmax(), error.shape))
            at = tuple(int(i) for i in at)
            raise ToleranceError(
                f"{name}: {measure} error {float(of(error)):.3e} exceeds {bound:.3e} "
                f"(torch's own {float(of(own)):.3e}; "
                f"max {float(error.max()):.3e}, rms {float(error.square().mean().sqrt()):.3e}); "
                f"worst at {at}: {wide[at]:.9g}, expected {want[at]:.9g}"
            )
