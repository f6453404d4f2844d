"""Plans of real models, against traces of all of their layers.

``all_layers.json`` holds, in bytes, what the run's own engine was seen to hold at most on one of 8
ranks when it ran on tensors without values, with all layers: by a planner that anygauge had before,
which took from half a minute to several minutes for each.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.sizes import LLAMA_8B, QWEN_14B, QWEN_32B
from tests.planning.standins import planned, run

TRACED: dict[str, dict[str, int]] = json.loads(
    (Path(__file__).parent / "all_layers.json").read_text()
)
CONFIGS = {"8B": LLAMA_8B, "14B": QWEN_14B, "32B": QWEN_32B}


@pytest.mark.parametrize("case", TRACED)
def test_within_a_tenth_of_all_layers_traced(case: str) -> None:
    size, trained, engine, *offload = case.split()
    strategy = {"name": "fsdp" if engine == "fsdp" else "zero"}
    if offload:
        strategy["offload"] = offload[0]
    of = run(
        model={"config": CONFIGS[size]},
        data={"max_length": 2048},
        adapter={"r": 16} if trained == "lora" else None,
        train={"global_batch_size": 16, "micro_batch_size": 2},
        strategy=strategy,
    )
    found = planned(of)
    assert found.worst[1].total == pytest.approx(TRACED[case]["device"], rel=0.1)
    if offload and trained == "full":  # else reading has most of the host
        host = max(peak.total for peak in found.host.values())
        assert host == pytest.approx(TRACED[case]["host"], rel=0.1)
