"""Cross entropy over ranks that each have a slice of the classes, against one loss of the whole; gloo on the CPU."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashsoft

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo here", allow_module_level=True)

N = 24  # classes of a rank
TIMEOUT = datetime.timedelta(seconds=60)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"dtype": torch.bfloat16},
    "sum": {"reduction": "sum", "dim": 1},
    "none": {"reduction": "none", "z_loss": 1e-2},
    "smoothing": {"label_smoothing": 0.2},
    "everything": {"weight": True, "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 4.0, "ignore_index": 3},
    "ignored": {"nothing": True, "reduction": "sum"},
}


def inputs(ranks: int, name: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Logits of all classes, targets and options, the same on every rank."""
    generator = torch.Generator().manual_seed(len(name) + ranks)
    options = dict(OPTIONS[name])
    x = torch.randn(5, ranks * N, 3, generator=generator).to(options.pop("dtype", torch.float32)) * 3
    x[1, :N] = -torch.inf  # a rank without mass
    target = torch.randint(N, ranks * N, (5, 3), generator=generator)
    target[2] = options.get("ignore_index", -100)
    x[2, ::5] = torch.nan
    if options.pop("nothing", False):
        target[:] = -100
    if options.pop("weight", False):
        options["weight"] = torch.rand(ranks * N, generator=generator)
    if options.setdefault("dim", -1) == -1:
        x = x.transpose(1, 2).contiguous()
    return x, target, options


def rank(number: int, ranks: int, folder: str, backend: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=ranks, timeout=TIMEOUT
    )
    group = torch.distributed.group.WORLD
    found = {}
    for name in OPTIONS:
        x, target, options = inputs(ranks, name)
        dim = options["dim"]
        own = x.narrow(dim, number * N, N).requires_grad_()  # a slice, not contiguous
        if "weight" in options:
            options["weight"] = options["weight"][number * N : (number + 1) * N]
        loss = flashsoft.fused_cross_entropy(own, target, group=group, backend=backend, **options)
        g = torch.linspace(0.5, 1.5, loss.numel()).view(loss.shape)
        found[name] = loss.detach(), torch.autograd.grad(loss, own, g)[0]
    torch.save(found, Path(folder) / f"{number}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_agree_with_the_whole(ranks: int, backend: str, tmp_path: Path) -> None:
    if backend == "triton" and (ranks > 2 or os.environ.get("TRITON_INTERPRET") != "1"):
        pytest.skip("kernels do not run on the CPU, or are slow there")
    torch.multiprocessing.spawn(rank, (ranks, str(tmp_path), backend), nprocs=ranks)
    found = [torch.load(tmp_path / f"{number}.pt") for number in range(ranks)]
    for name in OPTIONS:
        x, target, options = inputs(ranks, name)
        if "weight" in options:
            options["weight"] = options["weight"].double()
        leaf = x.double().requires_grad_()
        want = flashsoft.fused_cross_entropy(leaf, target, backend="reference", **options)
        g = torch.linspace(0.5, 1.5, want.numel()).double().view(want.shape)
        (dwant,) = torch.autograd.grad(want, leaf, g)
        losses, gradients = zip(*(of_rank[name] for of_rank in found), strict=True)
        assert all(torch.equal(loss, losses[0]) for loss in losses), name
        torch.testing.assert_close(losses[0].double(), want.detach(), atol=2e-6, rtol=2e-6)
        bound = 2**-8 if x.dtype == torch.bfloat16 else 2e-6
        dx = torch.cat(gradients, options["dim"])
        assert dx.dtype == x.dtype
        torch.testing.assert_close(dx.double(), dwant, atol=bound * float(dwant.abs().max()), rtol=bound)


def alone(number: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1, timeout=TIMEOUT
    )
    group = torch.distributed.group.WORLD
    x, target = torch.randn(3, N), torch.tensor([0, N - 1, -100])
    loss = flashsoft.fused_cross_entropy(x, target, group=group)
    torch.testing.assert_close(loss, flashsoft.fused_cross_entropy(x, target))
    with pytest.raises(ValueError, match="inplace_backward must be False with a group"):
        flashsoft.fused_cross_entropy(x, target, group=group, inplace_backward=True)
    assert flashsoft.FusedCrossEntropyLoss(group=group)(x, target).ndim == 0
    torch.distributed.destroy_process_group()


def test_a_group_of_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(alone, (str(tmp_path),), nprocs=1)
