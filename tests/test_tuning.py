"""The choice of attention tiles: every device gets one that fits it, and lengths play no part."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from flashsoft.tuning import attention as tuning

KIB = 1024
# shared memory of a program: sm_86, sm_89 and sm_120 have 99 KiB, sm_80 has 163, sm_90 and sm_100 have 227
LIMITS = (99 * KIB, 163 * KIB, 227 * KIB)


@pytest.mark.parametrize(("hopper", "limit"), [*((False, limit) for limit in LIMITS), (True, LIMITS[-1])])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    ("D", "Dv"), [(1, 1), (16, 64), (64, 64), (80, 128), (128, 128), (192, 128), (256, 256), (40, 256)]
)
def test_a_tile_that_fits_is_chosen(D: int, Dv: int, itemsize: int, hopper: bool, limit: int) -> None:
    forward, backward = tuning._choose(D, Dv, itemsize, tuning.Device(hopper, limit))
    row_bytes = (tuning.padded(D) + tuning.padded(Dv)) * itemsize
    assert tuning.legal(forward, forward.block_m // 2, forward.block_n, row_bytes, limit)
    assert tuning.legal(backward.keys, backward.keys.block_n, backward.keys.block_m, row_bytes, limit)
    assert tuning.legal(backward.queries, backward.queries.block_m, backward.queries.block_n, row_bytes, limit)


def test_measured_tiles_are_used_on_the_device_they_were_measured_on() -> None:
    forward, backward = tuning._choose(128, 128, 2, tuning.Device(hopper=True, shared_memory=227 * KIB))
    ladders = tuning.HOPPER[2, 128]
    assert (forward, backward.keys, backward.queries) == (ladders.forward[0], ladders.keys[0], ladders.queries[0])


def test_what_is_not_legal() -> None:
    tile = tuning.TileConfig(64, 64, 4, 2)
    assert tuning.legal(tile, 64, 64, 256, 64 * KIB)
    assert not tuning.legal(tile, 64, 64, 256, 49 * KIB)  # 3 * 64 rows of 256 bytes leave no scratch
    assert not tuning.legal(tuning.TileConfig(48, 64, 4, 1), 48, 64, 256, 227 * KIB)
    assert not tuning.legal(tuning.TileConfig(8, 64, 4, 1), 8, 64, 256, 227 * KIB)


@pytest.mark.parametrize("head_dim", [1, 15, 16, 17, 64, 96, 129, 256])
def test_padding_is_the_next_power_of_two(head_dim: int) -> None:
    columns = tuning.padded(head_dim)
    assert columns >= max(16, head_dim) and columns & (columns - 1) == 0 and columns < max(32, 2 * head_dim)


@pytest.mark.parametrize("setting", ["old", "new"])
def test_tf32_is_used_only_where_torch_may(setting: str) -> None:
    assert tuning.input_precision(torch.float32) == "ieee"
    matmul = torch.backends.cuda.matmul
    try:
        if setting == "old":
            torch.set_float32_matmul_precision("high")
        else:
            matmul.fp32_precision = "tf32"
        assert tuning.input_precision(torch.float32) == "tf32"
        assert tuning.input_precision(torch.bfloat16) == "ieee"  # of no effect on products of 16 bits
    finally:
        if setting == "old":
            torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = "none"
