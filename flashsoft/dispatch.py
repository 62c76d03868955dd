"""Which backend runs a problem: one ordered list, and for each entry a pure function that says why not."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import env
from .errors import BackendUnavailableError
from .terms import Terms


class Feature(NamedTuple):
    """Something that calls of attention may have: the fields of `Terms` that say so, and its row in a table."""

    fields: tuple[str, ...]
    written: str
    gradients: str = ""


FEATURES = {
    "band": Feature(("lo", "hi"), "`mask=Causal()`, `Window(...)`, either aligned anyhow"),
    "boolean mask": Feature(("keep",), "`mask=` a tensor that broadcasts, `Padding(keep)`"),
    "segments": Feature(("query_ids",), "`mask=Segments(ids)`"),
    "lengths": Feature(("lengths",), "`mask=Padding(lengths)`"),
    "bias": Feature(("bias",), "`bias=` a tensor that broadcasts", "bias"),
    "ALiBi": Feature(("slopes",), "`bias=ALiBi(slopes)`, `+` a tensor", "slopes"),
    "softcap": Feature(("softcap",), "`softcap=50.0`"),
    "sink": Feature(("sink",), "`sink=` a tensor, a score a head", "sink"),
    "tensor scale": Feature(("factor",), "`scale=` a tensor, of one entry or one a head", "scale"),
    "dropout": Feature(("seed",), "`dropout_p=0.1`"),
    "packed": Feature(("cu_q",), "`attention_varlen(..., cu_seqlens_q, cu_seqlens_k, ...)`"),
}


@dataclass(frozen=True)
class Support:
    """What of attention a backend computes: which features, forward and backward, in which dtypes and head sizes."""

    forward: frozenset[str]
    backward: frozenset[str]
    dtypes: tuple[torch.dtype, ...]
    head_dim: int
    value_dim: int


ALL = frozenset(FEATURES)
SOME = frozenset({"band", "softcap", "sink", "packed"})
HOPPER = Support(SOME, SOME, (torch.float16, torch.bfloat16), 256, 256)
TRITON = Support(ALL, ALL, (torch.float32, torch.float16, torch.bfloat16), 576, 512)
REFERENCE = Support(ALL, ALL, (*TRITON.dtypes, torch.float64), 576, 512)


@dataclass(frozen=True)
class Problem:
    """What a backend must know of a call to say whether it can run it.

    obstacle: what of the call's own tensors and numbers the Hopper kernels cannot take.
    """

    op: str
    device: torch.device
    dtype: torch.dtype
    features: frozenset[str] = frozenset()
    head_dim: int = 0
    value_dim: int = 0
    obstacle: str | None = None


@dataclass(frozen=True)
class Target:
    """Facts of the machine a problem would run on."""

    device_type: str
    capability: tuple[int, int] | None
    has_triton: bool
    interpreted: bool

    @property
    def is_hopper(self) -> bool:
        """Whether it is a GPU with Hopper's own instructions, and nothing stands in for it."""
        return self.capability == (9, 0) and torch.version.hip is None and not self.interpreted


@dataclass(frozen=True)
class Backend:
    """A module with the functions of `reference`, loaded when first chosen."""

    name: str
    module: str
    why_not: Callable[[Problem, Target], str | None]
    supports: Support
    fallback: bool = False  # on an accelerator it runs only what is asked of it by name

    def load(self) -> ModuleType:
        return importlib.import_module(self.module, __package__)


@dataclass(frozen=True)
class Explanation:
    """Which backend would run (None: none can), and the others with their reasons."""

    backend: str | None
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.backend or 'no backend'} runs this"]
        return "\n".join(lines + [f"{name} does not: {reason}" for name, reason in self.reasons.items()])


def _lacks(supports: Support, problem: Problem) -> str | None:
    """What of a problem a backend does not compute, on whatever machine."""
    if problem.dtype not in supports.dtypes:
        *names, last = (str(dtype).removeprefix("torch.") for dtype in supports.dtypes)
        return f"it takes {', '.join(names)} and {last}, not {str(problem.dtype).removeprefix('torch.')}"
    missing = problem.features - supports.forward
    if missing:
        return f"it has no {', no '.join(sorted(missing))}"
    if problem.head_dim > supports.head_dim or problem.value_dim > supports.value_dim:
        most = f"{supports.head_dim} (of value {supports.value_dim})"
        return f"it takes head sizes up to {most}, not {problem.head_dim} ({problem.value_dim})"
    return None


NO_TRITON = "triton is not installed (on Windows: pip install triton-windows)"


def _hopper_why_not(problem: Problem, target: Target) -> str | None:
    if problem.op != "attention":
        return "it computes attention only"
    if not target.has_triton:
        return NO_TRITON
    lacking = _lacks(HOPPER, problem)
    if lacking is not None:
        return lacking
    if target.device_type != "cuda" or not target.is_hopper:
        return "its kernels need a GPU of compute capability 9.0, and no interpreter"
    return problem.obstacle


def _triton_why_not(problem: Problem, target: Target) -> str | None:
    if not target.has_triton:
        return NO_TRITON
    lacking = _lacks(TRITON, problem)
    if lacking is not None:
        return lacking
    if target.device_type == "cpu" and not target.interpreted:
        return "its kernels need a GPU, the tensors are on the cpu (TRITON_INTERPRET=1 interprets them there, slowly)"
    if target.device_type not in ("cpu", "cuda"):
        return f"its kernels run on cuda (and ROCm) devices, the tensors are on {target.device_type}"
    if target.capability is not None and torch.version.hip is None and target.capability < (8, 0):
        return f"its kernels need compute capability 8.0, this device has {target.capability[0]}.{target.capability[1]}"
    return None


BACKENDS: tuple[Backend, ...] = (
    Backend("hopper", ".kernels.hopper", _hopper_why_not, HOPPER),
    Backend("triton", ".kernels", _triton_why_not, TRITON),
    Backend("reference", ".reference", lambda problem, target: _lacks(REFERENCE, problem), REFERENCE, fallback=True),
)


@functools.cache
def target_of(device: torch.device) -> Target:
    """The facts of `device`."""
    has_triton = importlib.util.find_spec("triton") is not None
    interpreted = has_triton and bool(importlib.import_module("triton").knobs.runtime.interpret)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return Target(device.type, capability, has_triton, interpreted)


def explain(problem: Problem, requested: str | None = None) -> Explanation:
    """The choice for a problem on this machine; `requested` as in `choose`."""
    return explain_on(problem, target_of(problem.device), requested or env.BACKEND)


def explain_on(problem: Problem, target: Target, requested: str | None = None) -> Explanation:
    """The choice for a problem on `target`, with the reasons of every backend that was passed over."""
    names = [backend.name for backend in BACKENDS]
    if requested is not None and requested not in names:
        raise ValueError(f"backend must be one of {', '.join(names)}, got {requested!r}")
    reasons: dict[str, str] = {}
    chosen: str | None = None
    for backend in BACKENDS:
        reason = _passed_over(backend, problem, target, requested)
        if reason is not None:
            reasons[backend.name] = reason
        elif chosen is None:
            chosen = backend.name
        else:
            reasons[backend.name] = f"{chosen} comes first"
    return Explanation(chosen, reasons)


def features(terms: Terms) -> frozenset[str]:
    """Which of FEATURES a call of attention has."""
    return _features(tuple([term is not None for term in terms]))


@functools.cache
def _features(given: tuple[bool, ...]) -> frozenset[str]:
    present = {name for name, there in zip(Terms._fields, given, strict=True) if there}
    return frozenset(name for name, feature in FEATURES.items() if present & set(feature.fields))


def obstacle(query: Tensor, key: Tensor, value: Tensor, terms: Terms) -> str | None:
    """What of one call of attention the Hopper kernels cannot take, where they could run."""
    if not target_of(query.device).is_hopper:
        return None
    support = importlib.import_module(".kernels.hopper.support", __package__)
    return support.why_not(query, key, value, terms)  # type: ignore[no-any-return]


def choose_attention(
    query: Tensor, key: Tensor, value: Tensor, terms: Terms, requested: str | None = None
) -> ModuleType:
    """`choose` for a call of attention."""
    kind = features(terms), query.shape[-1], value.shape[-1], obstacle(query, key, value, terms)
    return _choose("attention", query.device, query.dtype, requested or env.BACKEND, *kind)


def choose(op: str, x: Tensor, requested: str | None = None) -> ModuleType:
    """The module that runs `op` on tensors like x: the backend asked for by name, or the first that has no reason."""
    return _choose(op, x.device, x.dtype, requested or env.BACKEND)


@functools.cache
def _choose(
    op: str,
    device: torch.device,
    dtype: torch.dtype,
    requested: str | None,
    features: frozenset[str] = frozenset(),
    head_dim: int = 0,
    value_dim: int = 0,
    obstacle: str | None = None,
) -> ModuleType:
    problem = Problem(op, device, dtype, features, head_dim, value_dim, obstacle)
    explanation = explain_on(problem, target_of(problem.device), requested)
    if explanation.backend is None:
        why = "; ".join(
            f"{name}: {reason}" for name, reason in explanation.reasons.items() if requested in (None, name)
        )
        raise BackendUnavailableError(f"{problem.op} cannot run on {problem.device}: {why}")
    env.logger.info("%s runs on %s", problem, explanation.backend)
    return next(backend for backend in BACKENDS if backend.name == explanation.backend).load()


def _passed_over(backend: Backend, problem: Problem, target: Target, requested: str | None) -> str | None:
    if requested is not None and backend.name != requested:
        return f"{requested} was asked for"
    reason = backend.why_not(problem, target)
    accelerated = target.device_type == "cuda" and problem.dtype != torch.float64
    if reason is None and backend.fallback and accelerated and requested is None:
        return f'on {target.device_type} it runs only when asked for by name, backend="{backend.name}"'
    return reason
