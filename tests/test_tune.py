"""`flashsoft tune`: the candidates and the choice among them, what a trial refuses, what is written, and then used."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from conftest import INTERPRETED

from flashsoft import cli, env
from flashsoft.cli import tune
from flashsoft.tuning import rows, search, tables
from flashsoft.tuning.rows import BACKWARD, FORWARD, RowConfig, row_config
from flashsoft.tuning.timing import Timing

if INTERPRETED or torch.cuda.is_available():
    from flashsoft.cli import trial
else:
    pytest.skip("TRITON_INTERPRET is not 1 and there is no GPU", allow_module_level=True)

H200 = rows.Device("sm_90", 132)
CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")


@pytest.fixture
def tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for the user's tables."""
    monkeypatch.setattr(env, "TUNING", tmp_path / "tuning")
    tables.forget()
    yield tmp_path / "tuning"
    tables.forget()


class FakeClock:
    """Runs every call once; each candidate takes `ms(its text)` a call, a copy 2 ms."""

    def __init__(self, ms: Callable[[str], float]) -> None:
        self.ms = ms

    def measure(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Timing]:
        for call in calls.values():
            call()
        return {name: Timing("events", [2.0 if name == "copy" else self.ms(name)] * 5) for name in calls}


def straight(items: Any) -> Any:
    return items


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six candidates, for the interpreter's sake."""
    every = search.candidates
    monkeypatch.setattr(search, "candidates", lambda *given: every(*given)[:6])


# ---- candidates and the choice -------------------------------------------------------------------------------


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
def test_candidates_are_legal_varied_and_few(op: str, itemsize: int) -> None:
    for n in (
        1,
        2,
        63,
        100,
        128,
        1000,
        1024,
        1025,
        4096,
        5000,
        8192,
        9216,
        16384,
        20000,
        32000,
        50257,
        65537,
        128256,
        262144,
        1 << 21,
    ):
        present = row_config(op, n, itemsize, False, H200)
        found = search.candidates(op, n, itemsize, rows.MAX_PARTS, present)
        assert found[0] == present and len(set(found)) == len(found)
        assert 9 <= len(found) <= 25, (n, len(found))
        assert all(rows.legal(config, op, itemsize) for config in found)
        if n in (5000, 9216) and itemsize == 2:  # in three tiles, which are the fastest there on an H200
            assert present.tiles == 3 and present in search.candidates(op, n, itemsize, 32, RowConfig(1, 16384, 16))
        assert len({config.num_warps for config in found}) >= 3
        if n >= 32000:
            assert sum(rows.parts(config, n).count > 1 for config in found) >= 5
        if 4096 <= n <= 16384:  # both ways
            assert len({rows.parts(config, n).count > 1 for config in found}) == 2


def test_rows_are_shared_by_no_more_programs_than_the_device_runs() -> None:
    small = rows.Device("sm_90", 14)
    found = search.candidates(FORWARD, 128256, 2, rows.most_parts(small), row_config(FORWARD, 128256, 2, False, small))
    assert max(config.max_parts for config in found) == rows.most_parts(small) == 3


def test_the_present_choice_stays_unless_another_is_faster_by_more_than_runs_differ() -> None:
    present, other, third = RowConfig(1, 64, 1), RowConfig(1, 64, 2), RowConfig(1, 64, 4)

    def kept(now: list[float], then: float) -> RowConfig:
        timings = {present: Timing("graph", now), other: Timing("graph", [then] * 5), third: Timing("graph", [9.0] * 5)}
        return search.kept(timings, present)

    assert kept([1.0] * 5, 0.97) == other
    assert kept([1.0] * 5, 0.985) == present
    assert kept([1.0] * 5, 1.5) == present
    assert kept([0.9, 0.95, 1.0, 1.05, 1.1], 0.95) == present  # its own spread is 0.1
    assert search.kept({other: Timing("graph", [2.0] * 5), third: Timing("graph", [1.0] * 5)}, present) == third


# ---- a trial -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backward", [False, True])
def test_agree_takes_what_torch_gives_and_no_more(dtype: torch.dtype, backward: bool) -> None:
    x, dy = 3 * torch.randn(7, 3000, dtype=dtype), torch.randn(7, 3000, dtype=dtype)
    y = torch.softmax(x.double(), -1).to(dtype)
    inputs, result = (x,), y
    if backward:
        wide = y.double()
        inputs = (dy, y)
        result = (wide * (dy.double() - (wide * dy.double()).sum(-1, keepdim=True))).to(dtype)
    assert trial.agree(inputs, result)
    place = int(result[6].abs().argmax())
    for wrong in (float("nan"), float(result[6, place]) * (1 + 4 * torch.finfo(dtype).eps + 2e-4)):
        off = result.clone()
        off[6, place] = wrong
        assert not trial.agree(inputs, off), wrong
    shifted = result.roll(1, -1)
    assert not trial.agree(inputs, shifted)


def test_agree_looks_at_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "CHECKED", 64)
    x = torch.randn(9, 32)
    y = torch.softmax(x, -1)
    assert trial.agree((x,), y)
    for row in range(9):
        off = y.clone()
        off[row, 31] = 0.0
        assert not trial.agree((x,), off)


def test_memory_is_nan_within_and_as_before_after() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with trial.poisoned():
        assert torch.empty_like(torch.zeros(5)).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


@on_cpu
@pytest.mark.parametrize("direction", tune.DIRECTIONS)
def test_a_trial_checks_and_times_every_candidate_and_writes_the_best(
    direction: str, tuning: Path, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a fake")
    one = trial.Trial(direction, 3, 500, torch.bfloat16, CPU)
    fast = one.candidates[3]
    one.run(FakeClock(lambda name: 1.0 if name == str(fast) else 1.1), straight)
    assert list(one.timings) == one.candidates and one.kept == fast != one.present
    assert not rows._forced
    assert one.bytes == (3 if direction == "backward" else 2) * 3 * 500 * 2
    said = tune.report(one)
    assert "1.10 times as fast as the present choice" in said and str(fast) in said and "left out" not in said
    (row,) = (line.split() for line in said.splitlines() if line.endswith(f"best     {fast}"))
    assert row[0] == "1000.00"
    assert float(row[2]) == (3.0 if direction == "backward" else 2.0)  # a copy of 2 tensors takes 2 ms
    path = one.write()
    (entry,) = json.loads(path.read_text())["entries"]
    assert (entry["op"], entry["itemsize"], entry["first"], entry["last"]) == (one.op, 2, 500, 500)
    assert RowConfig(**entry["config"]) == fast
    path.rename(tuning / "sm_90.json")  # as if it had been measured on one
    tables.forget()
    assert row_config(one.op, 500, 2, False, H200) == fast
    assert row_config(one.op, 501, 2, False, H200) != fast


@on_cpu
def test_what_is_wrong_or_fails_cannot_win(
    few: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = trial.Trial("forward", 2, 300, torch.float32, CPU)
    wrong, broken, unwritten = one.candidates[1:4]
    softmax = trial.softmax_forward

    def flawed(x: Tensor, dtype: torch.dtype) -> Tensor:
        (config,) = rows._forced
        if config == broken:
            raise RuntimeError("out of registers")
        y = softmax(x, dtype)
        if config == unwritten:  # into memory that holds an earlier, right result unless it is poisoned
            fresh = torch.empty_like(y)
            return torch.where(fresh.isnan(), fresh, y)
        return y * 1.001 if config == wrong else y

    monkeypatch.setattr(trial, "softmax_forward", flawed)
    with caplog.at_level(logging.WARNING, "flashsoft"):
        one.run(FakeClock(lambda name: 1.0), straight)
    assert set(one.candidates) - set(one.timings) == {wrong, broken, unwritten}
    assert [str(config) in caplog.text for config in (wrong, broken, unwritten)] == [True] * 3
    assert "out of registers" in caplog.text
    said = tune.report(one)
    assert f"3 of {len(one.candidates)} candidates left out" in said and "The present choice stays" in said


@on_cpu
def test_no_candidate_right_is_a_failure(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trial.Trial("forward", 2, 300, torch.float32, CPU)
    monkeypatch.setattr(trial, "softmax_forward", lambda x, dtype: torch.zeros_like(x))
    one.run(FakeClock(lambda name: 1.0), straight)
    assert one.timings == {} and "FAILED" in tune.report(one)


# ---- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def clock(few: None, tuning: Path, monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The command runs on the CPU by this clock."""
    made = FakeClock(lambda name: 1.0)
    monkeypatch.setattr(tune, "pick_device", lambda: CPU)
    monkeypatch.setattr(tune, "Clock", lambda: made)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a fake")
    return made


@on_cpu
def test_the_command_tunes_every_shape_and_direction(
    clock: FakeClock, tuning: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", "softmax", "--shape", "3x40", "--shape", "2x50", "--dtype", "fp16"]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert said.count("The present choice stays") == 4 and "Nothing is written" in said
    assert "softmax forward, 3 x 40, fp16, a fake" in said and "softmax backward, 2 x 50, fp16, a fake" in said
    assert not list(tuning.iterdir())
    present = str(row_config(FORWARD, 50, 2, False, rows.device(-1)))
    clock.ms = lambda name: 2.0 if name == present else 1.0
    assert cli.main([*arguments, "--direction", "forward"]) == 0
    said = capsys.readouterr().out
    assert said.endswith(
        f"Written to {tuning / 'interpreter.json'}, which is used from now on, in new processes as well.\n"
    )
    entries = json.loads((tuning / "interpreter.json").read_text())["entries"]
    assert [(entry["op"], entry["first"], entry["itemsize"]) for entry in entries] == [
        (FORWARD, 40, 2),
        (FORWARD, 50, 2),
    ]


@on_cpu
def test_a_shape_beyond_memory_is_wrong_usage(clock: FakeClock, capsys: pytest.CaptureFixture[str]) -> None:
    def full(name: str) -> float:
        raise torch.OutOfMemoryError

    clock.ms = full
    assert cli.main(["tune", "softmax", "--shape", "1x40", "--dtype", "bf16"]) == 2
    assert "--shape must fit into the memory of cpu, got 1x40" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: operation, --shape, --dtype"),
        (["attention", "--shape", "2x3", "--dtype", "bf16"], "invalid choice: 'attention'"),
        (["softmax", "--shape", "2x3"], "required: --dtype"),
        (["softmax", "--shape", "2x3", "--dtype", "fp64"], "invalid choice: 'fp64'"),
        (["softmax", "--shape", "64*10", "--dtype", "bf16"], "--shape must be rows x columns, such as 64x128256"),
        (["softmax", "--shape", "0x10", "--dtype", "bf16"], "got '0x10'"),
        (["softmax", "--shape", "-2x-3", "--dtype", "bf16"], "expected one argument"),
        (["softmax", "--shape", "9999999x9999999", "--dtype", "bf16"], "at most 2^40 elements, got '9999999x9999999'"),
        (["softmax", "--shape", "1x9", "--shape", "2x9", "--dtype", "bf16"], "a row length once, got 1x9 and 2x9"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "softmax", "--shape", "2x30", "--dtype", "bf16"]) == 2
    assert capsys.readouterr().err == "flashsoft tune: no CUDA GPU here, and tiles can only be measured on one\n"


def test_a_folder_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(env, "TUNING", tmp_path / "file")
    with pytest.raises(cli.UsageError, match=r"FLASHSOFT_TUNING must be a folder, got .*file"):
        tune.require_folder()
    monkeypatch.setattr(env, "TUNING", tmp_path / "new" / "one")
    tune.require_folder()
    assert (tmp_path / "new" / "one").is_dir()


def test_progress_is_shown_to_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not installed
    for stderr, shown in ((io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert list(tune.progress("abc")) == ["a", "b", "c"]
        assert ("\r2 of 3" in stderr.getvalue()) == shown and bool(stderr.getvalue()) == shown


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_tuned_shapes_are_used_from_then_on(
    dtype: str, tuning: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the device: all candidates are built, checked and timed, a choice is written, and softmax runs by it."""
    import flashsoft

    monkeypatch.setattr(search, "LEAST_GAIN", -1e9)  # whatever is fastest beside the present choice is chosen
    kept = search.kept
    monkeypatch.setattr(search, "kept", lambda timings, now: kept({c: t for c, t in timings.items() if c != now}, now))
    assert cli.main(["tune", "softmax", "--shape", "5x20000", "--dtype", dtype]) == 0
    said = capsys.readouterr().out
    target = rows.device(torch.cuda.current_device())
    path = tuning / f"{target.name}.json"
    assert f"Written to {path}" in said and "left out" not in said
    entries = json.loads(path.read_text())["entries"]
    assert [entry["op"] for entry in entries] == [FORWARD, BACKWARD]
    for entry in entries:
        chosen = row_config(entry["op"], 20000, entry["itemsize"], False, target)
        assert chosen == RowConfig(**entry["config"])
    x = torch.randn(11, 20000, device="cuda", dtype=tune.DTYPES[dtype], requires_grad=True)
    y = flashsoft.softmax(x)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert trial.agree((x.detach(),), y.detach()) and trial.agree((dy, y.detach()), dx)
