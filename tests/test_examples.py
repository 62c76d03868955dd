"""Every example runs, on a CPU and in seconds, and is short enough to read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What must be among its lines: a result, not only a start.
SAYS = {
    "01_online_softmax": "merging it changes nothing: True",
    "02_softmax_twins": "NumPy",
    "03_fused_softmax": "d(sum p^2)/dT = -",
    "04_attention": "[1, 32, 32]",
    "05_transformer_block": "100%",
    "06_generate": "cache has room for 200 tokens",
    "07_seven_steps": "7 exchanged       1.00 N  1.00 N  100%",
    "08_train_without_logits": "the same loss, and the same 11 gradients",
    "09_transformers": "the same tokens as with sdpa",
}


def test_examples_are_numbered_and_short() -> None:
    assert [path.stem for path in EXAMPLES] == list(SAYS)
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) < 80, path.name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path) -> None:
    if path.stem == "09_transformers":
        pytest.importorskip("transformers")  # which .ci/run sees to
    assert SAYS[path.stem] in run(str(path))


def test_the_readmes_code_runs() -> None:
    first, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    run("-c", first)


def run(*what: str) -> str:
    """What python prints of a script, on a CPU, where a warning is an error."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-W", "error", *what],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
