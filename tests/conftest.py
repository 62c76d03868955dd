"""What every test stands on: where kernels run, one seed a test, and memory that is never clean by chance."""

from __future__ import annotations

import importlib.util
import os
import zlib
from collections.abc import Iterator

# One thread a worker: pytest-xdist already fills the cores. Read by BLAS libraries when they load.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import pytest  # noqa: E402
import torch  # noqa: E402

HAS_GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
if not HAS_GPU:
    # Triton reads this when it is imported (torch does not import it): kernels then run on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With a GPU, `-m gpu` selects whatever runs on it; without one, what is marked gpu is skipped."""
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        elif HAS_GPU and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend by name; triton on the GPU where there is one, else under its interpreter."""
    name: str = request.param
    if name == "triton" and not HAS_TRITON:
        pytest.skip("triton is not installed")
    if name == "triton" and not HAS_GPU and not INTERPRETED:
        pytest.skip("TRITON_INTERPRET is not 1 and there is no GPU")
    return name


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Random numbers that depend on nothing but the test's own name."""
    value = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(value)
    return value


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory is NaN (integers: the largest), however it is allocated: an output left unwritten shows.

    torch's own switch, which also chooses deterministic algorithms: a test of determinism must turn that off.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before, warn_only=warn_only)
