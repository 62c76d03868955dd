"""Every kernel builds for every GPU it is shipped for, fits, and does not spill: gate.py, a process a GPU."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gate
import pytest

triton = pytest.importorskip("triton")

ARCHS = tuple(gate.SHARED_LIMIT)


@functools.cache
def kernels(arch: str, only: str = "") -> list[gate.Kernel]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(gate.__file__).parents[1]
    env["PYTHONPATH"] = os.pathsep.join([str(root), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, gate.__file__, arch, only], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    return [gate.Kernel(**json.loads(line)) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_fit_and_do_not_spill(arch: str) -> None:
    built = kernels(arch)
    names = {kernel.name for kernel in built}
    assert {"attention_forward_kernel", "softmax_forward_kernel", "cross_entropy_state_kernel"} <= names
    counted = triton.__version__.startswith(gate.SPILLS_COUNTED_BY)
    complaints = []
    most: dict[tuple[str, str], int] = {}
    for kernel in built:
        most[kernel.entry(arch)] = max(most.get(kernel.entry(arch), 0), kernel.spilled)
        if counted and kernel.serialized != ((arch, kernel.name, kernel.case) in gate.SERIALIZED):
            complaints.append(f"{kernel.case}: {kernel.name}: products serialized? {kernel.serialized}")
        complaints += [f"{kernel.case}: {kernel.name}: {what}" for what in kernel.lost]
        if kernel.shared > gate.SHARED_LIMIT[arch]:
            complaints.append(f"{kernel.case}: {kernel.name} takes {kernel.shared} bytes of shared memory")
    if counted:
        for entry, spilled in most.items():
            if spilled > gate.ALLOWED_SPILLS.get(entry, 0):
                worst = next(k.case for k in built if k.entry(arch) == entry and k.spilled == spilled)
                complaints.append(f"{worst}: {entry[1]} spills {spilled}, {gate.ALLOWED_SPILLS.get(entry, 0)} allowed")
        # what is allowed and no longer needed goes
        complaints += [
            f"{entry} spills no more" for entry in gate.ALLOWED_SPILLS if entry[0] == arch and not most.get(entry)
        ]
    matrix = {"80": ("HMMA",), "90": ("HGMMA",), "100": ("UTCHMMA", "HMMA"), "gfx942": ("MFMA",)}[arch]
    for kernel in built:
        if kernel.case.startswith("attention-fp32") and arch.isdigit() and kernel.opcodes:
            complaints.append(f"{kernel.case}: {kernel.name} has float32 products in less: {kernel.opcodes}")
        half = kernel.case.startswith(("attention-fp16", "attention-bf16"))
        products = half and kernel.name.startswith(("attention_forward", "attention_backward"))
        wide = re.search(r"-d(320|512|576)v", kernel.case) is not None  # tiles of 32 rows, for which Hopper has none
        wanted = (*matrix, "HMMA") if wide else matrix
        if products and not any(kernel.opcodes.get(name) for name in wanted):
            complaints.append(f"{kernel.case}: {kernel.name} has no {matrix[0]}: {kernel.opcodes}")
    assert not complaints, "\n".join(complaints)


def test_hopper_kernels_fit_and_overlap_their_products() -> None:
    """Spills are those of the version they were counted by: 3.9's assembler makes some of its own."""
    counted = triton.__version__.startswith(gate.SPILLS_COUNTED_BY)
    built = kernels(gate.MEASURED, "hopper")
    assert {kernel.name for kernel in built} == {"hopper_forward_kernel"}
    for kernel in built:
        # numbers of a tile of queries, before the loop over keys and after it
        allowed = 116 if re.search("-d(192|256)v", kernel.case) else 0
        assert not kernel.serialized and (kernel.spilled <= allowed or not counted), kernel
        assert not kernel.lost and kernel.shared <= gate.SHARED_LIMIT[gate.MEASURED], kernel
        assert kernel.opcodes.get("HGMMA") and not kernel.opcodes.get("HMMA"), kernel
        assert kernel.opcodes["USETMAXREG"] > 0, kernel
