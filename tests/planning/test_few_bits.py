"""Plans of quantised bases, of which there is a configuration and no weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anygauge.config.load import load_run_file
from anygauge.planning.planner import Planner
from tests.helpers.runs import TINY, run_file

WIDE = {**TINY, "hidden_size": 256, "intermediate_size": 1024}
BITS = {"nf4": 4 + 0.5, "int8": 8 + 0.1}
"""Of a weight, with its part of scales: of 4 bytes for 64 weights, or for an output."""


@pytest.mark.slow
def test_a_folder_of_a_configuration_alone_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(WIDE))
    layers, hidden, inner = (
        WIDE[f] for f in ("num_hidden_layers", "hidden_size", "intermediate_size")
    )
    heads = WIDE["num_key_value_heads"] / WIDE["num_attention_heads"]
    numbers = layers * (hidden * hidden * (2 + 2 * heads) + 3 * hidden * inner)
    found, parameters = {}, set()
    with Planner(1) as planner:
        for kind in (None, *BITS):
            path = run_file(
                tmp_path,
                name=str(kind),
                backend="cuda",
                model={"name": str(folder), "tokenizer": "none", "quantise": kind},
                strategy={"name": "single"},
            )
            run = load_run_file(path, [], {}).run
            memory = planner.rehearse(run, "cuda")
            found[kind] = memory.device["load"].total
            parameters.add(memory.numbers[0])
    for kind, bits in BITS.items():
        assert found[None] - found[kind] == pytest.approx(numbers * (16 - bits) / 8, rel=0.01)
    assert len(parameters) == 1
