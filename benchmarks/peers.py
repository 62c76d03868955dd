"""The peers of row softmax on (rows, columns), each loaded when asked for: forward y = f(x), backward dx = f(dy, y).

A loader raises ModuleNotFoundError for a library that is not here; a peer raises what it says of inputs it cannot take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from flashsoft.tuning.timing import Call

Forward = Callable[[Tensor], Tensor]
Backward = Callable[[Tensor, Tensor], Tensor]
TWIN = Path(__file__).parents[1] / "examples" / "02_softmax_twin.cu"


def torch_forward(x: Tensor) -> Tensor:
    """What the yardstick runs."""
    return torch.softmax(x, -1)


def torch_backward(dy: Tensor, y: Tensor) -> Tensor:
    """The operator that autograd itself would call."""
    return torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)


def naive_forward(x: Tensor) -> Tensor:
    """The maximum, the exponentials and their sum, the division: an operator each, in the input's dtype."""
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def naive_backward(dy: Tensor, y: Tensor) -> Tensor:
    """As written on paper."""
    return y * (dy - (y * dy).sum(-1, keepdim=True))


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One compilation a shape; Inductor for a GPU, and only the capture on a CPU, where nothing is timed."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 4096
    if not torch.cuda.is_available():
        return torch.compile(function, dynamic=False, backend="eager")
    from torch._inductor import config

    config.compile_threads = 1  # a graph here is a kernel or two, not worth a pool of processes
    return torch.compile(function, dynamic=False)


def liger_forward() -> Forward:
    from liger_kernel.ops.softmax import _softmax_forward

    return lambda x: _softmax_forward(x)[0]


def liger_backward() -> Backward:
    from liger_kernel.ops.softmax import _softmax_backward, calculate_settings

    return lambda dy, y: _softmax_backward(dy, y, *calculate_settings(y.shape[-1]), False)


def quack_forward() -> Forward:
    from quack.softmax import softmax_fwd

    return softmax_fwd


def quack_backward() -> Backward:
    from quack.softmax import softmax_bwd

    return softmax_bwd


@functools.cache
def cuda_forward() -> Forward:
    """The CUDA C++ twin of the examples, by NVRTC: a block a row, three passes."""
    kernel = torch.cuda._compile_kernel(TWIN.read_text(), "softmax_rows")

    def forward(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError(f"the CUDA C++ twin takes float32, got {x.dtype}")
        y = torch.empty_like(x)
        kernel(grid=(len(x), 1, 1), block=(256, 1, 1), args=[x, y, x.shape[1]])
        return y

    return forward


FORWARD: dict[str, Callable[[], Forward]] = {
    "torch": lambda: torch_forward,
    "compile": lambda: compiled(torch_forward),
    "liger": liger_forward,
    "quack": quack_forward,
    "naive": lambda: naive_forward,
    "cuda": cuda_forward,
}
BACKWARD: dict[str, Callable[[], Backward]] = {
    "torch": lambda: torch_backward,
    "compile": lambda: compiled(torch_backward),
    "liger": liger_backward,
    "quack": quack_backward,
    "naive": lambda: naive_backward,
}


def bind(load: Callable[[], Callable[..., Tensor]], *inputs: Tensor) -> Call:
    """A loaded function's call on these inputs."""
    return functools.partial(load(), *inputs)


PACKAGES = ("liger-kernel", "quack-kernels", "nvidia-cutlass-dsl")
