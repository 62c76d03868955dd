"""`flashsoft verify`: the case table on this machine's backends, against float64 and torch's own error.

A case passes if its result and every gradient satisfy, for the largest error and for the root mean square,

    error <= 2 * (torch's own error in the same dtype) + FLOOR * eps(dtype) * (size of the exact result)

where errors are against float64 on the same inputs, and the size is the largest exact value (for the largest
error) or the root mean square (for the other). The floor is two roundings: torch's error can be 0 by luck.
Gradients of what scores are made of are float32 sums that can cancel (wholly, for one key): there the floor is higher
by FLOOR * eps(float32) * (root sum of squares of the terms).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import dispatch
from . import UsageError, cases

FLOOR = 2.0
Way = Callable[[cases.Tensors], Tensor]
Cancelling = Callable[[Tensor], cases.Tensors]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Agreement:
    """How far ours and theirs are from the exact result and from each other; is ours near enough?"""

    apart: float
    max_ours: float
    max_theirs: float
    rms_ours: float
    rms_theirs: float
    max_allowed: float
    rms_allowed: float

    @property
    def passed(self) -> bool:  # a NaN fails
        return self.max_ours <= self.max_allowed and self.rms_ours <= self.rms_allowed

    @property
    def used(self) -> float:
        """The fraction of what is allowed; the larger of the two."""
        pairs = ((self.max_ours, self.max_allowed), (self.rms_ours, self.rms_allowed))
        return max(error / allowed if error > 0.0 else error for error, allowed in pairs)


def agreement(ours: Tensor, theirs: Tensor, exact: Tensor, terms: Tensor | None = None) -> Agreement:
    """`terms`: sizes of terms that may cancel. Where torch alone is not finite, its error counts as 0."""
    eps, eps_of_sums = torch.finfo(ours.dtype).eps, torch.finfo(torch.float32).eps
    max_terms, rms_terms = (0.0, 0.0) if terms is None else _sizes(terms)
    wide, other = ours.double(), theirs.double()
    other = torch.where(other.isfinite(), other, exact)
    (max_ours, rms_ours), (max_theirs, rms_theirs) = _sizes(wide - exact), _sizes(other - exact)
    max_exact, rms_exact = _sizes(exact)
    tiny = torch.finfo(ours.dtype).smallest_normal  # below it a rounding is absolute
    return Agreement(
        _sizes(wide - other)[0],
        max_ours,
        max_theirs,
        rms_ours,
        rms_theirs,
        2.0 * max_theirs + FLOOR * (eps * max(max_exact, tiny) + eps_of_sums * max_terms),
        2.0 * rms_theirs + FLOOR * (eps * max(rms_exact, tiny) + eps_of_sums * rms_terms),
    )


def _sizes(x: Tensor) -> tuple[float, float]:
    if x.numel() == 0:
        return 0.0, 0.0
    return float(x.abs().max()), float(x.square().mean().sqrt())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    parser.add_argument("--backend", help="only this one (default: every backend that can run on the device)")
    parser.add_argument("--quick", action="store_true", help="a few small cases in place of the whole table")


def run(args: argparse.Namespace) -> int:
    """Prints the table of errors; 1 if a case failed."""
    device = pick_device(args.device)
    table = cases.QUICK if args.quick else cases.ALL
    backends = usable_backends(device, args.backend)
    print(
        f"{len(table)} cases x {len(DTYPES)} dtypes on {device}, forward and backward, backends: {', '.join(backends)}"
    )
    print(f"passing: error against float64 <= 2 x torch's own + {FLOOR:.0f} eps x size of the exact result")
    print(f"(gradients of scores' parts: + {FLOOR:.0f} float32 eps x size of the terms that may cancel)\n")
    print(f"{'case':<52} {'dtype':<9} {'backend':<9} {'worst':<7} {'max':>8} {'torch':>8} {'rms':>8} {'torch':>8}")
    failed = total = 0
    for number, case in enumerate(table):
        for dtype_name, dtype in DTYPES.items():
            for backend in backends:
                total += 1
                worst, result = check(case, dtype, device, backend, seed=number)
                failed += not result.passed
                print(
                    f"{case!s:<52} {dtype_name:<9} {backend:<9} {worst:<7} {result.max_ours:8.1e} "
                    f"{result.max_theirs:8.1e} {result.rms_ours:8.1e} {result.rms_theirs:8.1e}"
                    + (
                        "" if result.passed else f"  FAILED, allowed {result.max_allowed:.1e}, {result.rms_allowed:.1e}"
                    ),
                    flush=True,
                )
    print(f"\n{total - failed} of {total} passed" + (f", {failed} FAILED" if failed else ""))
    return 1 if failed else 0


def check(case: cases.Case, dtype: torch.dtype, device: torch.device, backend: str, seed: int) -> tuple[str, Agreement]:
    """The result or gradient of a case that uses most of what it is allowed, and how far off it is."""
    generator = torch.Generator().manual_seed(seed)
    tensors, keep = cases.inputs(case, generator)
    tensors = {name: t.to(dtype) for name, t in tensors.items()}
    whole = cases.whole_mask(case, {name: t.double() for name, t in tensors.items()}, keep)
    tensors = {name: t.to(device) for name, t in tensors.items()}
    keep, whole = (None if t is None else t.to(device) for t in (keep, whole))

    ways: dict[str, Way] = {
        "ours": lambda given: cases.ours(case, given, keep, backend),
        "torch": lambda given: cases.torchs(case, given, whole, exact=False),
        "exact": lambda given: cases.torchs(case, given, whole, exact=True),
    }
    terms = partial(cases.cancelling_terms, case, tensors, whole) if isinstance(case, cases.Attention) else None
    results = compare(ways, tensors, terms, seed)
    return max(results.items(), key=lambda item: (not item[1].passed, item[1].used))


def compare(
    ways: dict[str, Way], tensors: cases.Tensors, cancelling: Cancelling | None, seed: int
) -> dict[str, Agreement]:
    """The result ("out") and gradients ("dquery", ...) of "ours", against "torch" and "exact" (float64).

    `cancelling` gives sizes of terms, by the gradient's name, from the gradient of the result.
    """
    dtype = next(iter(tensors.values())).dtype

    def differentiated(way: str) -> dict[str, Tensor]:
        computed_in = torch.float64 if way == "exact" else dtype
        leaves = {name: t.detach().to(computed_in).requires_grad_() for name, t in tensors.items()}
        out = ways[way](leaves)
        gradients = torch.autograd.grad(out, list(leaves.values()), upstream(out))
        return {"out": out.detach()} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}

    def upstream(out: Tensor) -> Tensor:
        """The same for all three ways, so one that the dtype under test can hold."""
        return torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(out)

    ours, theirs, exact = (differentiated(way) for way in ("ours", "torch", "exact"))
    terms = {} if cancelling is None else cancelling(upstream(exact["out"]))
    return {name: agreement(ours[name], theirs[name], exact[name], terms.get(name)) for name in ours}


def pick_device(asked: str | None) -> torch.device:
    """The device asked for, or the GPU if there is one. UsageError if it is not here."""
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError as wrong:
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {asked!r}") from wrong
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {asked!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device must be one of this machine's, got {asked!r} of {torch.cuda.device_count()} GPUs")
    return device


def usable_backends(device: torch.device, asked: str | None) -> list[str]:
    """The backends that can run on `device`, or the one asked for; UsageError says why it cannot."""
    problem, target = dispatch.Problem("attention", device, torch.float32), dispatch.target_of(device)
    reasons = {backend.name: backend.why_not(problem, target) for backend in dispatch.BACKENDS}
    if asked is None:
        return [name for name, reason in reasons.items() if reason is None]
    if asked not in reasons:
        raise UsageError(f"--backend must be one of {', '.join(reasons)}, got {asked!r}")
    if reasons[asked] is not None:
        raise UsageError(f"--backend {asked} cannot run on {device}: {reasons[asked]}")
    return [asked]
