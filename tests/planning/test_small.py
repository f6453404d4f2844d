"""The arithmetic that leaves out rehearsals says more than is ever held."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_run_file
from anygauge.config.schema import RunFile
from anygauge.models.factory import CausalModelFactory
from anygauge.planning.fit import most_bytes
from tests.helpers.runs import TINY, run_file

MIXTURE = {
    **TINY,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "head_dim": 16,
}


def most(folder: Path, **changes: Any) -> int | None:
    return most_bytes(load_run_file(run_file(folder, **changes), [], {}).run, 1)


def of(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"config": dict(config), "tokenizer": str(folder / "tokenizer")}


def _skeleton(run: RunFile) -> Any:
    import torch

    return CausalModelFactory(
        run.model, None, dtype=torch.float32, seed=0, gradient_checkpointing=False
    ).skeleton()


@pytest.mark.parametrize("config", [TINY, MIXTURE, {**TINY, "model_type": "gemma3_text"}])
def test_it_is_more_than_all_weights_and_their_state(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    file = run_file(tmp_path, model=of(tmp_path, config), adapter=None)
    run = load_run_file(file, [], {}).run
    model = _skeleton(run)
    held = 20 * sum(p.numel() for p in model.parameters())
    bound = most_bytes(run, 1)
    assert bound is not None and held < bound < 20 * held


def test_rows_and_words_count(tmp_path: Path) -> None:
    few, rows, words = (
        most(tmp_path, **changes)
        for changes in (
            {},
            {"train": {"micro_batch_size": 4}},
            {"model": of(tmp_path, {**TINY, "vocab_size": 50_000})},
        )
    )
    assert few is not None and rows is not None and words is not None
    assert rows - few > 2 * 96 * 512 * 8 and words - few > 2 * 96 * 49_000 * 8


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {k: v for k, v in TINY.items() if k != "intermediate_size"}},
        {"config": {**TINY, "vision_config": {"hidden_size": 8}}},
        {"new_tokens": ["<a>"]},
    ],
    ids=["a size is missing", "two models", "new tokens"],
)
def test_it_does_not_guess(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert most(tmp_path, model={**of(tmp_path, TINY), **changes}) is None


def test_sizes_of_a_folder_are_read_from_its_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = {"name": str(folder), "tokenizer": str(tmp_path / "tokenizer")}
    assert most(tmp_path, model=model) is None
    (folder / "config.json").write_text(json.dumps(TINY))
    assert most(tmp_path, model=model) == most(tmp_path)
