"""The list of architectures: its results hold, it is whole, and its page is that of its results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.models.zoo import PAGE, RESULTS, architectures, results, stack_name
from tests.models.zoo_configs import condensed
from tests.models.zoo_page import PARTS, counts, failures, page, reason

STORED: dict[str, Any] = json.loads(RESULTS.read_text())

FAMILIES = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v2"),
    *("deepseek_v3", "gpt_oss", "gemma3_text", "ministral3", "mistral", "llama4_text"),
    *("glm4_moe", "phimoe", "granitemoe"),
)


def stored_rows() -> Mapping[str, Any]:
    name = stack_name()
    assert name in STORED, f"{name}: run `python -m tests.models.zoo --out docs/models.md` with it"
    rows: Mapping[str, Any] = STORED[name]["rows"]
    return rows


def check(names: tuple[str, ...]) -> None:
    """What the list says of these architectures holds now, and that is all of it."""
    here = architectures()
    for name, row in results([name for name in names if name in here]):
        assert failures(row) == {}, name
        assert row["loads"] == "equal" and row["zero"]["apart"] <= 1e-5, name
        told = stored_rows()[name]
        assert (row["attention"], row["loss"]) == (told["attention"], told["loss"]), name


def test_a_few_architectures_come_through() -> None:
    """One whose vocabulary is that of its part for text, one whose experts are converted."""
    check(("gemma3", "mixtral"))


@pytest.mark.slow
def test_the_families_come_through() -> None:
    check(FAMILIES)


def test_the_page_is_that_of_the_results() -> None:
    assert PAGE.read_text() == page(STORED)


def test_every_architecture_of_the_installed_version_is_listed() -> None:
    here = architectures()
    assert stored_rows().keys() == here.keys()
    text = PAGE.read_text()
    assert [name for name in here if f"| `{name}` | " not in text] == []


def test_most_architectures_train() -> None:
    newest, second = (counts(STORED[name]["rows"]) for name in sorted(STORED, reverse=True))
    for found, least in ((newest, 60), (second, 40)):
        assert found["loads"] >= least
        assert found["single"] >= 0.9 * found["made"]


def test_every_failure_names_a_limit() -> None:
    messages = [
        (name, text)
        for stack in STORED.values()
        for name, row in stack["rows"].items()
        for text in [*failures(row).values(), row.get("recomputes", {}).get("failed", "")]
        if text
    ]
    assert [each for each in messages if reason(*each) is None] == []


def test_what_training_fails_of_is_told_once() -> None:
    row = {"loads": "equal", "single": {"failed": "a"}, "zero": {"failed": "a"}}
    assert failures(row) == {"single": "a"}
    assert failures({"loads": {"failed": "b"}, "single": {"failed": "b"}}) == {"loads": "b"}
    assert set(PARTS) == {"made", "loads", "single", "zero", "merges"}


def test_a_tiny_model_has_layers_of_each_kind() -> None:
    assert condensed(["s", "s", "f", "s"], 2) == ["s", "f"]
    assert condensed(["f"] * 4, 2) == ["f", "f"]
