"""What a plan does not do: figures that can be counted, unlike its seconds."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

SCRIPT = """
    import json, sys
    from anygauge.config.resolved import parse_run
    from anygauge.planning import quick, run
    from anygauge.registry import Registry

    made, asked = [], []
    rehearse = run.rehearse

    def counted(strategy, factory, *args, **kwargs):
        before = len(quick._RECIPES)
        found = rehearse(strategy, factory, *args, **kwargs)
        made.append((factory.config.num_hidden_layers, found.steps))
        asked.append(len(quick._RECIPES) - before)
        return found

    run.rehearse = counted
    run.can_be_aside = lambda: False  # all in this process, where they are counted
    registry = Registry.load()
    asked_for = parse_run(sys.argv[1])
    run.rehearse_run(asked_for, registry, registry.create_backend("cpu"), 2, 0)
    print(json.dumps({"made": made, "asked": asked}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """A rehearsal of a deep model."""
    config = {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    }
    run = {
        "model": {"config": config, "tokenizer": "none"},
        "data": {"train": {"path": "rows.jsonl"}, "max_length": 32},
        "adapter": {"r": 4},
        "strategy": {"name": "fsdp"},
        "train": {"steps": 2, "global_batch_size": 4, "micro_batch_size": 2},
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), json.dumps(run)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_a_deep_model_takes_few_steps_of_few_layers(found: dict[str, Any]) -> None:
    layers, steps = zip(*found["made"], strict=True)
    assert len(steps) <= 4
    assert steps == (3, *[2] * (len(steps) - 1))
    assert max(layers) <= 8


def test_what_one_depth_learned_serves_the_next(found: dict[str, Any]) -> None:
    first, *others = found["asked"]
    assert first > 200
    assert max(others) < first / 4
