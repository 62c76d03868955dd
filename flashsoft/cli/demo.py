"""`flashsoft demo`: the main job, end to end.

A small GPT of `FusedAttention` blocks learns the sources of Python's own standard library, byte by byte, and
writes a few lines with a KV cache. Then the attention of every layer, output and gradients, is compared with
torch's `scaled_dot_product_attention` on that layer's own queries, keys and values, and the same model is
timed with both.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import api, masks
from ..alibi import Bias
from ..cache import KVCache
from ..modules import FusedAttention
from . import UsageError, cases, memory, verify

TEXT_BYTES = 4_000_000
BYTES = 256  # the vocabulary
PROMPT = b"def "


@dataclass(frozen=True)
class Size:
    """Of the model and of its training."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    length: int
    batch: int
    steps: int
    rate: float
    timed_steps: int


ON_CPU = Size(3, 128, 4, 2, length=128, batch=8, steps=250, rate=4e-3, timed_steps=8)
ON_GPU = Size(8, 512, 8, 4, length=1024, batch=16, steps=400, rate=1e-3, timed_steps=20)


# ---- the model ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, size: Size, attention: type[FusedAttention]) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.width)
        self.attention = attention(
            size.width, size.heads, size.kv_heads, bias=False, mask=masks.Causal(), rotary_base=10000.0
        )
        self.mlp_norm = nn.RMSNorm(size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache=cache)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Logits (B, S, 256) of the byte after each byte of (B, S)."""

    def __init__(self, size: Size, attention: type[FusedAttention] = FusedAttention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, size.width)
        self.blocks = nn.ModuleList(Block(size, attention) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[number])
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def loss(self, tokens: Tensor) -> Tensor:
        """Mean negative log likelihood, in nats a byte, of tokens (B, S + 1) but the first."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class TorchAttention(FusedAttention):
    """The same layer with torch's attention between the projections."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: masks.MaskLike, bias: Bias = None) -> Tensor:
        return torch_attention(query, key, value)


def torch_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention by torch, of as many queries as keys."""
    gqa: dict[str, Any] = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, **gqa)


@torch.no_grad()
def generate(model: GPT, size: Size, count: int, device: torch.device, generator: torch.Generator) -> str:
    """PROMPT and `count` sampled bytes: the prompt in one pass, then a byte a step through the caches."""
    tokens = torch.tensor([list(PROMPT)], device=device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    head_dim, room = size.width // size.heads, len(PROMPT) + count
    caches = [KVCache(1, size.kv_heads, room, head_dim, device, dtype) for _ in range(size.layers)]
    written = bytearray(PROMPT)
    with precision(device):
        for _ in range(count):
            logits = model(tokens, caches)[:, -1].float()
            tokens = api.sample(logits, temperature=0.7, top_k=20, generator=generator)[:, None]
            written.append(int(tokens))
    return written.decode("utf-8", errors="replace")


# ---- the text ----------------------------------------------------------------------------------------------


def read_text(limit: int = TEXT_BYTES) -> tuple[Tensor, Tensor]:
    """Bytes of the standard library for training, and every tenth file of it for validation.

    UsageError where Python came without its sources.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    training, validation = bytearray(), bytearray()
    for number, path in enumerate(sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py"))):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        (validation if number % 10 == 9 else training).extend(path.read_bytes())
        if len(training) >= limit:
            break
    if min(len(training), len(validation)) < 10_000:
        raise UsageError(f"the sources of Python's standard library are needed, got almost none in {library}")
    return torch.frombuffer(training, dtype=torch.uint8), torch.frombuffer(validation, dtype=torch.uint8)


def batch_of(text: Tensor, size: Size, device: torch.device, generator: torch.Generator) -> Tensor:
    """size.batch random pieces of size.length + 1 bytes."""
    starts = torch.randint(len(text) - size.length - 1, (size.batch, 1), generator=generator)
    return text[starts + torch.arange(size.length + 1)].to(device, torch.int64)


# ---- training ----------------------------------------------------------------------------------------------


def precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 autocast on a GPU, float32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


def optimizer_of(model: GPT, size: Size) -> torch.optim.Optimizer:
    """AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.95), weight_decay=0.1)


def train_step(model: GPT, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Tensor:
    """The loss before one step of the optimizer."""
    with precision(tokens.device):
        loss = model.loss(tokens)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def train(model: GPT, text: Tensor, size: Size, device: torch.device, generator: torch.Generator) -> list[float]:
    """The loss of each step; the rate rises over the first tenth and falls to a tenth after."""
    optimizer = optimizer_of(model, size)
    warm = max(1, size.steps // 10)
    losses: list[Tensor] = []
    say = progress(size.steps)
    for step in range(size.steps):
        rate = min((step + 1) / warm, 1.0 - 0.9 * max(0, step - warm) / size.steps)
        optimizer.param_groups[0]["lr"] = size.rate * rate
        losses.append(train_step(model, optimizer, batch_of(text, size, device, generator)))
        say(step, losses[-1])
    return [float(loss) for loss in losses]


def progress(steps: int) -> Callable[[int, Tensor], None]:
    """say(step, loss): one bar that moves where a person watches, else ten lines."""
    watched = sys.stdout.isatty()
    every = max(1, steps // (50 if watched else 10))
    started = time.perf_counter()

    def say(step: int, loss: Tensor) -> None:
        last = step == steps - 1
        if step % every == 0 or last:
            bar = "#" * (20 * (step + 1) // steps)
            seconds = time.perf_counter() - started
            line = f"  [{bar:.<20}] step {step + 1:>5} of {steps}   loss {float(loss):.3f}   {seconds:5.1f} s"
            print(line, end="\r" if watched and not last else "\n", flush=True)

    return say


@torch.no_grad()
def validation_loss(model: GPT, text: Tensor, size: Size, device: torch.device) -> float:
    """Mean loss over four batches that are the same each time."""
    generator = torch.Generator().manual_seed(1)
    with precision(device):
        losses = [model.loss(batch_of(text, size, device, generator)) for _ in range(4)]
    return float(torch.stack(losses).mean())


# ---- the comparison with torch -----------------------------------------------------------------------------


@torch.no_grad()
def captured(model: GPT, tokens: Tensor) -> list[cases.Tensors]:
    """Query, key and value of each layer's attention call in one pass over tokens."""
    calls: list[cases.Tensors] = []
    layers = [block.get_submodule("attention") for block in model.blocks]

    def recording(attend: Any) -> Any:
        def record(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
            calls.append({"query": query, "key": key, "value": value})
            return attend(query, key, value, *options)  # type: ignore[no-any-return]

        return record

    for layer in layers:
        layer.attend = recording(layer.attend)
    try:
        with precision(tokens.device):
            model(tokens)
    finally:
        for layer in layers:
            del layer.attend
    return calls


def exact_attention(given: cases.Tensors, past: Tensor) -> Tensor:
    """Causal attention by its formula, for float64."""
    query, key, value = given["query"], given["key"], given["value"]
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores: Tensor = query @ key.mT * query.shape[3] ** -0.5
    return scores.masked_fill(~past, float("-inf")).softmax(-1) @ value


def compare_layers(model: GPT, tokens: Tensor) -> bool:
    """Prints how far each layer's attention is from torch's; True if all are within tolerance."""
    past = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
    ways: dict[str, verify.Way] = {
        "ours": lambda given: api.attention(given["query"], given["key"], given["value"], mask=masks.Causal()),
        "torch": lambda given: torch_attention(given["query"], given["key"], given["value"]),
        "exact": lambda given: exact_attention(given, past),
    }
    layers = captured(model, tokens)
    (B, H, S, D), Hkv = layers[0]["query"].shape, layers[0]["key"].shape[1]
    layer = cases.Attention("of a layer", B, H, Hkv, S, S, D, D)
    dtype = str(layers[0]["query"].dtype).removeprefix("torch.")
    print(f"\nEvery layer's attention in {dtype}: largest |flashsoft - scaled_dot_product_attention|")
    print(f"tolerance: error against float64 at most 2 x torch's + {verify.FLOOR:.0f} eps x size of the result")
    print(f"  layer {'out':>9} {'dquery':>9} {'dkey':>9} {'dvalue':>9}   tolerance used")
    good = True
    for number, tensors in enumerate(layers):
        results = verify.compare(ways, tensors, partial(cases.cancelling_terms, layer, tensors, past), seed=number)
        passed = all(result.passed for result in results.values())
        good &= passed
        apart = " ".join(f"{result.apart:9.1e}" for result in results.values())
        used = max(result.used for result in results.values())
        print(f"  {number + 1:>5} {apart}   {used:.0%} {'ok' if passed else 'FAILED'}")
    return good


def timed(
    attention: type[FusedAttention], text: Tensor, size: Size, device: torch.device
) -> tuple[float, float | None]:
    """Tokens a second and peak memory in bytes of a few training steps."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = GPT(size, attention).to(device)
    optimizer = optimizer_of(model, size)
    for _ in range(2):
        train_step(model, optimizer, batch_of(text, size, device, generator))
    with memory.peak(device) as measured:
        memory.synchronize(device)
        started = time.perf_counter()
        for _ in range(size.timed_steps):
            train_step(model, optimizer, batch_of(text, size, device, generator))
        memory.synchronize(device)
        seconds = time.perf_counter() - started
    return size.timed_steps * size.batch * size.length / seconds, measured.bytes


# ---- the verb ----------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the verb."""
    parser.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    parser.add_argument("--steps", type=int, help=f"training steps (default: {ON_CPU.steps}, on cuda {ON_GPU.steps})")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and sample (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Trains, samples, compares, times; 1 if the loss does not fall or a layer disagrees."""
    device = verify.pick_device(args.device)
    size = ON_GPU if device.type == "cuda" else ON_CPU
    if args.steps is not None:
        if args.steps < 2:
            raise UsageError(f"--steps must be at least 2, got {args.steps}")
        size = Size(**{**vars(size), "steps": args.steps})
    training, validation = read_text()
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model = GPT(size).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"Training a GPT of {size.layers} FusedAttention blocks, {parameters / 1e6:.1f} M parameters, on {device}:")
    print(f"{len(training) / 1e6:.1f} MB of Python's standard library, {size.batch} x {size.length} bytes a step")
    before = validation_loss(model, validation, size, device)
    losses = train(model, training, size, device, generator)
    after = validation_loss(model, validation, size, device)
    print(f"train loss {losses[0]:.3f} -> {losses[-1]:.3f}, validation loss {before:.3f} -> {after:.3f} (nats a byte)")
    sampler = torch.Generator(device).manual_seed(args.seed)
    sample = generate(model, size, 120 if device.type == "cpu" else 300, device, sampler)
    print("\nA sample, decoded through the KV cache:\n" + "\n".join(f"  | {line}" for line in sample.split("\n")))

    tokens = batch_of(validation, size, device, generator)[:2, :-1]
    agrees = compare_layers(model, tokens)

    del model
    print(f"\nTraining speed over {size.timed_steps} steps, same model, same batches:")
    for name, attention in (("flashsoft", FusedAttention), ("torch SDPA", TorchAttention)):
        rate, peak = timed(attention, training, size, device)
        room = "not measured" if peak is None else f"{peak / 2**20:,.0f} MiB"
        print(f"  {name:<11} {rate:>11,.0f} tokens/s   peak memory {room}")

    falls = losses[-1] < losses[0] and after < before
    print("\n" + ("Good: the loss falls" if falls else "FAILED: the loss does not fall"), end=", ")
    print("and every layer agrees with torch." if agrees else "and a layer is FURTHER from torch than the tolerance.")
    return 0 if falls and agrees else 1
