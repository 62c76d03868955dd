"""Attention with all of its terms inside what torch wraps around a model: compilers, autocast, checkpoints, ranks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flashsoft
from flashsoft import ALiBi, Causal, FusedAttention, Padding, Segments, Window

CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """Learned projections, sinks, slopes and scale, around a mask of every kind."""

    def __init__(self, backend: str = "reference", dropout_p: float = 0.0) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 32)
        self.sink = nn.Parameter(torch.randn(2))
        self.slopes = nn.Parameter(torch.rand(2))
        self.scale = nn.Parameter(torch.tensor([0.3, 0.5]))
        self.dropout_p, self.backend = dropout_p, backend

    def forward(self, x: Tensor, ids: Tensor, keep: Tensor, bias: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, S, 4, 8).transpose(1, 2).split((2, 1, 1), 1)
        out = flashsoft.attention(
            q, k, v,
            mask=Causal() & Window(6) & Segments(ids) & Padding(keep),
            bias=ALiBi(self.slopes) + bias, scale=self.scale, softcap=5.0, sink=self.sink,
            dropout_p=self.dropout_p, backend=self.backend,
        )  # fmt: skip
        return out.transpose(1, 2).flatten(2)


def inputs(S: int, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    keep = torch.ones(2, S, dtype=torch.bool)
    keep[1, :2] = False
    ids = torch.arange(S).expand(2, S) // 4
    x, bias = torch.randn(2, S, 16), torch.randn(1, 2, 1, S)
    return tuple(t.to(device) for t in (x, ids, keep, bias))


def gradients(module: nn.Module, out: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out.float().sin().sum(), tuple(module.parameters())))


def same(module: nn.Module, got: Tensor, expected: Tensor, **tolerance: float) -> None:
    tolerance = tolerance or CLOSE
    torch.testing.assert_close(got, expected, **tolerance)
    for a, b in zip(gradients(module, got), gradients(module, expected), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_in_one_graph_for_every_length(dynamic: bool, backend: str, device: torch.device) -> None:
    block = Block(backend).to(device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=dynamic, backend=counter)
    traced = 0  # at first perhaps twice, where a number such as dropout_p is found not to vary
    for S in (5, 9) if dynamic else (5,):
        given = inputs(S, device)
        same(block, compiled(*given), block(*given))
        traced = traced or counter.frame_count
    assert counter.frame_count == traced


def test_a_second_length_makes_lengths_dynamic_and_a_third_compiles_nothing() -> None:
    block = Block()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for S in (5, 12, 9, 17):
        given = inputs(S)
        same(block, compiled(*given), block(*given))
    assert counter.frame_count == 2


def test_compiled_dropout_draws_as_eager_does() -> None:
    block = Block(dropout_p=0.4)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    given = inputs(8)
    torch.manual_seed(5)
    got = compiled(*given)
    torch.manual_seed(5)
    same(block, got, block(*given))
    assert not torch.equal(compiled(*given), compiled(*given))


def test_exported_with_a_free_length() -> None:
    block = Block()
    S = torch.export.Dim("S", min=2, max=512)
    shapes = ({1: S}, {1: S}, {1: S}, {3: S})
    exported = torch.export.export(block, inputs(6), dynamic_shapes=shapes)
    given = inputs(11)
    torch.testing.assert_close(exported.module()(*given), block(*given), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Products in half precision, parameters' gradients in float32."""
    block = Block(backend).to(device)
    given = inputs(9, device)
    with torch.autocast(device.type, dtype):
        out = block(*given)
    assert out.dtype == dtype and all(g.dtype == torch.float32 for g in gradients(block, out))
    tolerance = 6e-2 if dtype == torch.bfloat16 else 1e-2
    torch.testing.assert_close(out.float(), block(*given), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_dropout_replays(use_reentrant: bool, backend: str, device: torch.device) -> None:
    """The seed is drawn by torch's generator, whose state a checkpoint keeps."""
    block = Block(backend, dropout_p=0.3).to(device)
    x, *rest = inputs(9, device)
    x.requires_grad_()
    torch.manual_seed(2)
    expected = block(x, *rest)
    torch.manual_seed(2)
    got = checkpoint(block, x, *rest, use_reentrant=use_reentrant)
    assert torch.equal(got, expected)
    leaves = (x, *block.parameters())
    results = []
    for out in (got, expected):
        for leaf in leaves:
            leaf.grad = None
        torch.rand(3)  # whatever else is drawn meanwhile
        out.sin().sum().backward()
        results.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_checkpointed_packed_sequences(backend: str, device: torch.device) -> None:
    q, k, v = (torch.randn(9, heads, 8, device=device, requires_grad=True) for heads in (4, 2, 2))
    ends = torch.tensor([0, 4, 4, 9], dtype=torch.int32, device=device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashsoft.attention_varlen(q, k, v, ends, ends, 5, 5, mask=Causal(), dropout_p=0.3, backend=backend)

    results = []
    for wrapped in (run, lambda *args: checkpoint(run, *args, use_reentrant=False)):
        torch.manual_seed(2)
        out = wrapped(q, k, v)
        torch.rand(3)
        results.append((out, *torch.autograd.grad(out.sin().sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# several processes

RANKS = 2


class Model(nn.Module):
    """Two layers of attention, a mask among them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            FusedAttention(16, 2, num_kv_heads=1, mask=Causal() & Window(5), rotary_base=100.0, softcap=4.0, sinks=True)
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def model_and_data() -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(), torch.randn(2 * RANKS, 8, 16)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().mean()


def train(wrap: Callable[[Model], nn.Module], rank: int) -> list[Tensor]:
    """A rank's share of a step of the optimiser, and the parameters after it, whole."""
    model, x = model_and_data()
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    loss(wrapped, x.chunk(RANKS)[rank]).backward()
    optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in wrapped.parameters()]


def data_parallel(model: Model) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fully_sharded(model: Model) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (RANKS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def worker(rank: int, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    model, x = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss(model, x).backward()
    optimizer.step()
    for wrap in (data_parallel, fully_sharded):
        for got, expected in zip(train(wrap, rank), model.parameters(), strict=True):
            torch.testing.assert_close(got, expected.detach(), atol=1e-6, rtol=1e-5, msg=wrap.__name__)
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo")
def test_two_ranks_train_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """DistributedDataParallel and fully_shard: a step on halves of a batch is the step on all of it."""
    monkeypatch.setenv("FLASHSOFT_BACKEND", "reference")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join((str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")))
    )
    folder = tempfile.mkdtemp()
    try:
        torch.multiprocessing.spawn(worker, (str(Path(folder) / "store"),), RANKS)
    finally:
        shutil.rmtree(folder)
