"""The command: doctor, verify, bench, demo, and what it says of wrong usage."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashsoft import __version__, cli
from flashsoft.cli import cases, demo, verify

ROOT = Path(__file__).parents[1]
HIDE_TRITON = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
import importlib.util, importlib.metadata
found, told = importlib.util.find_spec, importlib.metadata.version
def version(name):
    if "triton" in name:
        raise importlib.metadata.PackageNotFoundError(name)
    return told(name)
importlib.metadata.version = version
hidden = lambda name: name.split(".")[0] == "triton"
importlib.util.find_spec = lambda name, package=None: None if hidden(name) else found(name, package)
sys.meta_path.insert(0, Hidden())
from flashsoft.cli import main
raise SystemExit(main(sys.argv[1:]))
"""


def command(*arguments: str, code: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """`python -m flashsoft` in its own process, as a user without an interpreter of kernels has it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    how = ["-m", "flashsoft"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *how, *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_doctor_reports_as_json() -> None:
    done = command("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["versions"]["flashsoft"] == __version__
    assert report["versions"]["torch"] == torch.__version__
    assert set(report["variables"]) == {"FLASHSOFT_BACKEND", "FLASHSOFT_CHECK", "FLASHSOFT_LOG", "FLASHSOFT_TUNING"}
    assert set(report["backends"]["cpu"]) == {
        "softmax",
        "log_softmax",
        "logsumexp",
        "fused_softmax",
        "sample",
        "cross_entropy",
        "attention",
    }
    assert report["checks"] and all(check["passed"] for check in report["checks"])


def test_doctor_without_triton_says_why() -> None:
    done = command("doctor", code=HIDE_TRITON, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "triton is not installed" in done.stdout
    assert "reference  attention            ok" in done.stdout
    assert "reference  attention with terms ok" in done.stdout


def test_doctor_shows_variables_in_force() -> None:
    done = command("doctor", FLASHSOFT_BACKEND="reference", FLASHSOFT_CHECK="1", FLASHSOFT_LOG="error")
    assert "FLASHSOFT_BACKEND  reference" in done.stdout
    assert "FLASHSOFT_CHECK    1" in done.stdout
    assert "FLASHSOFT_LOG      ERROR" in done.stdout
    assert "reference was asked for" in done.stdout


def test_doctor_fails_on_a_wrong_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from flashsoft.cli import doctor

    def wrong(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(t + (1e-3 if t.dtype == torch.float32 else 0.0) for t in tensors[:4])

    monkeypatch.setattr(doctor, "attend", lambda *given: wrong(*given[:4]))
    assert cli.main(["doctor"]) == 1
    assert "FAILED: max error 1.0e-03" in capsys.readouterr().out


def test_verify_quick_on_each_backend(backend: str, device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["verify", "--quick", "--backend", backend, "--device", str(device)])
    said = capsys.readouterr().out
    assert code == 0, said
    total = len(cases.QUICK) * len(verify.DTYPES)
    assert f"{total} of {total} passed" in said


def test_verify_fails_on_a_wrong_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ours = cases.ours
    monkeypatch.setattr(cases, "ours", lambda *given: ours(*given) * 1.001)
    assert cli.main(["verify", "--quick", "--backend", "reference", "--device", "cpu"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize("case", cases.ALL, ids=str)
def test_verify_cases_are_right_in_float64(case: cases.Case) -> None:
    """The three ways of a case mean the same: in float64 they agree to rounding."""
    tensors, keep = cases.inputs(case, torch.Generator().manual_seed(3))
    whole = cases.whole_mask(case, tensors, keep)
    ours = cases.ours(case, tensors, keep, "reference")
    exact = cases.torchs(case, tensors, whole, exact=True)
    torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(cases.torchs(case, tensors, whole, exact=False), exact, rtol=1e-10, atol=1e-12)


def test_agreement_refuses_nan_and_what_is_off() -> None:
    exact = torch.randn(50, dtype=torch.float64)
    theirs = exact.float()
    assert verify.agreement(exact.float(), theirs, exact).passed
    assert not verify.agreement(exact.float() + 1e-5, theirs, exact).passed
    assert not verify.agreement(torch.full((50,), float("nan")), theirs, exact).passed
    one_off = exact.float()
    one_off[7] += 1e-5
    assert not verify.agreement(one_off, theirs, exact).passed


def test_bench_measures_and_tabulates_what_it_wrote(tmp_path: Path) -> None:
    options = ("--dry", "--only", "section=few_rows", "--peers", "torch", "--out", str(tmp_path))
    done = command("bench", "softmax", *options, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    table = "| M | N | dtype | direction | flashsoft | torch | to best peer |"
    assert table in done.stdout
    assert table in command("bench", "table", str(tmp_path / "softmax-dry.csv")).stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", ["softmax", "attention", "host"])
def test_bench_needs_a_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", name]) == 2
    assert capsys.readouterr().err == "flashsoft bench: no CUDA GPU here; --dry runs tiny shapes on the CPU\n"


def test_demo_trains_writes_and_agrees() -> None:
    done = command("demo", "--steps", "6", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "step     6 of 6",
        "validation loss",
        "  | def ",
        "tokens/s",
        "torch SDPA",
        "Good: the loss falls",
    ):
        assert said in done.stdout
    assert done.stdout.count("% ok") == demo.ON_CPU.layers


def test_demo_fails_if_a_layer_is_off() -> None:
    size = demo.Size(2, 32, 2, 1, length=24, batch=1, steps=2, rate=1e-3, timed_steps=1)
    model, tokens = demo.GPT(size), torch.randint(256, (1, 24))
    attention = demo.api.attention
    assert demo.compare_layers(model, tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo.api, "attention", lambda *given, **options: attention(*given, **options) * 1.001)
        assert not demo.compare_layers(model, tokens)
    assert not any("attend" in vars(block.attention) for block in model.blocks), "the recording stayed behind"


def test_demo_text_is_the_same_each_time() -> None:
    (training, validation), (again, _) = demo.read_text(900_000), demo.read_text(900_000)
    assert torch.equal(training, again)
    assert training.dtype == torch.uint8 and len(training) >= 900_000 and len(validation) >= 10_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: verb"),
        (["dance"], "invalid choice: 'dance'"),
        (["doctor", "--loud"], "unrecognized arguments: --loud"),
        (["verify", "--device", "abacus"], "--device must be cpu, cuda or cuda:N, got 'abacus'"),
        (["verify", "--device", "cuda:99"], "--device must be one of this machine's, got 'cuda:99'"),
        (["verify", "--backend", "abacus"], "--backend must be one of hopper, triton, reference, got 'abacus'"),
        (["demo", "--steps", "1"], "--steps must be at least 2, got 1"),
        (["bench"], "required: benchmark"),
        (["bench", "dance"], "invalid choice: 'dance'"),
        (["bench", "softmax", "--only", "X=1"], "must be COLUMN=VALUE[,VALUE], COLUMN one of section, M, N, "),
        (["bench", "softmax", "--peers", "abacus"], "must be of torch, compile, liger, quack, naive, cuda, got"),
        (["bench", "softmax", "--dry", "--dtype", "fp8"], "no case is left by --only and --dtype"),
        (["bench", "table", "absent.csv"], "csv must be a file that a benchmark wrote, got absent.csv"),
    ],
)
def test_wrong_usage_is_2_in_one_sentence(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(verb in said for verb in cli.VERBS)
    for verb in cli.VERBS:
        assert cli.main([verb, "--help"]) == 0


def test_verbs_are_imported_only_when_called() -> None:
    code = "import sys; from flashsoft import cli; print([m for m in sys.modules if 'flashsoft.cli.' in m])"
    assert command(code=code).stdout.strip() == "[]"


def test_entry_point_is_declared() -> None:
    try:
        importlib.metadata.distribution("flashsoft")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flashsoft is not installed, only on the path")
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="flashsoft")
    assert script.load() is cli.main
