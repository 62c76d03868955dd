"""Both benchmarks run on a CPU in a dry run: right results, a row for what fails, and no claim about time."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
BF16 = 2.0**-8  # half an ulp at 1 is 2^-9: one rounding of a result below 1, one of a weight


def run(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(BENCHMARKS.parent), os.environ.get("PYTHONPATH"))))
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("name", "cases", "bound"),
    # gradients of attention on 20 keys stay below 8
    [("softmax", 15, BF16), ("attention", 4, 8 * BF16)],
)
def test_dry_run(name: str, cases: int, bound: float, tmp_path: Path) -> None:
    done = run(name, "--dry", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr + done.stdout
    with (tmp_path / f"{name}-dry.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    own = [row for row in rows if row["provider"] == "flashsoft"]
    assert len(own) == cases
    for row in own:
        assert not row["error"]
        assert row["torch"] and row["date"] and row["device"] == "cpu"
        assert 0 <= float(row["rms_error"]) <= float(row["max_error"]) < bound
        assert not any(row[key] for key in ("median_ms", "p20_ms", "p80_ms", "rate", "ratio", "roof_share"))
    assert {row["direction"] for row in own} == {"forward", "backward"}
    if name == "attention":
        # cuDNN is not on the CPU: each of its cells says so, and the sweep went on
        missing = [row["error"] for row in rows if row["provider"] == "sdpa_cudnn"]
        assert len(missing) == cases and all(missing)
    assert "**" + name + "**" in done.stdout


def test_without_a_gpu_it_says_so() -> None:
    done = run("softmax", "--only", "N=128")
    assert done.returncode == 2 and "--dry" in done.stderr
