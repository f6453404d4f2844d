"""What strategies say that a rank sends in a step is what is counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks

Case = tuple[str, dict[str, Any], bool, bool]
"""Strategy, options, LoRA, recomputed."""

NOTHING_RESIDENT = {"stage3_param_persistence_threshold": 0}
ZERO: list[Case] = [
    *(("zero", {"stage": stage}, lora, False) for stage in range(4) for lora in (True, False)),
    ("zero", {"stage": 3}, True, True),
    ("zero", {"stage": 3, "options": NOTHING_RESIDENT}, True, True),
]
A_FEW_NUMBERS = 64
"""Bytes in a step of norms and flags."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("footprint")
    output = folder / "counted.json"
    run_ranks(
        "tests.strategies.footprint_rank", [str(output), json.dumps(ZERO)], world=2, folder=folder
    )
    found: list[dict[str, Any]] = json.loads(output.read_text())
    return found


@pytest.mark.parametrize("number", range(len(ZERO)), ids=lambda n: "-".join(map(str, ZERO[n])))
def test_zero_sends_what_it_says(number: int, counted: list[dict[str, Any]]) -> None:
    case = counted[number]
    said = case["footprint"]["sent"]
    sent = {name: size for name, size in case["bytes"].items() if size > A_FEW_NUMBERS}
    assert sent.keys() == said.keys()
    for name, size in sent.items():
        # DeepSpeed keeps some gathered weights from forward to backward.
        least = 0.5 * said[name] if "options" in ZERO[number][1] else said[name]
        assert least <= size <= said[name] + A_FEW_NUMBERS, name
