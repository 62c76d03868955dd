"""`flashsoft doctor`: what is installed, which backend runs what and why, and a tiny checked run of each."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import itertools
import json
import logging
import platform
from typing import Any

import torch

from .. import __version__, api, dispatch, env, masks
from ..alibi import ALiBi
from . import support

OPS = ("softmax", "log_softmax", "logsumexp", "fused_softmax", "sample", "cross_entropy", "attention")
TOLERANCE = 1e-5  # of the tiny float32 runs, whose exact results are of size 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--support", action="store_true", help="print which backend computes what of attention")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 1 if a tiny run failed."""
    if args.support:
        print(support.table())
        return 0
    report = examine()
    print(json.dumps(report, indent=2) if args.json else as_text(report))
    return 0 if all(check["passed"] for check in report["checks"]) else 1


def examine() -> dict[str, Any]:
    """Everything doctor says, as plain data."""
    devices = [torch.device("cpu")] + [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {
        "versions": versions(),
        "devices": {str(device): device_name(device) for device in devices},
        "variables": variables(),
        "backends": {str(device): {op: choice(op, device) for op in OPS} for device in devices},
        "checks": [check for device in devices for check in checks(device)],
    }


def versions() -> dict[str, str]:
    """Of everything that the choice of a backend depends on."""
    return {
        "flashsoft": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "torch built for": built_for(),
        "triton": triton_version(),
        "cuda driver": driver_version(),
    }


def built_for() -> str:
    """The accelerator that this torch was compiled for."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"


def triton_version() -> str:
    """The installed version, or why there is none."""
    for name in ("triton", "pytorch-triton", "triton-windows", "pytorch-triton-rocm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if platform.system() == "Linux":
        return "not installed (pip install triton)"
    return f"not installed (there is none for {platform.system()}; on Windows: pip install triton-windows)"


def driver_version() -> str:
    """The CUDA version that the installed driver supports, asked from the driver itself."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1")
    except OSError:
        return "not installed"
    version = ctypes.c_int()
    code = driver.cuDriverGetVersion(ctypes.byref(version))
    if code != 0:
        return f"installed, error {code} when asked for its version"
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


def device_name(device: torch.device) -> str:
    """What the device is, for a person."""
    if device.type == "cpu":
        return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    facts = torch.cuda.get_device_properties(device)
    return f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, compute capability {facts.major}.{facts.minor}"


def variables() -> dict[str, str]:
    """The FLASHSOFT_* variables and the values in force."""
    return {
        "FLASHSOFT_BACKEND": env.BACKEND or "not set (chosen per call)",
        "FLASHSOFT_CHECK": "1 (contents of tensors are checked)" if env.CHECK else "0",
        "FLASHSOFT_TUNING": str(env.TUNING) + ("" if env.TUNING.is_dir() else " (nothing tuned)"),
        "FLASHSOFT_LOG": logging.getLevelName(env.logger.level) if env.logger.level else "not set",
    }


def choice(op: str, device: torch.device) -> dict[str, Any]:
    """The backend that runs `op` in float32 on `device`, and the reasons of the others."""
    problem = dispatch.Problem(op, device, torch.float32)
    explanation = dispatch.explain_on(problem, dispatch.target_of(device), env.BACKEND)
    return {"backend": explanation.backend, "reasons": explanation.reasons}


def checks(device: torch.device) -> list[dict[str, Any]]:
    """A tiny attention, plain and with terms, forward and backward, on every backend that can run on `device`."""
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(4, 1, 2, 17, 16, generator=generator).unbind()
    problem = dispatch.Problem("attention", device, torch.float32)
    results = []
    usable = [each for each in dispatch.BACKENDS if each.why_not(problem, dispatch.target_of(device)) is None]
    for backend, terms in itertools.product(usable, (False, True)):
        said = "attention with terms" if terms else "attention"
        check: dict[str, Any] = {"device": str(device), "backend": backend.name, "op": said}
        try:
            query, key, value, dout = (t.double() for t in tensors)
            exact = attend(query, key, value, dout, "reference", terms)
            query, key, value, dout = (t.to(device) for t in tensors)
            ours = attend(query, key, value, dout, backend.name, terms)
            check["error"] = max(float((a.cpu() - b).abs().max()) for a, b in zip(ours, exact, strict=True))
            check["passed"] = check["error"] <= TOLERANCE
        except Exception as failure:  # a doctor reports what is broken, whatever it is
            check.update(passed=False, failure=f"{type(failure).__name__}: {failure}")
        results.append(check)
    return results


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dout: torch.Tensor, backend: str, terms: bool
) -> tuple[torch.Tensor, ...]:
    """out, dquery, dkey and dvalue of a causal attention; with `terms`, those of a sink, a bias and slopes too."""
    inputs = [t.clone().requires_grad_() for t in (query, key, value)]
    options: dict[str, Any] = {"mask": masks.Causal(), "backend": backend}
    if terms:
        heads, length = query.shape[1:3]
        added = [query.new_full(size, 0.5).requires_grad_() for size in ((heads,), (heads, 1, length), (heads,))]
        inputs += added
        options |= {"sink": added[0], "bias": ALiBi(added[2]) + added[1], "softcap": 5.0}
    out = api.attention(inputs[0], inputs[1], inputs[2], **options)
    return (out.detach(), *torch.autograd.grad(out, inputs, dout))


def as_text(report: dict[str, Any]) -> str:
    """The report for a person."""
    lines = [f"{name:<18} {version}" for name, version in report["versions"].items()]
    lines += [f"{'device ' + device:<18} {name}" for device, name in report["devices"].items()]
    lines += [f"{name:<18} {value}" for name, value in report["variables"].items()]
    for device, ops in report["backends"].items():
        lines.append(f"\nBackends on {device}, float32:")
        lines += [f"  {op:<14} {choice['backend'] or 'none'}" for op, choice in ops.items()]
        lines += _reasons(ops)
    lines.append("\nTiny runs, forward and backward against float64:")
    for check in report["checks"]:
        said = check.get("failure") or f"max error {check['error']:.1e} (at most {TOLERANCE:.0e})"
        which = f"{check['device']:<8} {check['backend']:<10} {check['op']:<20}"
        lines.append(f"  {which} {'ok' if check['passed'] else 'FAILED'}: {said}")
    return "\n".join(lines)


def _reasons(ops: dict[str, Any]) -> list[str]:
    """The reasons against each backend, said once for all operators that share them."""
    shared: dict[tuple[str, str], list[str]] = {}
    for op, choice in ops.items():
        for name, reason in choice["reasons"].items():
            shared.setdefault((name, reason), []).append(op)
    return [
        f"  {name} does not run {'these' if len(named) == len(ops) else ', '.join(named)}: {reason}"
        for (name, reason), named in shared.items()
    ]
