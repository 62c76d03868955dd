"""Which backend runs: pure functions of a problem and a machine, tried on machines that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import conftest
import pytest
import torch

import flashsoft
from flashsoft import dispatch
from flashsoft.dispatch import Problem, Target, explain_on
from flashsoft.terms import Terms

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
H200 = Target("cuda", (9, 0), has_triton=True, interpreted=False)
A100 = Target("cuda", (8, 0), has_triton=True, interpreted=False)
LAPTOP = Target("cpu", None, has_triton=True, interpreted=False)


def problem(device: torch.device = CUDA, dtype: torch.dtype = torch.float16) -> Problem:
    return Problem("attention", device, dtype)


def why_not_triton(target: Target, of: Problem) -> str | None:
    return next(b for b in dispatch.BACKENDS if b.name == "triton").why_not(of, target)


def test_triton_runs_on_a_gpu() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert why_not_triton(H200, problem(dtype=dtype)) is None
        assert explain_on(problem(dtype=dtype), A100).backend == "triton"
    assert explain_on(problem(dtype=torch.float32), H200).backend == "triton"


def test_hopper_comes_first_where_it_can_run() -> None:
    """Attention in 16 bits, plain or with a band or a sink, on sm_90; by another's name it is passed over."""
    few = replace(problem(), features=frozenset({"band", "sink"}), head_dim=128, value_dim=128)
    chosen = explain_on(few, H200)
    assert chosen.backend == "hopper" and chosen.reasons["triton"] == "hopper comes first"
    assert explain_on(few, H200, "triton").backend == "triton"
    for other, target, words in (
        (few, A100, "9.0"),
        (few, replace(H200, interpreted=True), "9.0"),
        (few, LAPTOP, "9.0"),
        (few, replace(H200, has_triton=False), "not installed"),
        (replace(few, op="softmax"), H200, "attention only"),
        (replace(few, dtype=torch.float32), H200, "float32"),
        (replace(few, features=frozenset({"bias"})), H200, "it has no bias"),
        (replace(few, head_dim=320), H200, "256"),
        (replace(few, obstacle="key is too large for a tensor map"), H200, "key is too large"),
    ):
        chosen = explain_on(other, target)
        assert chosen.backend != "hopper" and words in chosen.reasons["hopper"]
        assert explain_on(other, target, "hopper").backend is None


def test_what_a_call_holds_is_asked_only_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.zeros(1, 8, 2, 64, dtype=torch.float16).transpose(1, 2)
    askew = torch.zeros(1, 2, 8, 65, dtype=torch.float16)[..., :64]
    assert dispatch.obstacle(q, askew, q, Terms()) is None
    monkeypatch.setattr(dispatch, "target_of", lambda device: H200)
    assert dispatch.obstacle(q, q, q, Terms()) is None
    assert dispatch.obstacle(q, askew, q, Terms()).startswith("key must have rows")
    assert flashsoft.explain(q, askew, q).reasons["hopper"].startswith("key must have rows")


@pytest.mark.parametrize(
    "target, of, words",
    [
        (Target("cuda", (9, 0), False, False), problem(), "not installed"),
        (H200, problem(dtype=torch.float64), "float64"),
        (Target("cuda", (7, 5), True, False), problem(), "7.5"),
        (LAPTOP, problem(CPU), "TRITON_INTERPRET=1"),
        (Target("mps", None, True, False), problem(torch.device("mps")), "mps"),
    ],
)
def test_why_not_triton(target: Target, of: Problem, words: str) -> None:
    reason = why_not_triton(target, of)
    assert reason is not None and words in reason
    chosen = explain_on(of, target)
    assert chosen.reasons["triton"] == reason and chosen.backend != "triton"


def test_the_interpreter_makes_triton_run_on_a_cpu() -> None:
    target = Target("cpu", None, True, interpreted=True)
    assert explain_on(problem(CPU), target).backend == "triton"
    assert explain_on(problem(CPU, torch.float64), target).backend == "reference"


def test_a_gpu_tensor_never_falls_to_the_reference_in_silence() -> None:
    """Without triton, or on a GPU too old, nothing runs unless the reference is asked for by name."""
    for target in (Target("cuda", (9, 0), False, False), Target("cuda", (7, 5), True, False)):
        chosen = explain_on(problem(), target)
        assert chosen.backend is None
        assert 'backend="reference"' in chosen.reasons["reference"]
        assert explain_on(problem(), target, "reference").backend == "reference"


def test_float64_on_a_gpu_runs_where_it_can() -> None:
    assert explain_on(problem(dtype=torch.float64), H200).backend == "reference"


def test_by_name_it_runs_or_nothing_does() -> None:
    assert explain_on(problem(CPU), LAPTOP, "reference").backend == "reference"
    assert explain_on(problem(CPU), LAPTOP, "triton").backend is None
    assert explain_on(problem(), H200, "reference").backend == "reference"
    with pytest.raises(ValueError, match=r"backend must be one of hopper, triton, reference, got 'flash'"):
        explain_on(problem(), H200, "flash")


def test_the_text_of_an_explanation() -> None:
    lines = str(explain_on(problem(CPU), LAPTOP)).splitlines()
    assert lines[0] == "reference runs this"
    assert lines[1].startswith("hopper does not: its kernels need a GPU")
    assert lines[2].startswith("triton does not: its kernels need a GPU")
    assert str(explain_on(problem(), H200)).startswith("hopper runs this\ntriton does not: hopper comes first\n")
    nothing = str(explain_on(problem(), Target("cuda", (7, 5), True, False)))
    assert nothing.startswith("no backend runs this\nhopper does not: ")


def test_every_backend_is_either_chosen_or_has_a_reason() -> None:
    for target in (H200, LAPTOP, Target("cpu", None, True, True), Target("cuda", (7, 5), False, False)):
        for dtype in (torch.float16, torch.float64):
            chosen = explain_on(problem(torch.device(target.device_type), dtype), target)
            names = {backend.name for backend in dispatch.BACKENDS}
            assert set(chosen.reasons) == names - {chosen.backend}
            assert all(chosen.reasons.values())


@pytest.fixture
def on_a_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, as if the interpreter were off."""
    monkeypatch.setattr(dispatch, "target_of", lambda device: LAPTOP)
    dispatch._choose.cache_clear()
    yield
    dispatch._choose.cache_clear()


@pytest.mark.usefixtures("on_a_laptop")
def test_a_call_by_name_that_cannot_run_raises_its_reason() -> None:
    x = torch.zeros(1, 1, 2, 8)
    for call in (
        lambda: flashsoft.attention(x, x, x, backend="triton"),
        lambda: flashsoft.softmax(x, backend="triton"),
        lambda: flashsoft.fused_softmax(x, backend="triton"),
        lambda: flashsoft.logsumexp(x, backend="triton"),
    ):
        with pytest.raises(flashsoft.BackendUnavailableError, match=r"cpu: triton: its kernels need a GPU"):
            call()


@pytest.mark.usefixtures("on_a_laptop")
def test_the_environment_names_a_backend_for_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 8)
    monkeypatch.setattr("flashsoft.env.BACKEND", "triton")
    with pytest.raises(flashsoft.BackendUnavailableError):
        flashsoft.softmax(x)
    flashsoft.softmax(x, backend="reference")  # what the call names comes first
    monkeypatch.setattr("flashsoft.env.BACKEND", "reference")
    flashsoft.softmax(x)
    q = torch.zeros(1, 1, 2, 8)
    assert flashsoft.explain(q, q, q).reasons["triton"] == "reference was asked for"


@pytest.mark.usefixtures("on_a_laptop")
def test_the_choice_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="flashsoft"):
        flashsoft.softmax(torch.zeros(2, 8))
        flashsoft.softmax(torch.zeros(3, 8))
    lines = [record.getMessage() for record in caplog.records if record.name == "flashsoft"]
    assert len(lines) == 1 and "reference" in lines[0]


def run_python(code: str, **environment: str) -> str:
    """What a fresh process prints, with no kernel interpreted unless `environment` says so."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**env, **environment},
        cwd=Path(flashsoft.__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_touches_nothing_before_it_is_needed() -> None:
    """Neither triton nor a kernel nor an integration nor the CLI is imported."""
    code = """
import sys, flashsoft
ours = ("kernels", "tuning", "integrations", "cli")
heavy = ("triton", "transformers", *(f"flashsoft.{name}" for name in ours))
print([name for name in heavy if name in sys.modules])
"""
    assert run_python(code) == "[]"


def test_it_works_where_triton_cannot_be_imported() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch, flashsoft
q = torch.randn(1, 2, 5, 8, requires_grad=True)
flashsoft.attention(q, q, q, mask=flashsoft.Causal()).sum().backward()
flashsoft.fused_softmax(torch.randn(3, 7), top_k=2)
print(flashsoft.explain(q, q, q))
try:
    flashsoft.softmax(q, backend="triton")
except flashsoft.BackendUnavailableError as error:
    print(error)
"""
    lines = run_python(code).splitlines()
    assert lines[0] == "reference runs this" and lines[1].startswith("hopper does not: triton is not installed")
    assert lines[2].startswith("triton does not: triton is not installed") and "triton is not installed" in lines[-1]


def test_the_variable_is_read_from_the_environment() -> None:
    code = """
import torch, flashsoft
q = torch.zeros(1, 1, 1, 8)
print(flashsoft.explain(q, q, q).reasons["triton"])
"""
    assert run_python(code, FLASHSOFT_BACKEND="reference") == "reference was asked for"


@pytest.mark.skipif(not conftest.HAS_TRITON, reason="triton is not installed")
def test_the_suite_itself_runs_the_kernels(device: torch.device) -> None:
    """What every test with `backend="triton"` relies on."""
    q = torch.zeros(1, 1, 2, 8, device=device)
    assert flashsoft.explain(q, q, q).backend == "triton"
