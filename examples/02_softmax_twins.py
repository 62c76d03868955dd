"""Row softmax, readable, in NumPy, PyTorch (with its backward by hand) and CUDA C++ (02_softmax_twin.cu).

The fourth twin is flashsoft's Triton kernel; tests/test_softmax_twins.py holds all four against each other.
"""

from pathlib import Path

import numpy as np
import torch

import flashsoft


def numpy_softmax(x: np.ndarray) -> np.ndarray:
    m = x.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # -inf - -inf in a row of -inf
        p = np.exp(x - m)
    return p / p.sum(axis=-1, keepdims=True)


def numpy_softmax_backward(dy: np.ndarray, y: np.ndarray) -> np.ndarray:
    return y * (dy - (y * dy).sum(axis=-1, keepdims=True))


class TorchSoftmax(torch.autograd.Function):
    """y = exp(x - m) / s; its gradient dx = y * (dy - sum(y * dy)) needs only y."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        p = torch.exp(x - x.amax(-1, keepdim=True))
        y = p / p.sum(-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return y * (dy - (y * dy).sum(-1, keepdim=True))


def cuda_softmax(x: torch.Tensor, name: str = "softmax_rows", threads: int = 256) -> torch.Tensor:
    """x (rows, columns), float32 on a CUDA device, by 02_softmax_twin.cu; NVRTC compiles it here and now."""
    source = Path(__file__).with_name("02_softmax_twin.cu").read_text()
    x, (rows, columns) = x.contiguous(), x.shape
    y = torch.empty_like(x)
    if hasattr(torch.cuda, "_compile_kernel"):
        kernel = torch.cuda._compile_kernel(source, name)
        kernel(grid=(rows, 1, 1), block=(threads, 1, 1), args=[x, y, columns])
        return y
    try:
        from cuda import core
    except ImportError as missing:
        raise RuntimeError("the CUDA C++ twin needs torch >= 2.9, or `pip install cuda-core`") from missing
    device = core.Device(x.device.index)
    device.set_current()
    device.sync()
    program = core.Program(source, "c++", core.ProgramOptions(arch=f"sm_{device.arch}"))
    kernel, shape = program.compile("cubin").get_kernel(name), core.LaunchConfig(grid=rows, block=threads)
    core.launch(device.default_stream, shape, kernel, x.data_ptr(), y.data_ptr(), np.int32(columns))
    device.sync()
    return y


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 1000)
    x[1, 10:], x[2] = float("-inf"), 7.0
    exact = torch.softmax(x.double(), -1)
    twins = {"NumPy": torch.from_numpy(numpy_softmax(x.numpy())), "PyTorch": TorchSoftmax.apply(x)}
    if torch.cuda.is_available():
        x = x.cuda()
        twins["CUDA C++"] = cuda_softmax(x).cpu()
    twins[f"flashsoft, {x.device}"] = flashsoft.softmax(x).cpu()
    for name, y in twins.items():
        print(f"{name:<18} largest error against float64: {(y - exact).abs().max():.1e}")


if __name__ == "__main__":
    main()
