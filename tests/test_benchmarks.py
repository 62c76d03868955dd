"""Benchmarks run on a CPU in a dry run: right results, a row for what fails, no claim about time; tables and plots."""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import flashsoft
from flashsoft import dispatch
from flashsoft.cli import UsageError
from flashsoft.tuning import timing

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
BF16 = 2.0**-8  # half an ulp at 1 is 2^-9: one rounding of a result below 1, one of a weight
HEADS = ("peers", "date", "device", "torch", "triton", "section", "M", "N", "dtype", "direction", "provider",
         "median_ms", "rate", "unit", "ratio", "roof_share")  # fmt: skip


def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "BENCH_FA3_LIB")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def module(name: str) -> ModuleType:
    """A file of the folder, as one of its scripts would import it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module(name)


def asked(**changed: object) -> argparse.Namespace:
    return argparse.Namespace(**({"only": [], "peers": None, "quick": False, "dry": True} | changed))


@pytest.mark.parametrize(
    ("name", "cases", "bound", "peers"),
    [
        ("softmax", 28, BF16, "torch,naive,liger,quack"),
        ("logits", 24, 1e-6, "eager"),
        ("cross_entropy", 7, 1e-6, "torch,liger,quack"),
        ("attention", 10, 8 * BF16, "sdpa_flash,sdpa_cudnn,fa3"),  # gradients on 20 keys stay below 8
        ("attention_terms", 24, None, "plain"),
        ("host", 2, None, "torch,compile"),
    ],
)
def test_dry_run(name: str, cases: int, bound: float | None, peers: str, tmp_path: Path) -> None:
    done = run(name, "--dry", "--out", str(tmp_path), "--peers", peers)
    assert done.returncode == 0, done.stderr + done.stdout
    with (tmp_path / f"{name}-dry.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    own = [row for row in rows if row["provider"] == "flashsoft"]
    assert len(own) == cases
    for row in own:
        assert not row["error"]
        assert row["torch"] and row["date"] and row["device"] == "cpu"
        if bound is not None and row["max_error"]:
            assert 0 <= float(row["rms_error"]) <= float(row["max_error"]) < bound
        assert not any(row[key] for key in ("median_ms", "p20_ms", "p80_ms", "rate", "ratio", "roof_share"))
    assert bound is None or any(row["max_error"] for row in own)
    if name == "attention":
        # cuDNN is not on the CPU: each of its cells says so, and the sweep went on
        missing = [row["error"] for row in rows if row["provider"] == "sdpa_cudnn"]
        assert len(missing) == 8 and all(missing)  # neither under a window nor packed
        assert {row["section"] for row in own} == {"attention", "gqa", "window", "mla", "varlen"}
        if importlib.util.find_spec("flash_attn_3") is None:
            assert "left out: fa3, No module named" in done.stdout
            assert "fa3" not in {row["provider"] for row in rows}
        assert all(row["max_error"] for row in own)
    if name == "softmax":
        assert {row["direction"] for row in own} == {"forward", "backward"}
        assert {row["section"] for row in own} == {"softmax", "few_rows", "neighbours"}
        for peer, package in (("liger", "liger_kernel"), ("quack", "quack")):
            if importlib.util.find_spec(package) is None:
                assert f"left out: {peer}, No module named" in done.stdout
                assert peer not in {row["provider"] for row in rows}
    for peer in {"torch", "compile", "naive", "eager"} & set(peers.split(",")):
        assert {row["error"] for row in rows if row["provider"] == peer} == {""}
    assert f"**{own[0]['section']}**" in done.stdout


def test_without_a_gpu_it_says_so() -> None:
    done = run("softmax", "--only", "N=128")
    assert done.returncode == 2 and "--dry" in done.stderr


def test_options_choose_cases_and_peers(tmp_path: Path) -> None:
    harness, softmax = module("harness"), module("softmax")
    parser = argparse.ArgumentParser()
    softmax.add_arguments(parser)
    given = ["--dry", "--out", str(tmp_path), "--dtype", "bf16", "--only", "section=softmax,few_rows", "--peers"]
    args = parser.parse_args([*given, "torch,naive"])
    cases = softmax.BENCHMARK.chosen(args)
    assert {(case.section, case.columns["dtype"]) for case in cases} == {("softmax", "bf16"), ("few_rows", "bf16")}
    contenders = cases[0].build(torch.device("cpu"))
    assert list(harness.wanted(contenders, args.peers)) == ["flashsoft", "torch", "naive"]
    assert harness.call_once("softmax", args, 0) == 3
    with pytest.raises(UsageError, match="no case is left"):
        softmax.run(asked(only=[("M", {"7"})]))


def test_softmax_declares_the_shapes_it_is_judged_by() -> None:
    cases = list(module("softmax").every(asked(dry=False)))
    whole = {(case.columns["N"], case.columns["dtype"], case.columns["direction"])
             for case in cases if case.section == "softmax"}  # fmt: skip
    assert len(whole) == 10 * 2 * 2 and {N for N, _, _ in whole} >= {128, 128256, 262144}
    few = [case.columns for case in cases if case.section == "few_rows"]
    assert {(c["M"], c["N"]) for c in few} == {(1, 128256), (8, 128256), (64, 128256)}
    near = {(case.columns["N"], case.columns["stride"]) for case in cases if case.section == "neighbours"}
    assert len(near) == 5 * 4
    for N in (4096, 16384, 32768, 50257, 128256):
        assert {(N - 1, N - 1), (N, N), (N + 1, N + 1), (N, N + 1 + N % 2)} <= near


def test_attention_declares_the_shapes_it_is_judged_by() -> None:
    attention = module("attention")
    cases = list(attention.every(asked(dry=False)))
    whole = [case.columns for case in cases if case.section == "attention"]
    shapes = {(c["D"], c["causal"], c["S"], c["B"], c["H"], c["direction"]) for c in whole}
    assert len(shapes) == len(whole) == 3 * 2 * 6 * 2
    assert all(c["S"] * c["B"] == 16384 and c["D"] * c["H"] == 2048 for c in whole)
    others = [case for case in cases if case.section != "attention"]
    assert {case.columns["direction"] for case in others} == {"forward"}
    assert [case.section for case in others] == ["gqa"] * 4 + ["window"] * 2 + ["mla"] * 4 + ["varlen"] * 2
    assert {(case.section, case.yardstick) for case in others} == {
        ("gqa", "sdpa_cudnn"), ("window", "flex"), ("mla", "sdpa_cudnn"), ("varlen", "flashsoft_triton")
    }  # fmt: skip
    chosen = attention.BENCHMARK.chosen(asked(dry=False, only=[("D", {"64", "128"}), ("section", {"gqa", "varlen"})]))
    assert [(case.section, case.columns["D"]) for case in chosen] == [("gqa", 128)] * 4 + [
        ("varlen", 64),
        ("varlen", 128),
    ]
    problem = module("attention_problem")
    lengths = problem.documents(64, 64, 2048)
    assert lengths == problem.documents(64, 64, 2048) and len(set(lengths)) > 32
    assert 64 <= min(lengths) and max(lengths) <= 2048
    for S, reach in ((9, 4), (9, 9), (4, 9)):
        assert problem.kept(S, reach) == int(torch.ones(S, S).tril().triu(1 - reach).sum())


def test_portable_kernels_are_a_contender_where_dispatch_picks_others(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, problem = module("attention"), module("attention_problem")
    plain = problem.Problem(1, 2, 64, 64, True)
    packed = problem.Problem(2, 2, 64, 64, True, lengths=(32, 32))
    device = torch.device("cuda")
    assert not attention.has_own_kernels(plain, False, torch.device("cpu"))
    for capability in ((8, 0), (9, 0)):
        target = dispatch.Target("cuda", capability, True, False)
        monkeypatch.setattr(dispatch, "target_of", lambda device, target=target: target)
        hopper = importlib.import_module("flashsoft.kernels.hopper")
        portable = importlib.import_module("flashsoft.kernels")
        for kernel, backward in (("attention_forward", False), ("attention_backward", True)):
            apart = capability == (9, 0) and getattr(hopper, kernel) is not getattr(portable, kernel)
            for asked_for in (plain, packed):
                assert attention.has_own_kernels(asked_for, backward, device) == apart


@pytest.mark.parametrize("peer", ["fa3", "fa4"])
def test_flash_attention_is_asked_in_its_own_layout(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins take (B, S, H, D) or (T, H, D) and the peer's words, and compute what was asked."""
    peers, problem = module("attention_peers"), module("attention_problem")

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **said: object) -> tuple[torch.Tensor, ...]:
        assert said.pop("num_splits" if peer == "fa3" else "return_lse") == 1
        mask = flashsoft.Causal() if said.pop("is_causal" if peer == "fa3" else "causal") else None
        if "window_size_left" in said:
            assert said.pop("window_size_right") == 0
            mask = flashsoft.Window(said.pop("window_size_left"))
        if said:
            return *flashsoft.attention_varlen(q, k, v, **said, mask=mask, return_lse=True), "more"
        out, lse = flashsoft.attention(*(t.transpose(1, 2) for t in (q, k, v)), mask=mask, return_lse=True)
        return out.transpose(1, 2), lse, "more"

    def gradients(dout: torch.Tensor, *tensors: torch.Tensor, causal: bool) -> tuple[torch.Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = forward(*leaves, **({"is_causal": causal, "num_splits": 1} if peer == "fa3" else
                                  {"causal": causal, "return_lse": True}))[0]  # fmt: skip
        return torch.autograd.grad(out, leaves, dout)

    def fa3_backward(dout, q, k, v, out, lse, dq, dk, dv, *, is_causal):
        for into, gradient in zip((dq, dk, dv), gradients(dout, q, k, v, causal=is_causal), strict=True):
            into.copy_(gradient)

    def fa4_backward(q, k, v, out, dout, lse, *, causal):
        return *gradients(dout, q, k, v, causal=causal), "more"

    monkeypatch.setattr(peers, "fa3_operators", lambda: SimpleNamespace(fwd=forward, bwd=fa3_backward))
    interface = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=fa4_backward)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")
    for case, backward in (
        (problem.Problem(2, 2, 9, 16, False), True),
        (problem.Problem(2, 2, 9, 16, True), True),
        (problem.Problem(2, 4, 9, 16, True, Hkv=2, Dv=8), False),
        (problem.Problem(1, 2, 9, 16, True, window=4), False),
        (problem.Problem(2, 2, 9, 16, True, lengths=(4, 5)), False),
    ):
        x = case.inputs(torch.device("cpu"))
        result = peers.PEERS[peer](x, backward)()
        wanted = x.wanted()[1:] if backward else x.wanted()[:1]
        for got, want in zip(result if backward else [result], wanted, strict=True):
            torch.testing.assert_close(x.last(got).double(), want, atol=8 * BF16, rtol=0)


def test_strided_cases_are_strided() -> None:
    softmax = module("softmax")
    for backward in (False, True):
        case = softmax.softmax_case("neighbours", 3, 8, "fp32", backward, 9, softmax.ALONE)
        inputs = case.build(torch.device("cpu")).providers["torch"].args[1:]
        assert [t.stride() for t in inputs] == [(9, 1)] * (2 if backward else 1)


def results(path: Path, *rows: tuple[str, str, str, str]) -> Path:
    """A CSV of (N, dtype, provider, median_ms); every row is a forward of 1 GB."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, HEADS)
        writer.writeheader()
        shared = {"device": "GPU", "torch": "2", "triton": "3", "date": "2026-01-01 00:00", "unit": "GB/s"}
        writer.writerow(shared | {"section": "roof", "provider": "copy", "median_ms": "1", "rate": "1000"})
        for N, dtype, provider, ms in rows:
            row = {"section": "softmax", "M": "1", "N": N, "dtype": dtype, "direction": "forward", "median_ms": ms}
            rate = {"rate": str(1000 / float(ms)), "roof_share": str(1 / float(ms))} if ms else {}
            writer.writerow(shared | row | rate | {"provider": provider})
    return path


def test_table_shows_the_best_and_the_losses(tmp_path: Path) -> None:
    path = results(tmp_path / "a.csv", ("128", "bf16", "flashsoft", "1.25"), ("128", "bf16", "torch", "2"),
                   ("128", "bf16", "quack", ""), ("256", "bf16", "flashsoft", "2"), ("256", "bf16", "torch", "1.6"),
                   ("256", "bf16", "quack", "1"))  # fmt: skip
    text = module("table").markdown(path)
    assert "**softmax**, share of the roof" in text and "roof**" not in text
    assert "| M | N | dtype | direction | flashsoft | torch | quack | to best peer |" in text
    assert "| 1 | 128 | bf16 | forward | **0.80** | 0.50 | - | 1.60 |" in text
    assert "| 1 | 256 | bf16 | forward | 0.50 | 0.62 | **1.00** | 0.50 |" in text
    assert "geometric mean 0.894; below 0.98 in 1 of 2 cells: 1 256 bf16 forward 0.50" in text
    assert "| **1.25** | 2 | - |" in module("table").markdown(path, "median_ms")


def test_table_counts_no_backend_of_ours_as_a_peer(tmp_path: Path) -> None:
    path = results(tmp_path / "a.csv", ("128", "bf16", "flashsoft", "2"), ("128", "bf16", "flashsoft_triton", "1"),
                   ("128", "bf16", "torch", "3"))  # fmt: skip
    text = module("table").markdown(path)
    assert "| 0.50 | **1.00** | 0.33 | 1.50 |" in text and "geometric mean 1.500" in text


def test_table_refuses_what_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("x,y\n1,2\n")
    for name in ("absent.csv", "b.csv"):
        with pytest.raises(UsageError, match="csv must be a file that a benchmark wrote"):
            module("table").run(argparse.Namespace(csv=tmp_path / name, show=None))


def test_plot_is_written_beside_the_csv(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = results(tmp_path / "a.csv", ("128", "bf16", "flashsoft", "1.25"), ("128", "bf16", "torch", "2"),
                   ("256", "bf16", "flashsoft", "1.1"), ("256", "fp32", "torch", ""))  # fmt: skip
    assert module("plot").run(argparse.Namespace(csv=path)) == 0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["logits", "cross_entropy", "attention"])
def test_times_are_plotted(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"{name}.csv"
    path.write_bytes((BENCHMARKS / "results" / f"{name}.csv").read_bytes())
    assert module("plot").run(argparse.Namespace(csv=path)) == 0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_or_rows_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = results(tmp_path / "a.csv", ("128", "bf16", "flashsoft", "1.25"))
    with pytest.raises(UsageError, match=r"needs matplotlib: pip install 'flashsoft\[bench\]'"):
        module("plot").run(argparse.Namespace(csv=path))
    with pytest.raises(UsageError, match="timed rows"):
        module("plot").run(argparse.Namespace(csv=results(tmp_path / "b.csv", ("128", "bf16", "flashsoft", ""))))


def test_wheels_hold_the_benchmarks() -> None:
    declared = (ROOT / "pyproject.toml").read_text()
    for path in BENCHMARKS.glob("*.py"):
        assert f'"benchmarks/{path.name}" = "flashsoft/benchmarks/{path.name}"' in declared


def test_quantiles() -> None:
    assert timing.Timing("events", [5.0, 1.0, 2.0, 4.0, 3.0, 6.0]).quantiles() == (3.5, 2.0, 5.0)


def test_host_time_is_counted_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("|"))
    timings = timing.host({name: lambda name=name: order.append(name) for name in "ab"})
    assert "".join(order[:204]) == ("|" + "a" * 50 + "|" + "b" * 50 + "|" + "b" * 50 + "|" + "a" * 50)
    assert all(
        len(t.samples) == timing.HOST_ROUNDS and t.how == "host" and min(t.samples) > 0 for t in timings.values()
    )


@pytest.mark.gpu
def test_clock_times_short_and_long_calls() -> None:
    x = torch.randn(1 << 24, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        y = torch.empty_like(x)
        timings = timing.Clock().measure(
            {"part": lambda: y[: 1 << 20].copy_(x[: 1 << 20]), "whole": lambda: y.copy_(x)}
        )
    assert {one.how for one in timings.values()} == {"graph"}
    part, whole = (statistics.median(timings[name].samples) for name in ("part", "whole"))
    assert 0 < part < whole < 1
