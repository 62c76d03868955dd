"""README's table of what attention supports is the one that dispatch's facts give, and each of its cells is true."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import test_attention_terms as terms
import test_varlen as varlen
import torch
from cases import AttentionCase
from test_attention_terms import Options

import flashsoft
from flashsoft import Causal, Padding, Segments, dispatch
from flashsoft.cli import support
from flashsoft.dispatch import FEATURES, Problem

README = Path(flashsoft.__file__).parents[1] / "README.md"
CASE = AttentionCase(2, 2, 1, 5, 9, 16, 16)
# a call with the feature: its mask by name in cases.py, and its terms
CALLS: dict[str, tuple[str, Options]] = {
    "band": ("causal", Options()),
    "boolean mask": ("bool_bhqk", Options()),
    "segments": ("segments_b", Options()),
    "lengths": ("lengths_b", Options()),
    "bias": ("none", Options(bias="1hqk")),
    "ALiBi": ("none", Options(slopes="bh")),
    "softcap": ("none", Options(softcap=0.7)),
    "sink": ("none", Options(sink=True)),
    "tensor scale": ("none", Options(factor="h")),
    "dropout": ("none", Options(dropout_p=0.4)),
}


def test_the_readme_holds_the_table() -> None:
    text = README.read_text()
    start, end = "<!-- support -->\n", "\n<!-- /support -->"
    assert text[text.index(start) + len(start) : text.index(end)] == support.table()


def test_the_table_has_a_row_for_every_feature() -> None:
    lines = support.table().splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split(" | ")[0] for line in lines[2:-2]] == [f"| {name}" for name in FEATURES]


@pytest.mark.parametrize("feature", FEATURES)
def test_each_cell_is_true(feature: str, backend: str, device: torch.device) -> None:
    """Forward and every gradient, by name on the backend, against float64."""
    supports = next(each.supports for each in dispatch.BACKENDS if each.name == backend)
    assert feature in supports.forward and feature in supports.backward, "a cell that says no: test that it is refused"
    if feature == "packed":
        varlen.check("no_keys", "causal", Options(), torch.float32, backend, device)
    else:
        mask, options = CALLS[feature]
        terms.check(replace(CASE, mask=mask), options, torch.float32, backend, device)


def test_head_sizes_are_true(backend: str, device: torch.device) -> None:
    supports = next(each.supports for each in dispatch.BACKENDS if each.name == backend)
    case = replace(CASE, B=1, D=supports.head_dim, Dv=supports.value_dim)
    terms.check(case, Options(), torch.float32, backend, device)


def given(feature: str) -> dict[str, object]:
    """Arguments of attention and explain."""
    return {
        "band": {"mask": Causal()},
        "boolean mask": {"mask": torch.ones(5, 9, dtype=torch.bool)},
        "segments": {"mask": Segments((torch.arange(5), torch.arange(9)))},
        "lengths": {"mask": Padding(torch.tensor([3, 9]))},
        "bias": {"bias": torch.zeros(5, 9)},
        "ALiBi": {"bias": flashsoft.ALiBi(torch.zeros(2))},
        "softcap": {"softcap": 2.0},
        "sink": {"sink": torch.zeros(2)},
        "tensor scale": {"scale": torch.ones(())},
        "dropout": {"dropout_p": 0.5},
    }[feature]


@pytest.mark.parametrize("feature", [name for name in FEATURES if name != "packed"])
def test_explain_knows_what_a_call_has(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the feature in its support, triton is passed over with a reason, and the call itself refused."""
    q, k = torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 9, 16)
    lacking = replace(dispatch.TRITON, forward=dispatch.ALL - {feature})
    monkeypatch.setattr(dispatch, "TRITON", lacking)
    monkeypatch.setattr("flashsoft.env.BACKEND", None)
    reason = flashsoft.explain(q, k, k, **given(feature)).reasons["triton"]  # type: ignore[arg-type]
    assert reason == f"it has no {feature}"
    plain = flashsoft.explain(q, k, k).reasons.get("triton", "")
    assert "it has no" not in plain


def test_explain_counts_everything_at_once() -> None:
    problems: list[Problem] = []

    def note(problem: Problem, requested: str | None = None) -> dispatch.Explanation:
        problems.append(problem)
        return dispatch.Explanation(None, {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "explain", note)
        q, k, v = torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 9, 16), torch.zeros(2, 2, 9, 24)
        mask = Causal() & Padding(torch.tensor([3, 9])) & torch.ones(9, dtype=torch.bool)
        flashsoft.explain(q, k, v, mask=mask, softcap=1.0, dropout_p=0.1, sink=torch.zeros(2), return_lse=True)
    (problem,) = problems
    assert problem.features == {"band", "lengths", "boolean mask", "softcap", "dropout", "sink"}
    assert (problem.head_dim, problem.value_dim) == (16, 24)
    plain = dispatch.explain_on(replace(problem, head_dim=600), dispatch.target_of(torch.device("cpu")), "reference")
    assert plain.reasons["reference"] == "it takes head sizes up to 576 (of value 512), not 600 (24)"
