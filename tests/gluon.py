"""As much of Gluon as the Hopper kernels use, in numpy, so that they run where there is no GPU: a role is a thread.

The functions of `kernels/hopper` are taken as they stand and given this file's `gl`, `tl`, `tma` and barriers. Copies
happen some time after they are asked for, in any order; products of matrices only when they are waited for. So a tile
that is overwritten too early, bytes that are not counted, or a role that waits for good show as they would on a GPU.
Layouts, registers, fences and rounding to bfloat16 are not seen.
"""

from __future__ import annotations

import inspect
import random
import re
import threading
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from flashsoft.kernels import masking, softcap, softmax
from flashsoft.kernels.hopper import consumer, forward, producer, rings, scheduler

PATIENCE = 60.0  # seconds after which a role waits for good
FOUND: dict[str, Any] = {}  # functions of kernels, and constants
for _module in (softmax, softcap, masking, scheduler, rings, producer, consumer, forward):
    for _name, _value in vars(_module).items():
        if inspect.isfunction(getattr(_value, "fn", None)):
            FOUND[_name] = _value.fn
        elif type(_value).__name__ == "constexpr":
            FOUND[_name] = _value.value
NUMPY = {np.float32: np.float32, "int32": np.int32, np.int64: np.int64}
HALF = SimpleNamespace(np=np.float32, primitive_bitwidth=16)  # in registers with the exponents of bfloat16


class Tile(np.ndarray):
    """A tensor in registers."""

    def to(self, dtype: Any) -> Any:
        made = self.astype(getattr(dtype, "np", dtype))
        return made if made.ndim else made.item()

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=None)

    def permute(self, order: tuple[int, ...]) -> Any:
        return self.transpose(order)

    def split(self) -> tuple[Any, Any]:
        return self[..., 0], self[..., 1]


def tile(x: Any) -> Any:
    x = np.asarray(x)
    return x.view(Tile) if x.ndim else x.item()


class Shared:
    """A view of shared memory."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape = values, values.shape

    def index(self, i: int) -> Shared:
        assert 0 <= i < len(self.values)
        return Shared(self.values[i])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.values.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.transpose(order))

    def load(self, layout: Any) -> Any:
        return self.values.copy().view(Tile)

    def store(self, x: Any) -> None:
        self.values[...] = x


class Pointer:
    """Addresses of elements of a tensor."""

    def __init__(self, values: np.ndarray, at: Any = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, steps: Any) -> Pointer:
        return Pointer(self.values, self.at + steps)


class Descriptor:
    """A tensor map."""

    def __init__(self, given: Any) -> None:
        whole = given.base.detach()
        flat = torch.empty(0, dtype=whole.dtype).set_(whole.untyped_storage())[whole.storage_offset() :].numpy()
        steps = [stride * flat.itemsize for stride in given.strides]
        self.view = np.lib.stride_tricks.as_strided(flat, given.shape, steps)
        self.block, self.dtype, self.layout = given.block_shape, HALF, "tiles"

    def inside(self, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of a box at `at` is inside the tensor: there, and in the box."""
        there, here = [], []
        for first, size, most in zip(at, self.block, self.view.shape, strict=True):
            start, end = max(first, 0), max(min(first + size, most), max(first, 0))
            there.append(slice(start, end))
            here.append(slice(start - first, end - first))
        return tuple(there), tuple(here)


class Barrier:
    """An mbarrier: arrivals, and bytes that are to come."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0

    def settle(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phase, self.left = self.phase ^ 1, self.count


class Barriers:
    """Those of a ring."""

    def __init__(self, shape: list[int]) -> None:
        self.shape, self.all = shape, [Barrier() for _ in range(shape[0])]

    def index(self, i: int) -> Barrier:
        return self.all[i]


class Product:
    """One that was issued, and is computed when it is waited for."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc, self.value = a, b, acc, use_acc, None

    def compute(self) -> None:
        a = self.a.values if isinstance(self.a, Shared) else self.a
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        product = np.asarray(a, np.float32) @ np.asarray(self.b.values, np.float32)
        self.value = tile(product + acc if self.use_acc else product)


class Machine:
    """The programs of one launch, and the copy engine."""

    def __init__(self, programs: int, seed: int) -> None:
        self.programs, self.draw = programs, random.Random(seed)
        self.changed = threading.Condition()
        self.copies: list[Any] = []
        self.failed: list[BaseException] = []
        self.done = False
        self.own = threading.local()

    def wait(self, ready: Any) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: ready() or self.failed, PATIENCE) or self.failed:
                raise RuntimeError("a role waits for good")

    def change(self, make: Any) -> Any:
        with self.changed:
            made = make()
            self.changed.notify_all()
            return made

    def copy_engine(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.copies or self.done)
                if not self.copies:
                    return
                self.copies.pop(self.draw.randrange(len(self.copies)))()
                self.changed.notify_all()

    def thread(self, program: int, shared: Any, function: Any, args: tuple[Any, ...]) -> threading.Thread:
        def work() -> None:
            vars(self.own).update(program=program, shared=shared, products=[], stores=[])
            try:
                with np.errstate(all="ignore"):  # of a thread's own
                    function(*args)
            except BaseException as failure:  # to be raised where the launch was made
                self.failed.append(failure)
                self.change(lambda: None)

        return threading.Thread(target=work, daemon=True)

    # ---- what kernels call -----------------------------------------------------------------------------------------

    def warp_specialize(self, roles: list[Any], warps: list[int], registers: list[int]) -> None:
        names = self.names
        shared = SimpleNamespace(turns={})
        threads = [self.thread(self.own.program, shared, names[f.__name__], args) for f, args in roles]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    def allocate(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        if layout == "barriers":
            return Barriers(shape)
        assert all(size & (size - 1) == 0 for size in shape[1:]), shape
        return Shared(np.full(shape, 7777, np.int32) if dtype == "int32" else np.full(shape, np.nan, np.float16))

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.left = count

    def arrive(self, barrier: Barrier, count: int) -> None:
        def make() -> None:
            barrier.left -= count
            assert barrier.left >= 0
            barrier.settle()

        self.change(make)

    def expect(self, barrier: Barrier, size: int) -> None:
        def make() -> None:
            barrier.bytes += size
            barrier.left -= 1
            assert barrier.left >= 0
            barrier.settle()

        self.change(make)

    def load_tile(self, desc: Descriptor, at: list[int], barrier: Barrier, memory: Shared) -> None:
        assert tuple(memory.shape) == tuple(desc.block), (memory.shape, desc.block)

        def make() -> None:
            there, here = desc.inside(at)
            memory.values[...] = 0
            memory.values[here] = desc.view[there]
            barrier.bytes -= memory.values.nbytes
            assert barrier.bytes >= 0
            barrier.settle()

        memory.values[...] = np.nan
        self.change(lambda: self.copies.append(make))

    def store_tile(self, desc: Descriptor, at: list[int], memory: Shared) -> None:
        assert tuple(memory.shape) == tuple(desc.block)
        stores = self.own.stores
        stores.append(False)  # whether it is done
        number = len(stores) - 1

        def make() -> None:
            there, here = desc.inside(at)
            desc.view[there] = memory.values[here]
            stores[number] = True

        self.change(lambda: self.copies.append(make))

    def store_wait(self, left: int) -> None:
        earlier = len(self.own.stores) - left
        stores = self.own.stores
        self.wait(lambda: all(stores[: max(0, earlier)]))

    def product(self, a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        made = Product(a, b, acc, use_acc)
        self.own.products.append(made)
        return made

    def product_wait(self, left: int, deps: list[Any]) -> Any:
        products = self.own.products
        while len(products) > left:
            products.pop(0).compute()
        results = tuple(dep.value if isinstance(dep, Product) else dep for dep in deps)
        assert all(result is not None for result in results), "a product is used before it is waited for"
        return results[0] if len(results) == 1 else results

    def assembly(self, code: str, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
        named = re.match(r"bar\.(sync|arrive) (\d+), 256;", code)
        if named is None:
            assert code.startswith(("mov", "cp.async.bulk.wait_group 0"))
            if not code.startswith("mov"):
                self.store_wait(0)
            return args[0]
        action, which, turns = named[1], int(named[2]), self.own.shared.turns
        if action == "arrive":
            self.change(lambda: turns.update({which: turns.get(which, 0) + 1}))
            assert turns[which] <= 1
        else:
            self.wait(lambda: turns.get(which, 0) > 0)
            self.change(lambda: turns.update({which: turns[which] - 1}))
        return args[0]

    def atomic_add(self, pointer: Pointer, x: int, sem: str | None = None) -> Any:
        def make() -> Any:
            before = pointer.values[pointer.at]
            pointer.values[pointer.at] += x
            return np.asarray(before).view(Tile)

        return self.change(make)

    def load(self, pointer: Pointer, volatile: bool = False) -> Any:
        value = pointer.values[pointer.at]
        return np.asarray(value).view(Tile) if value.dtype.kind == "f" or volatile else int(value)

    def store(self, pointer: Pointer, x: Any, mask: Any = True) -> None:
        at, x, mask = np.broadcast_arrays(pointer.at, x, mask)
        pointer.values[at[mask]] = x[mask]


def language(machine: Machine) -> SimpleNamespace:
    """`tl` and `gl` in one."""

    def where(condition: Any, a: Any, b: Any) -> Any:
        return tile(np.where(condition, a, b)) if np.ndim(condition) else (a if condition else b)

    def elementwise(function: Any) -> Any:
        return lambda *xs, **_: tile(function(*xs))

    half = elementwise(lambda x: np.float32(1.0) / np.sqrt(x, dtype=np.float32))
    return SimpleNamespace(
        where=where, minimum=elementwise(np.minimum), maximum=elementwise(np.fmax), abs=elementwise(np.abs),
        exp2=elementwise(np.exp2), log2=elementwise(np.log2), rsqrt=half, clamp=elementwise(np.clip),
        max=elementwise(np.max), sum=elementwise(np.sum), cast=lambda x, dtype: x, PropagateNan=SimpleNamespace(ALL=1),
        full=lambda shape, value, dtype, layout: np.full(shape, value, NUMPY[dtype]).view(Tile),
        arange=lambda start, end, layout=None: np.arange(start, end).view(Tile),
        convert_layout=lambda x, layout: x, SliceLayout=lambda *_: None, BlockedLayout=lambda *_: None,
        DotOperandLayout=lambda **_: None, SwizzledSharedLayout=lambda *_: "words", constexpr=lambda x: x,
        static_range=range, float32=np.float32, int32="int32", int64=np.int64,
        program_id=lambda axis: machine.own.program, num_programs=lambda axis: machine.programs,
        inline_asm_elementwise=machine.assembly, atomic_add=machine.atomic_add, load=machine.load, store=machine.store,
        allocate_shared_memory=machine.allocate, warp_specialize=machine.warp_specialize,
    )  # fmt: skip


def names(machine: Machine) -> dict[str, Any]:
    """The kernels' functions as Python's, and what they call."""
    spoken = language(machine)
    given: dict[str, Any] = {
        "gl": spoken, "tl": spoken, "range": range, "min": min, "fence_async_shared": lambda: None,
        "tma": SimpleNamespace(store_wait=machine.store_wait),
        "mbarrier": SimpleNamespace(
            init=machine.init, arrive=machine.arrive, expect=machine.expect, MBarrierLayout=lambda: "barriers",
            wait=lambda barrier, parity: machine.wait(lambda: barrier.phase != parity),
        ),
        "load_tile": machine.load_tile, "store_tile": machine.store_tile, "warpgroup_mma": machine.product,
        "warpgroup_mma_wait": machine.product_wait, "ROWS": 64, "TURNS": 8,
        "product_layout": lambda columns: None, "_rows_layout": lambda columns: None,
        "_barrier_code": lambda *a: "bar.{} {}, {};".format(*a),
        "Ring": rings.Ring, "Visits": scheduler.Visits, "Sequence": scheduler.Sequence,
    }  # fmt: skip
    for name, value in FOUND.items():
        if name not in given:
            given[name] = FunctionType(value.__code__, given, name, value.__defaults__) if callable(value) else value
    return given


class Emulated:
    """In the place of the kernel: launched as Triton's own, it runs its programs, all at once."""

    def __init__(self, seed: int = 0) -> None:
        self.seed, self.launches = seed, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(*given: Any, num_warps: int, **options: Any) -> None:
            self.launches += 1
            machine = Machine(grid[0], self.seed + self.launches)
            machine.names = names(machine)
            kernel = machine.names["hopper_forward_kernel"]
            args = [self.as_seen(x) for x in given]
            engine = threading.Thread(target=machine.copy_engine, daemon=True)
            threads = [
                machine.thread(program, None, lambda: kernel(*args, **options), ()) for program in range(grid[0])
            ]
            for each in (engine, *threads):
                each.start()
            for each in threads:
                each.join()
            machine.change(lambda: setattr(machine, "done", True))
            engine.join()
            if machine.failed:
                raise machine.failed[0]

        return start

    @staticmethod
    def as_seen(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())[x.storage_offset() :]
            return Pointer(flat.numpy())
        return Descriptor(x) if hasattr(x, "block_shape") else x
