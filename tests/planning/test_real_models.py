"""Plans of real models, against traces of all of their layers, and against counts by hand.

``all_layers.json`` holds, in bytes, what the run's own engine was seen to hold at most on one of 8
ranks when it ran on tensors without values, with all layers: by a planner that anygauge had before,
which took from half a minute to several minutes for each.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import fully_shard

from anygauge.config.schema import RunFile
from anygauge.planning.fit import GIB, fit
from anygauge.planning.trials import Target, estimate_step_time
from tests.helpers.sizes import LLAMA_8B, LLAMA_70B, QWEN_14B, QWEN_32B
from tests.planning.standins import HARDWARE, REGISTRY, planned, run

TRACED: Any = json.loads((Path(__file__).parent / "all_layers.json").read_text())
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
    assert found.worst_phase[1].total == pytest.approx(TRACED[case]["device"], rel=0.1)
    if offload and trained == "full":  # else reading has most of the host
        host = max(peak.total for peak in found.host.values())
        assert host == pytest.approx(TRACED[case]["host"], rel=0.1)


# -- systems that others train on ------------------------------------------------------------------

LLAMA_3_70B = {**LLAMA_70B, "vocab_size": 128256, "max_position_embeddings": 8192}
LAYER = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)
"""Numbers in a layer's matrices: queries and outputs, keys and values, the feed-forward."""
TABLE = 128256 * 8192
RANKS, LENGTH = 32, 512
FACTORS = 80 * 16 * (4 * 8192 + 2 * (8192 + 1024) + 3 * (8192 + 28672))
"""Numbers of an adapter of rank 16 on all of these."""
KEPT = 80 * LENGTH * 8192 * 2
"""Bytes of what layers keep: their inputs, in 16 bits."""
IN_A_LAYER = LENGTH * (10 * 8192 + 6 * 28672) * 2
"""What one layer has meanwhile, roughly."""
USUAL: dict[str, Any] = {
    "model": {"config": LLAMA_3_70B},
    "data": {"max_length": LENGTH},
    "adapter": {"r": 16},
    "precision": {"param_dtype": "float16"},
    "strategy": {"name": "fsdp"},
}


def of_nodes(nodes: int, **sections: Any) -> RunFile:
    train = {"micro_batch_size": 1, "global_batch_size": 8 * nodes}
    return run(USUAL, {"train": train, "launch": {"nodes": nodes}}, sections)


@pytest.mark.parametrize("codes", [False, True], ids=["float16", "nf4"])
def test_70b_with_an_adapter_over_32_cards_by_fsdp(codes: bool) -> None:
    tables, factors = 2 * TABLE * 2, 2 * FACTORS * 2  # factors come at once, and are copied out
    if codes:
        # Rows of codes; scales, four bytes for each 64 codes, which every rank has; tables twice.
        by_hand = (80 * LAYER * 0.5 + tables) / RANKS + 80 * LAYER * 4 / 64 + 2 * tables + factors
    elif "ignored_params" not in inspect.signature(fully_shard).parameters:
        # Before torch 2.7 FSDP2 has frozen layers, too; tables come, and are copied out.
        by_hand = (80 * LAYER * 2 + tables) / RANKS + 2 * tables + 2 * LAYER * 2 + factors
    else:
        # A rank's piece of the layers, two layers at once, and whole tables.
        by_hand = 80 * LAYER * 2 / RANKS + 2 * LAYER * 2 + tables + factors + KEPT + IN_A_LAYER
    found = planned(of_nodes(4, model={"quantize": "nf4"} if codes else {}))
    assert found.worst_phase[1].total == pytest.approx(by_hand, rel=0.1)
    for card in map(HARDWARE.card, ("v100-16", "v100-32")):
        held = fit(found, card, RANKS, 8)
        assert held is not None and card.memory is not None
        # 5% beside tensors, 1 GiB of context, 2 GiB of collectives.
        assert held.fits == (1.05 * by_hand + 3 * GIB <= card.memory), card.name


def test_all_weights_of_four_layers_over_32_cards_by_fsdp() -> None:
    """Layers so large that one more or less of them is an eighth of all."""
    table, bfloat16 = 32000 * 8192, {"param_dtype": "bfloat16"}
    model = {"config": {**LLAMA_70B, "num_hidden_layers": 4}}
    found = planned(of_nodes(4, model=model, adapter=None, precision=bfloat16)).device
    # Masters and two moments of a rank's part, whole tables, and two layers.
    held = 12 * (2 * table + 4 * LAYER) / RANKS + 2 * (2 * table + 2 * LAYER)
    # Forward copies the second one out of what came.
    assert found["forward"].total == pytest.approx(held + 2 * LAYER, rel=0.05)
    # Gradients of the output layer and of a layer; those of the last layer, and what is summed.
    made = 2 * (table + LAYER) + 4 * LAYER + 4 * 2 * LAYER / RANKS
    assert found["backward"].total == pytest.approx(held + made, rel=0.05)


def test_8b_with_an_adapter_by_ddp_on_1_to_3_machines() -> None:
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    by_hand = 2 * (32 * layer + 2 * 128256 * 4096) + 32 * LENGTH * 4096 * 2
    machine = HARDWARE.machine("Standard_ND40rs_v2")
    target = Target(backend="cuda", card=HARDWARE.card(machine.card), machine=machine)
    busy: list[float] = []
    for nodes in (1, 2, 3):
        of = of_nodes(nodes, model={"config": LLAMA_8B}, strategy={"name": "ddp"})
        found = planned(of)
        assert found.worst_phase[1].total == pytest.approx(by_hand, rel=0.1)
        for card, fits in (("v100-16", False), ("v100-32", True)):
            held = fit(found, HARDWARE.card(card), 8 * nodes, 8)
            assert held is not None and held.fits == fits
        time, why = estimate_step_time(of, found, target, REGISTRY)
        assert time is not None, why
        assert time.sending["cards" if nodes == 1 else "machines"] > 0
        busy.append(time.step - sum(time.sending.values()) + time.hidden)
    assert busy == pytest.approx([busy[0]] * 3), "a step grows by communication only"
