"""``anygauge kernels``: every kernel, which a run would have, and why."""

from __future__ import annotations

import json
from typing import Any

import pytest

from anygauge.cli import run


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[tuple[str, str], Any]:
    assert run(["kernels", "--json", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    return {(row["operation"], row["kernel"]): row for row in report["kernels"]}


def test_one_kernel_of_each_operation_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "--backend", "cpu")
    chosen = [operation for (operation, _), row in found.items() if row["chosen"]]
    # A softmax is called through another kernel, which a run must ask for.
    assert sorted(chosen) == sorted({operation for operation, _ in found} - {"softmax"})
    assert "kernels.attention: softmax" in found["softmax", "reference"]["why"]
    assert found["linear_cross_entropy", "chunked"]["chosen"]
    assert "default" in found["linear_cross_entropy", "chunked"]["why"]


def test_the_others_say_why_not_or_how_to_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "--backend", "cpu")
    assert found["attention", "softmax"]["why"] == (
        "can run here; to select it: kernels.attention: softmax"
    )
    assert found["attention", "blocks"]["why"] == "it serves cuda devices, not 'cpu'"
    assert found["attention", "reference"]["why"].startswith("the model library's sdpa: ")


def test_a_backend_prefers_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "--backend", "hpu")
    assert "preferred by the hpu backend" in found["attention", "gaudi_fused"]["why"]


def test_the_table_marks_what_is_chosen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run(["kernels", "--backend", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "backend cpu (asked for by name); a run would use those marked *" in shown
    assert "\n* chunked " in shown and "\n  softmax " in shown
