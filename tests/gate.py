"""The compile gate: the kernels that the public functions launch, built for GPUs that are not here.

    python tests/gate.py 90 [part of a case's name, which for the Hopper kernels begins with hopper]

prints one JSON object a kernel: registers, spilled bytes, shared memory, matrix opcodes, seconds to compile.

Public functions are called with CPU tensors through a driver that only says which GPU it would be, and every
launch stops after compiling: so each kernel is built with the very specialisation of a launch. Run in a
process of its own with TRITON_INTERPRET unset.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import sass
import torch
from torch import Tensor

# Shared memory a program may have: CUDA programming guide, table of compute capabilities; CDNA 3 ISA, LDS.
SHARED_LIMIT = {"80": 163 * 1024, "90": 227 * 1024, "100": 227 * 1024, "gfx942": 64 * 1024}

# Bytes spilled (stores + loads; on AMD, registers) that are accepted, at most in any case: (arch, kernel) -> bytes, as
# counted for SPILLS_COUNTED_BY. On sm_90 the keys kernel's tiles are the fastest of those measured, spills and all, and
# the choose kernel's 1,024 chunks take 71 us where loops over the row, for a larger k, took 263; elsewhere these are
# float32, heads wider than 256, or a device on which nothing was measured yet. "All terms" is attention with every term
# in one call, for which no tile was measured. 8 bytes are one register.
SPILLS_COUNTED_BY = "3.6"
ALLOWED_SPILLS: dict[tuple[str, str], int] = {
    ("80", "attention_backward_keys_kernel"): 16,
    ("80", "attention_backward_keys_kernel, all terms"): 180,
    ("80", "attention_prepare_kernel"): 96,
    ("80", "choose_kernel"): 376,
    ("80", "softmax_backward_kernel"): 8,
    ("90", "attention_backward_keys_kernel"): 1664,
    ("90", "attention_forward_kernel"): 428,
    ("90", "attention_prepare_kernel"): 8,
    ("90", "attention_backward_bias_kernel, all terms"): 532,
    ("90", "attention_backward_keys_kernel, all terms"): 3488,
    ("90", "attention_backward_queries_kernel, all terms"): 984,
    ("90", "choose_kernel"): 392,
    ("90", "loop_kernel"): 20,
    ("90", "short_kernel"): 8,
    ("100", "attention_backward_keys_kernel"): 688,
    ("100", "attention_forward_kernel"): 1540,
    ("100", "attention_backward_queries_kernel"): 36,
    ("100", "choose_kernel"): 388,
    ("100", "loop_kernel"): 12,
    ("gfx942", "attention_backward_keys_kernel"): 532,
    ("gfx942", "attention_backward_queries_kernel"): 423,
    ("gfx942", "attention_forward_kernel"): 95,
    ("gfx942", "choose_kernel"): 301,
}

# What the assembler says it runs one product after the other (C7515, C7514), by the arrangement of registers it found:
# known, slower than it could be, and to be mended.
SERIALIZED = {
    ("90", "attention_forward_kernel", "attention-bf16-d64v64-terms"),
    ("90", "attention_forward_kernel", "attention-fp16-d128v128-terms"),
}


@dataclass
class Kernel:
    """What one compiled kernel costs."""

    case: str
    name: str
    warps: int
    shared: int
    registers: int = 0
    spilled: int = 0
    serialized: bool = False  # matrix products run one by one, by the assembler's own warning
    opcodes: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)  # see `sass.lost_descriptors`
    seconds: float = 0.0

    def entry(self, arch: str) -> tuple[str, str]:
        """Its entry among ALLOWED_SPILLS."""
        return arch, self.name + (", all terms" if self.case.endswith(("-terms", "-packed")) else "")


Call = Callable[[], None]

# The whole table is built for the GPU that configs are measured on; elsewhere one case a config.
MEASURED = "90"
ELSEWHERE = re.compile(
    r"attention-(fp16-d64v64-causal|bf16-d128v128-(causal|bool)|bf16-d(256v256|576v512)-causal|fp32-(?!.*terms).*|bf16-d64v64-terms)$"
    r"|softmax-(fp32-(100|32768|1000001)|bf16-(4096|50257|128256))$|logsumexp-(fp32-200000|bf16-inner)$"
    r"|cross_entropy(_overwrite)?-(fp32-(100|32768)|bf16-(4096|50257|128256)(-everything)?)$|cross_entropy-bf16-inner$"
    r"|fused-(bf16-(100|50000)-everything|fp32-(4096|128256)-top_k|fp16-causal|(bf16|fp32)-128256-(limits|k1000))$"
    r"|sample-bf16-(1000|128256)(-limits)?$"
)


def attention(
    dtype: torch.dtype, D: int, Dv: int, mask: str, *, dlse: bool = False, scale: float | None = None
) -> Call:
    """Attention in portable kernels, with gradients."""

    def call() -> None:
        import flashsoft

        masks = {
            "none": None,
            "causal": flashsoft.Causal(),
            "window": flashsoft.Window(127),
            "bool": torch.ones(1, 1, 256, 512, dtype=torch.bool),
        }
        q, k, v = (
            torch.empty(1, S, H, width, dtype=dtype).transpose(1, 2).requires_grad_()
            for S, H, width in ((256, 4, D), (512, 2, D), (512, 2, Dv))
        )
        out, lse = flashsoft.attention(q, k, v, mask=masks[mask], scale=scale, return_lse=True, backend="triton")
        torch.autograd.backward(
            (out, lse) if dlse else (out,), (torch.empty_like(out), torch.empty_like(lse))[: 1 + dlse]
        )

    return call


def hopper(dtype: torch.dtype, D: int, Dv: int, mask: str, keys: int) -> Call:
    """Attention's forward by the Hopper kernel."""

    def call() -> None:
        import flashsoft

        masks = {"causal": flashsoft.Causal(), "window": flashsoft.Window(127), "packed": flashsoft.Causal()}
        q, k, v = (
            torch.empty(1, S, H, width, dtype=dtype).transpose(1, 2)
            for S, H, width in ((256, 4, D), (keys, 2, D), (keys, 2, Dv))
        )
        if mask == "packed":
            cu = torch.tensor([0, 256], dtype=torch.int32)
            rows = [x[0].transpose(0, 1) for x in (q, k, v)]
            flashsoft.attention_varlen(*rows, cu, 2 * cu, 256, keys, mask=masks[mask])
            return
        assert flashsoft.explain(q, k, v, mask=masks.get(mask)).backend == "hopper"
        flashsoft.attention(q, k, v, mask=masks.get(mask))

    return call


def terms(dtype: torch.dtype, D: int, Dv: int, *, packed: bool = False) -> Call:
    """Attention with every term at once."""

    def call() -> None:
        import flashsoft

        q, k, v = (
            torch.empty(S, H, width, dtype=dtype, requires_grad=True)
            for S, H, width in ((256, 4, D), (512, 2, D), (512, 2, Dv))
        )
        one = {"softcap": 30.0, "sink": torch.zeros(4, requires_grad=True), "dropout_p": 0.1}
        one["scale"] = torch.ones((), requires_grad=True)
        slopes = torch.zeros(4, requires_grad=True)
        if packed:
            cu = torch.tensor([0, 256], dtype=torch.int32)
            out = flashsoft.attention_varlen(
                q, k, v, cu, 2 * cu, 256, 512, mask=flashsoft.Causal(), bias=flashsoft.ALiBi(slopes), **one
            )
        else:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            segments = flashsoft.Segments((torch.zeros(256, dtype=torch.int32), torch.zeros(512, dtype=torch.int32)))
            mask = flashsoft.Window(127) & segments & flashsoft.Padding(torch.tensor([500]))
            bias = torch.zeros(4, 256, 512, requires_grad=True)
            out = flashsoft.attention(q, k, v, mask=mask, bias=bias, **one)
        out.backward(torch.empty_like(out))

    return call


def biased(dtype: torch.dtype, D: int, **options: Any) -> Call:
    """Attention with a bias that takes a gradient."""

    def call() -> None:
        import flashsoft

        q, k, v = (torch.empty(1, 4, S, D, dtype=dtype, requires_grad=True) for S in (256, 512, 512))
        bias = torch.empty(4, 256, 512, dtype=dtype, requires_grad=True)
        out = flashsoft.attention(q, k, v, bias=bias, **options)
        out.backward(torch.empty_like(out))

    return call


def rows(name: str, dtype: torch.dtype, *shape: int, dim: int = -1) -> Call:
    def call() -> None:
        import flashsoft

        y: Tensor = getattr(flashsoft, name)(torch.empty(*shape, dtype=dtype, requires_grad=True), dim)
        y.backward(torch.empty_like(y))

    return call


def logits(dtype: torch.dtype, *shape: int, **options: Any) -> Call:
    def call() -> None:
        import flashsoft

        x = torch.empty(*shape, dtype=dtype, requires_grad=True)
        y = flashsoft.fused_softmax(x, **{k: v() if callable(v) else v for k, v in options.items()})
        y.backward(torch.empty_like(y))

    return call


def tokens(dtype: torch.dtype, *shape: int, **options: Any) -> Call:
    def call() -> None:
        import flashsoft

        given = {k: v() if callable(v) else v for k, v in options.items()}
        flashsoft.sample(torch.empty(*shape, dtype=dtype), **given)

    return call


def losses(dtype: torch.dtype, *shape: int, dim: int = -1, inplace: bool = False, **options: Any) -> Call:
    def call() -> None:
        import flashsoft

        x = torch.empty(*shape, dtype=dtype, requires_grad=True)
        target = torch.zeros(x.movedim(dim, -1).shape[:-1], dtype=torch.int64)
        chosen = {k: v() if callable(v) else v for k, v in options.items()}
        flashsoft.fused_cross_entropy(
            x.clone() if inplace else x, target, dim=dim, inplace_backward=inplace, **chosen
        ).backward()

    return call


def hopper_cases() -> dict[str, Call]:
    """Every config of the Hopper kernel, with all keys of a tile there, with a tail, and with either band."""
    from flashsoft.tuning.hopper import CONFIGS

    table: dict[str, Call] = {}
    for config in CONFIGS:
        for mask, keys in (("none", 512), ("tail", 500), ("causal", 512), ("window", 512), ("packed", 512)):
            table[f"hopper-bf16-d{config.d}v{config.dv}-{mask}"] = hopper(
                torch.bfloat16, config.d, config.dv, mask, keys
            )
        table[f"hopper-fp16-d{config.d}v{config.dv}-causal"] = hopper(torch.float16, config.d, config.dv, "causal", 512)
    for mask in ("causal", "window", "packed"):  # longer sequences of narrow heads have tiles of their own
        table[f"hopper-bf16-d64v64-{mask}-long"] = hopper(torch.bfloat16, 64, 64, mask, 8192)
    return table


def cases() -> dict[str, Call]:
    """Every op, type, width class and mask for which a launcher chooses another config or kernel."""
    table: dict[str, Call] = {}
    types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    for name, D, Dv, mask in (
        ("fp16", 64, 64, "none"),
        ("fp16", 64, 64, "causal"),
        ("bf16", 64, 64, "bool"),
        ("bf16", 128, 128, "none"),
        ("bf16", 128, 128, "causal"),
        ("fp16", 128, 128, "window"),
        ("bf16", 128, 128, "bool"),
        ("bf16", 80, 80, "causal"),
        ("fp16", 192, 128, "causal"),
        ("bf16", 256, 256, "causal"),
        ("bf16", 20, 12, "causal"),  # rows that are loaded through registers, keys and values into one place
        ("fp32", 16, 16, "none"),
        ("fp32", 64, 64, "causal"),
        ("fp32", 128, 128, "none"),
        ("fp32", 256, 256, "causal"),
    ):
        table[f"attention-{name}-d{D}v{Dv}-{mask}"] = attention(types[name], D, Dv, mask)
    for name, D, Dv, mask in (
        ("bf16", 512, 512, "causal"),
        ("bf16", 576, 512, "causal"),
        ("bf16", 320, 320, "bool"),
        ("fp32", 576, 512, "causal"),
    ):
        table[f"attention-{name}-d{D}v{Dv}-{mask}"] = attention(types[name], D, Dv, mask)
    for name, D in (("bf16", 64), ("fp16", 128), ("fp32", 64)):
        table[f"attention-{name}-d{D}v{min(D, 512)}-terms"] = terms(types[name], D, min(D, 512))
    table["attention-bf16-d128v128-packed"] = terms(torch.bfloat16, 128, 128, packed=True)
    table["attention-fp16-d64v64-bias"] = biased(torch.float16, 64)
    table["attention-bf16-d128v128-bias"] = biased(torch.bfloat16, 128)
    table["attention-bf16-d128v128-bias-more"] = biased(torch.bfloat16, 128, softcap=30.0, dropout_p=0.1)
    table["attention-bf16-d64v64-causal-dlse"] = attention(torch.bfloat16, 64, 64, "causal", dlse=True)
    table["attention-bf16-d64v64-negative"] = attention(torch.bfloat16, 64, 64, "none", scale=-0.5)
    for name in ("softmax", "log_softmax", "logsumexp"):
        for dtype, widths in (
            ("fp32", (100, 1024, 8192, 32_768, 200_000, 1_000_001)),
            ("bf16", (1000, 4096, 4097, 16_384, 32_768, 50_257, 128_256, 1_000_000)),
        ):
            for n in widths:
                table[f"{name}-{dtype}-{n}"] = rows(name, types[dtype], 64, n)
        table[f"{name}-bf16-inner"] = rows(name, torch.bfloat16, 8, 256, 64, dim=1)
    for n in (100, 1000, 4096, 50_000, 128_256):
        table[f"fused-bf16-{n}"] = logits(torch.bfloat16, 64, n)
        table[f"fused-fp32-{n}-top_k"] = logits(torch.float32, 64, n, top_k=50, temperature=0.7)
        table[f"fused-bf16-{n}-everything"] = logits(
            torch.bfloat16,
            64,
            n,
            top_k=lambda: torch.full((64,), 50),
            temperature=lambda: torch.ones(64, requires_grad=True),
            mask=lambda n=n: torch.ones(64, n, dtype=torch.bool),
            bias=lambda n=n: torch.zeros(n, requires_grad=True),
        )
    for dtype, widths in (
        ("fp32", (100, 1024, 8192, 32_768, 200_000)),
        ("bf16", (100, 1000, 4096, 16_384, 50_257, 128_256, 1_000_000)),
        ("fp16", (50_257,)),
    ):
        for n in widths:
            for name, inplace in (("cross_entropy", False), ("cross_entropy_overwrite", True)):
                table[f"{name}-{dtype}-{n}"] = losses(types[dtype], 64, n, inplace=inplace)
    for n in (1000, 50_257, 128_256):
        for name, inplace in (("cross_entropy", False), ("cross_entropy_overwrite", True)):
            everything = {"weight": lambda n=n: torch.ones(n), "label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0}
            table[f"{name}-bf16-{n}-everything"] = losses(torch.bfloat16, 64, n, inplace=inplace, **everything)
    table["cross_entropy-bf16-128256-smoothing"] = losses(torch.bfloat16, 64, 128_256, label_smoothing=0.1)
    table["cross_entropy-bf16-inner"] = losses(torch.bfloat16, 8, 1000, 64, dim=1)
    some = {"top_k": lambda: torch.full((64,), 50), "top_p": lambda: torch.ones(64), "min_p": 0.1}
    for n in (1000, 128_256):
        table[f"fused-bf16-{n}-limits"] = logits(torch.bfloat16, 64, n, scale=0.5, softcap=30.0, **some)
        table[f"sample-bf16-{n}"] = tokens(torch.bfloat16, 64, n)
        table[f"sample-bf16-{n}-limits"] = tokens(torch.bfloat16, 64, n, temperature=lambda: torch.ones(64), **some)
    for name, limits in (("top_p", {"top_p": 0.9}), ("k1000", {"top_k": 1000}), ("k5000", {"top_k": 5000})):
        table[f"fused-fp32-128256-{name}"] = logits(torch.float32, 64, 128_256, **limits)
        table[f"sample-fp32-128256-{name}"] = tokens(torch.float32, 64, 128_256, **limits)
    import flashsoft

    table["fused-fp16-causal"] = logits(torch.float16, 4, 1024, 1024, mask=flashsoft.Causal())
    return table


class Driver:
    """As much of a GPU as a launch asks about before it runs."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.utils = self  # where Triton's drivers keep what asks for properties

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_LIMIT[str(self.target.arch)], "multiprocessor_count": 108}

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def target_of(arch: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", int(arch), 32) if arch.isdigit() else GPUTarget("hip", arch, 64)


@contextlib.contextmanager
def compiling(arch: str) -> Iterator[list[tuple[Any, str, float]]]:
    """Collects (compiled kernel, assembler's log, seconds) of every launch within."""
    import triton
    from triton.runtime.jit import JITFunction

    from flashsoft import dispatch

    built: list[tuple[Any, str, float]] = []
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        log = io.StringIO()
        start = time.perf_counter()
        with contextlib.redirect_stdout(log):
            kernel = launch(self, *args, grid=grid, warmup=True, **options)
        if all(kernel is not other for other, _, _ in built):
            built.append((kernel, log.getvalue(), time.perf_counter() - start))
        return kernel

    capability = divmod(int(arch), 10) if arch.isdigit() else (9, 4)
    before = dispatch.target_of
    dispatch.target_of = lambda device: dispatch.Target("cuda", capability, has_triton=True, interpreted=False)
    dispatch._choose.cache_clear()
    driver, active = triton.runtime.driver, triton.runtime.driver._active
    JITFunction.run = run
    driver.set_active(Driver(target_of(arch)))
    try:
        with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope():
            # the log of the very assembly that is shipped: a cached kernel has none
            triton.knobs.nvidia.dump_ptxas_log = True
            triton.knobs.compilation.always_compile = True
            yield built
    finally:
        JITFunction.run = launch
        driver._active = active
        dispatch.target_of = before
        dispatch._choose.cache_clear()


def measure(case: str, kernel: Any, log: str) -> Kernel:
    """Reads a kernel's costs from its assembly."""
    report = Kernel(case, kernel.metadata.name, kernel.metadata.num_warps, kernel.metadata.shared)
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        counts = {name: int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")}
        report.registers, report.spilled = counts["vgpr_count"], counts["vgpr_spill_count"]
        report.opcodes = {"MFMA": len(re.findall(r"v_mfma", text))}
        return report
    report.registers = int(re.search(r"Used (\d+) registers", log)[1])
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()
    report.spilled = int(stores) + int(loads)
    report.serialized = "instructions are serialized" in log
    if re.search(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b", kernel.asm["ptx"]):  # to disassemble takes long
        code = sass.listing(kernel.asm["cubin"])
        report.opcodes, report.lost = sass.opcodes(code), sass.lost_descriptors(code)
    return report


def main(arch: str, only: str = "") -> None:
    """Prints what the cases whose name holds `only` cost on one of SHARED_LIMIT's targets."""
    seen: set[str] = set()
    for case, call in (hopper_cases() if only.startswith("hopper") else cases()).items():
        if only not in case or (arch != MEASURED and not ELSEWHERE.match(case)):
            continue
        with compiling(arch) as built:
            call()
        for kernel, log, seconds in built:
            if kernel.hash not in seen:  # the same specialisation came in an earlier case
                seen.add(kernel.hash)
                print(json.dumps(asdict(replace(measure(case, kernel, log), seconds=seconds))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
