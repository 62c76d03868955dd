"""The choice of tiles. Attention: every device gets one that fits it, and lengths play no part.

Rows: shared without a gap, and by tables of legal configs, the user's first, whatever the number of rows.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

pytest.importorskip("triton")

import flashsoft
from flashsoft import env
from flashsoft.tuning import attention as tuning
from flashsoft.tuning import rows, tables
from flashsoft.tuning.rows import BACKWARD, FORWARD, RowConfig, row_config

KIB = 1024
# shared memory of a program: sm_86, sm_89 and sm_120 have 99 KiB, sm_80 has 163, sm_90 and sm_100 have 227
LIMITS = (99 * KIB, 163 * KIB, 227 * KIB)


@pytest.mark.parametrize(("hopper", "limit"), [*((False, limit) for limit in LIMITS), (True, LIMITS[-1])])
@pytest.mark.parametrize("kind", get_args(tuning.Kind))
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    ("D", "Dv"),
    [(1, 1), (16, 64), (64, 64), (80, 128), (128, 128), (192, 128), (256, 256), (40, 256), (320, 300), (576, 512)],
)
def test_a_tile_that_fits_is_chosen(
    D: int, Dv: int, itemsize: int, kind: tuning.Kind, hopper: bool, limit: int
) -> None:
    forward, backward = tuning._choose(D, Dv, itemsize, kind, tuning.Device(hopper, limit))
    row_bytes = tuning.padded(D, Dv) * itemsize
    if itemsize == 4 and max(D, Dv) > 256 and limit == LIMITS[0]:  # not even the smallest does: it is tried then
        assert all((t.block_m, t.block_n, t.num_stages) == (16, 16, 1) for t in (backward.keys, backward.queries))
        return
    assert tuning.legal(forward, forward.block_m // 2, forward.block_n, row_bytes, limit)
    # what is streamed is there twice for TF32, and wide rows in 16 bits are as well
    more = 1.5 if (itemsize == 4) == (max(D, Dv) <= 256) else 1
    keys, queries = backward.keys, backward.queries
    assert tuning.legal(keys, keys.block_n, int(more * keys.block_m), row_bytes, limit)
    assert tuning.legal(queries, queries.block_m, int(more * queries.block_n), row_bytes, limit)


def test_measured_tiles_are_used_on_the_device_they_were_measured_on() -> None:
    tables = {"masked": tuning.HOPPER_MASKED, "scored": tuning.HOPPER_SCORED, "mixed": tuning.HOPPER_MIXED}
    for kind in get_args(tuning.Kind):
        ladders = tables.get(kind, {}).get((2, 128), tuning.HOPPER[2, 128])
        forward, backward = tuning._choose(128, 128, 2, kind, tuning.Device(hopper=True, shared_memory=227 * KIB))
        assert (forward, backward.keys, backward.queries) == (ladders.forward[0], ladders.keys[0], ladders.queries[0])


def test_what_is_not_legal() -> None:
    tile = tuning.TileConfig(64, 64, 4, 2)
    assert tuning.legal(tile, 64, 64, 256, 64 * KIB)
    assert not tuning.legal(tile, 64, 64, 256, 49 * KIB)  # 3 * 64 rows of 256 bytes leave no scratch
    assert not tuning.legal(tuning.TileConfig(48, 64, 4, 1), 48, 64, 256, 227 * KIB)
    assert not tuning.legal(tuning.TileConfig(8, 64, 4, 1), 8, 64, 256, 227 * KIB)


def test_a_heads_columns_are_one_power_of_two_or_two_and_pad_little() -> None:
    for head_dim in range(1, 577):
        parts, whole = tuning.columns(head_dim), max(16, 1 << (head_dim - 1).bit_length())
        assert all(part >= 16 and part & (part - 1) == 0 for part in parts) and list(parts) == sorted(parts)[::-1]
        assert parts == (whole,) or (len(parts) == 2 and sum(parts) < whole)
        assert 0 <= sum(parts) - head_dim < max(16, head_dim / 3) and tuning.padded(head_dim, head_dim) == 2 * sum(
            parts
        )


def test_values_are_not_laid_out_narrower_than_keys() -> None:
    for D in range(1, 577, 5):
        for Dv in range(1, 513, 3):
            keys, values = tuning.columns(D), tuning.value_columns(D, Dv)
            assert sum(values) >= Dv and (Dv < D or values == tuning.columns(Dv))
            assert Dv >= D or all(min(64, key) <= value for key, value in zip(keys, values, strict=False))


def test_chains_of_products_are_short() -> None:
    for head_dim in range(1, 577):
        parts, whole = tuning.columns(head_dim, chained=True), max(16, 1 << (head_dim - 1).bit_length())
        assert all(part >= 16 and part & (part - 1) == 0 for part in parts)
        assert len(set(parts[:-1])) <= 1 and parts[-1] <= parts[0] <= min(128, max(16, whole // 2))
        assert sum(parts) == sum(tuning.columns(head_dim))


def test_registers_are_limited_only_where_a_tile_says_so() -> None:
    assert tuning.TileConfig(64, 64, 4, 2).launch_options() == {"num_warps": 4}
    assert tuning.TileConfig(64, 64, 4, 2, registers=168).launch_options() == {"num_warps": 4, "maxnreg": 168}
    for ladders in (
        *tuning.HOPPER.values(),
        *tuning.HOPPER_MASKED.values(),
        *tuning.HOPPER_SCORED.values(),
        *tuning.HOPPER_MIXED.values(),
        *tuning.PORTABLE.values(),
    ):
        for tile in (*ladders.forward, *ladders.keys, *ladders.queries):
            # a thread has 255 at most, and a program's threads share 65,536
            assert tile.registers is None or (32 <= tile.registers <= 255 and tile.registers % 8 == 0)


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


# ---- rows: configs and parts -----------------------------------------------------------------------------------

H200 = rows.Device("sm_90", 132)
UNMEASURED = rows.Device("sm_00", 20)
SHIPPED = sorted(tables.SHIPPED.glob("*.json"))
OPS_AND_SIZES = list(itertools.product((FORWARD, BACKWARD), (2, 4)))


def around(*lengths: int) -> list[int]:
    return sorted({n + off for n in lengths for off in (-1, 0, 1) if n + off > 0})


@pytest.mark.parametrize(
    "config",
    [
        RowConfig(4, 512, 4),
        RowConfig(1, 4096, 16),
        RowConfig(1, 1024, 4, 5),
        RowConfig(1, 64, 1, 1, 3),
        RowConfig(1, 32, 1, 3, 5),
        RowConfig(1, 256, 4, 2, 4),
        RowConfig(1, 4096, 4, 2, 64, 56),
        RowConfig(1, 8192, 8, 1, 14),
    ],
    ids=str,
)
def test_parts_cover_a_row_exactly_once(config: RowConfig) -> None:
    held = config.block_cols * config.tiles
    for n in around(1, 63, 64, 1000, 50257, 1 << 21, *(held * k for k in range(1, config.max_parts + 3))):
        share = rows.parts(config, n)
        begins = [part * share.cols for part in range(share.count)]
        assert 1 <= share.count <= config.max_parts
        assert all(begin % rows.PART_UNIT == 0 for begin in begins)
        assert begins[-1] < n <= begins[-1] + share.cols  # none is empty, the last one ends the row
        assert share.whole == (share.cols <= held)
        if n <= held:
            assert share == rows.Parts(1, n, True)
        elif n <= held * config.max_parts and held % rows.PART_UNIT == 0:
            assert share.whole


@pytest.mark.parametrize("rows_inner", [False, True])
@pytest.mark.parametrize(("op", "itemsize"), OPS_AND_SIZES)
def test_every_length_gets_a_legal_config(op: str, itemsize: int, rows_inner: bool) -> None:
    for on in (H200, UNMEASURED, rows.Device("interpreter", 1)):
        for n in around(*(1 << k for k in range(31)), 50257, 128256, 1 << 41):
            config = row_config(op, n, itemsize, rows_inner, on)
            assert rows.legal(config, op, itemsize), (n, config)
            assert on.name == "interpreter" or config.max_parts <= on.multiprocessors


@pytest.mark.parametrize(
    "config",
    [
        RowConfig(3, 64, 4),
        RowConfig(1, 96, 4),
        RowConfig(0, 64, 4),
        RowConfig(1, 64, 3),
        RowConfig(1, 64, 64),
        RowConfig(1, 64, 4, 0),
        RowConfig(2, 64, 4, 1, 2),  # programs share single rows
        RowConfig(1, 32, 4, 1, 2),  # parts are of 64 columns or more
        RowConfig(1, 64, 4, 1, 0),
        RowConfig(1, 64, 4, 1, 65),
        RowConfig(1, 64, 4, 1, 1, 8),
        RowConfig(1, 16384, 2),  # 256 elements a thread
        RowConfig(1, 1 << 17, 32),
    ],
    ids=str,
)
def test_what_is_not_a_legal_row_config(config: RowConfig) -> None:
    assert not rows.legal(config, FORWARD, 2)


def test_a_backward_holds_two_tiles() -> None:
    config = RowConfig(1, 8192, 4)
    assert rows.legal(config, FORWARD, 4) and rows.legal(config, BACKWARD, 2) and not rows.legal(config, BACKWARD, 4)


@pytest.mark.parametrize("n", [300, 1100])  # whole and, in the interpreter too, shared
def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows(n: int, backend: str, device: torch.device) -> None:
    x = torch.randn(7, n, device=device)
    together = flashsoft.softmax(x, backend=backend)
    for count in (1, 4):
        assert torch.equal(flashsoft.softmax(x[:count], backend=backend), together[:count])


# ---- rows: tables ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_entries_of_shipped_tables_are_legal_and_lie_side_by_side(path: Path) -> None:
    table = json.loads(path.read_text())
    assert set(table["measured"]) == {"device", "torch", "triton", "date"}
    assert tables._entries(path) == table["entries"] != []
    assert path.read_text() == tables.dump(table["measured"], table["entries"])
    for op, itemsize in OPS_AND_SIZES:
        entries = [entry for entry in table["entries"] if (entry["op"], entry["itemsize"]) == (op, itemsize)]
        assert entries and all(rows._usable(entry) for entry in entries)
        for entry in entries:
            assert entry["first"] <= entry["last"]
        for one, following in itertools.pairwise(entries):
            assert following["first"] == one["last"] + 1
    assert {(entry["op"], entry["itemsize"]) for entry in table["entries"]} == set(OPS_AND_SIZES)


def test_a_table_is_shipped() -> None:
    assert [path.stem for path in SHIPPED] == ["sm_90"]


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the user's table for an sm_90 would be; the folder is not there yet."""
    monkeypatch.setattr(env, "TUNING", tmp_path / "absent" / "tuning")
    tables.forget()
    yield tmp_path / "absent" / "tuning" / "sm_90.json"
    tables.forget()


MINE = {"block_rows": 1, "block_cols": 2048, "num_warps": 8}
FACTS = {"device": "mine"}


def entry_of(n: int, config: Any = None, **changed: Any) -> dict[str, Any]:
    return {"op": FORWARD, "itemsize": 2, "first": n, "last": n, "config": config or MINE, **changed}


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    tables.forget()


def test_the_users_entry_comes_before_the_shipped_one(user: Path) -> None:
    shipped = row_config(FORWARD, 50257, 2, False, H200)
    assert not user.parent.exists()
    assert tables.write("sm_90", [entry_of(50257)], FACTS) == user
    assert row_config(FORWARD, 50257, 2, False, H200) == RowConfig(**MINE) != shipped
    for other in (
        row_config(FORWARD, 50258, 2, False, H200),
        row_config(FORWARD, 50257, 4, False, H200),
        row_config(BACKWARD, 50257, 2, False, H200),
        row_config(FORWARD, 50257, 2, True, H200),
        row_config(FORWARD, 50257, 2, False, UNMEASURED),
    ):
        assert other != RowConfig(**MINE)


def test_writing_replaces_the_same_rows_and_keeps_others(user: Path) -> None:
    tables.write("sm_90", [entry_of(1000), entry_of(1001)], FACTS)
    other = dict(MINE, num_warps=4)
    tables.write("sm_90", [entry_of(1001, other)], FACTS)
    assert row_config(FORWARD, 1000, 2, False, H200).num_warps == 8
    assert row_config(FORWARD, 1001, 2, False, H200).num_warps == 4
    assert json.loads(user.read_text()) == {"measured": FACTS, "entries": [entry_of(1000), entry_of(1001, other)]}
    assert [path.name for path in user.parent.iterdir()] == ["sm_90.json"]


def test_writing_sees_what_another_process_wrote(user: Path) -> None:
    assert row_config(FORWARD, 1000, 2, False, H200) != RowConfig(**MINE)
    user.parent.mkdir(parents=True)
    user.write_text(tables.dump(FACTS, [entry_of(1000)]))
    tables.write("sm_90", [entry_of(1001)], FACTS)
    assert row_config(FORWARD, 1000, 2, False, H200) == row_config(FORWARD, 1001, 2, False, H200) == RowConfig(**MINE)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"measured": {}}', '{"entries": 3}', "\udcff"])
def test_a_file_that_is_no_table_is_told_once_and_not_used(
    text: str, user: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = row_config(FORWARD, 1000, 2, False, H200)
    user.parent.mkdir(parents=True)
    user.write_bytes(text.encode(errors="surrogateescape"))
    tables.forget()
    with caplog.at_level(logging.WARNING, "flashsoft"):
        assert row_config(FORWARD, 1000, 2, False, H200) == shipped
        row_config(FORWARD, 1001, 2, False, H200)
    assert caplog.text.count("is not a table of flashsoft's") == 1 and str(user) in caplog.text
    tables.write("sm_90", [entry_of(1000)], FACTS)
    assert row_config(FORWARD, 1000, 2, False, H200) == RowConfig(**MINE)


@pytest.mark.parametrize("kind", ["folder", "in a file"])
def test_a_file_that_cannot_be_read_is_not_used(kind: str, user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = row_config(FORWARD, 1000, 2, False, H200)
    if kind == "folder":
        user.mkdir(parents=True)
    else:
        user.parent.parent.mkdir()
        user.parent.write_text("")
    tables.forget()
    assert row_config(FORWARD, 1000, 2, False, H200) == shipped


@pytest.mark.parametrize(
    "wrong",
    [7, None, "op", [], {}, entry_of(1000, first="1000"), entry_of(1000, op=["a"]), entry_of(1000, last=None),
     entry_of(1000, config=[1])],
    ids=str,
)  # fmt: skip
def test_what_is_no_entry_is_told_and_the_others_are_used(
    wrong: Any, user: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = row_config(FORWARD, 1000, 2, False, H200)
    put(user, tables.dump(FACTS, [wrong, entry_of(1001)]))
    with caplog.at_level(logging.WARNING, "flashsoft"):
        assert row_config(FORWARD, 1000, 2, False, H200) == shipped
        assert row_config(FORWARD, 1001, 2, False, H200) == RowConfig(**MINE)
    assert caplog.text.count("1 of its entries are not flashsoft's") == 1


@pytest.mark.parametrize(
    "config",
    [
        {"block_rows": 1, "block_cols": 2048},
        dict(MINE, stages=3),
        dict(MINE, num_warps=3),
        dict(MINE, num_warps="8"),
        dict(MINE, num_warps=8.0),
        dict(MINE, num_warps=None),
        dict(MINE, block_cols=1 << 20),
        dict(MINE, max_parts=1000),
    ],
    ids=str,
)
def test_a_config_that_is_not_legal_is_told_once_and_passed_over(
    config: Any, user: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = row_config(FORWARD, 1000, 2, False, H200)
    put(user, tables.dump(FACTS, [entry_of(1000, config)]))
    with caplog.at_level(logging.WARNING, "flashsoft"):
        for _ in range(3):
            assert row_config(FORWARD, 1000, 2, False, H200) == shipped
    assert caplog.text.count("no kernel can be built with") == 1


def test_a_smaller_device_of_the_same_kind_shares_rows_among_fewer() -> None:
    assert row_config(FORWARD, 128256, 2, False, H200).max_parts == rows.MAX_PARTS
    assert row_config(FORWARD, 128256, 2, False, rows.Device("sm_90", 16)).max_parts == 4
