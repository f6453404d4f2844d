"""What plans are told of `zero`: bytes by moment, counted from a model without values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anygauge.config.schema import AdapterSection
from anygauge.interface import Backend, MemoryEstimate, Precision
from anygauge.interface import estimate as of
from anygauge.interface.estimate import FORWARD, GATHERED, OPTIMIZER, WEIGHTS
from anygauge.strategies.zero.options import ZeroOptions
from anygauge.strategies.zero.sharded_footprint import zero_memory
from tests.helpers.build import a_workload, model_factory

LAYERS, WIDTH, WORDS = 4, 64, 512
CONFIG = {
    **{"model_type": "llama", "hidden_size": WIDTH, "vocab_size": WORDS},
    **{"num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 128},
}
TABLE = WIDTH * WORDS
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * 128 + 2 * WIDTH
NUMBERS = 2 * TABLE + LAYERS * LAYER + WIDTH
NOTHING_RESIDENT = {"stage3_param_persistence_threshold": 0}
AHEAD = ("stage3_prefetch_bucket_size", "stage3_max_reuse_distance", "stage3_max_live_parameters")
ONE_AT_A_TIME = {**NOTHING_RESIDENT, **dict.fromkeys(AHEAD, 0)}


class Unopened(Backend):
    name = device_type = "plain"


def estimate(*, r: int = 0, reduce: str = "float32", **f: Any) -> MemoryEstimate:
    changes = {"accumulation": f.pop("turns", 1), "world_size": f.pop("ranks", 2)}
    config = {**CONFIG, "tie_word_embeddings": f.pop("tied", False)}
    factory = model_factory(config, AdapterSection(r=r) if r else None, dtype=torch.bfloat16)
    model = factory.adapt(factory.skeleton())
    precision = Precision(param_dtype="bfloat16", reduce_dtype=reduce)
    workload = a_workload(Unopened(), precision, skeleton=model, **changes)
    return zero_memory(ZeroOptions(**f), workload)


def test_a_rank_of_stage_3_has_its_part_of_all_and_one_layer_whole_at_a_time() -> None:
    found = {ranks: estimate(ranks=ranks, options=ONE_AT_A_TIME).device for ranks in (2, 4)}
    for ranks, device in found.items():
        assert device[of.BEGIN][WEIGHTS] == 2 * NUMBERS // ranks
        assert device[of.BEGIN][OPTIMIZER] == (4 + 8) * NUMBERS // ranks
        assert device[FORWARD][GATHERED] == 2 * LAYER
        assert device[of.BEGIN][of.BUFFERS] == 4 * NUMBERS + 4 * NUMBERS // ranks


def test_what_is_fetched_ahead_is_whole_as_well_until_the_most_that_may_be() -> None:
    free = {**NOTHING_RESIDENT, "stage3_max_reuse_distance": 0}
    found = [
        estimate(options={**free, "stage3_max_live_parameters": most}).device[FORWARD][GATHERED]
        for most in (2 * LAYER, 3 * LAYER)
    ]
    assert 2 * 2 * LAYER < found[0] < found[1] <= 2 * 2 * (3 * LAYER + TABLE)
    # All that is left is on its way at once, its collective's result beside its copies.
    assert estimate(options=NOTHING_RESIDENT).device[of.LOSS][GATHERED] == 2 * NUMBERS


FACTORS = 4 * sum(a + b for a, b in 4 * [(64, 64)] + 3 * [(64, 128)]) * LAYERS


def test_flat_layers_are_pieces_and_two_buffers_and_the_rest_is_stage_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("anygauge.strategies.zero.gather.offloads_gradients", lambda: True)
    found, offloaded = (estimate(r=4, turns=3, offload=o) for o in ("none", "optimizer"))
    # Two tables and the last norm are whole.
    weights = 2 * (LAYERS * LAYER // 2 + 2 * TABLE + WIDTH + FACTORS)
    for one in (found, offloaded):
        assert one.device[FORWARD][GATHERED] == 2 * 2 * LAYER
        assert one.device[FORWARD][WEIGHTS] == pytest.approx(weights, rel=0.01)  # aligned
    assert found.device[FORWARD][OPTIMIZER] == (4 + 8) * FACTORS // 2
    assert offloaded.device[FORWARD][OPTIMIZER] == 0
    sent = {one.operation: one for one in found.traffic}
    # Of four layers two are there from the turn before, each way.
    assert sent["all_gather"].times == 3 * 4 + 1
    assert sent["all_gather"].bytes == pytest.approx(2 * (3 * 4 * LAYER + FACTORS), rel=0.01)
    assert sent["all_reduce"].bytes == 4 * FACTORS


def test_resident_weights_are_whole_always_and_gathered_once_a_step() -> None:
    found = estimate(r=4, turns=3, gather="layer")
    factors = 2 * FACTORS
    assert estimate(r=4, gather="layer").device[FORWARD][GATHERED] == 0
    # The second micro-batch gathers them with the others, before an update has made state.
    state = found.device[FORWARD][OPTIMIZER] - factors
    assert found.device[FORWARD][GATHERED] == 2 * NUMBERS + factors - state
    assert found.device[FORWARD][WEIGHTS] == 3 * (2 * NUMBERS + factors) // 2
    gathers = found.traffic[0]
    assert (gathers.times, gathers.bytes) == (1, 2 * NUMBERS + factors)


def test_weights_are_gathered_twice_in_each_micro_batch() -> None:
    once, thrice = (estimate(options=ONE_AT_A_TIME, turns=n).traffic for n in (1, 3))
    assert [one.bytes for one in thrice] == [3 * one.bytes for one in once]
    assert once[0].bytes == 2 * 2 * NUMBERS  # what is recomputed is kept for its backward
    assert once[1].bytes == 4 * NUMBERS


def test_offloading_moves_bytes_to_the_host() -> None:
    here, there, both = (
        estimate(offload=o, options=NOTHING_RESIDENT) for o in ("none", "optimizer", "both")
    )
    moved = here.device[FORWARD][OPTIMIZER]
    assert there.device[FORWARD][OPTIMIZER] == both.device[FORWARD][OPTIMIZER] == 0
    assert there.host[FORWARD][OPTIMIZER] == both.host[FORWARD][OPTIMIZER] == moved
    assert there.device[FORWARD][WEIGHTS] == both.host[FORWARD][WEIGHTS] == 2 * NUMBERS // 2
    assert here.copied_bytes == 0 < there.copied_bytes < both.copied_bytes
    for stage in (1, 2):  # that of weights which are whole
        here, there = (estimate(stage=stage, offload=o) for o in ("none", "optimizer"))
        assert there.device[FORWARD][OPTIMIZER] == 0
        assert there.host[FORWARD][OPTIMIZER] == here.device[FORWARD][OPTIMIZER] > 0


def test_groups_are_updated_one_after_another() -> None:
    whole, parts = (
        estimate(options={**NOTHING_RESIDENT, "sub_group_size": size}).device[of.UPDATE][OPTIMIZER]
        for size in (NUMBERS, LAYER)
    )
    held = (4 + 8) * NUMBERS // 2
    assert whole - held == 4 * NUMBERS // 2 > parts - held >= 4 * LAYER


def test_other_stages_have_all_weights_and_a_part_of_the_optimizer() -> None:
    first, second = (estimate(stage=stage).device for stage in (1, 2))
    for device in (first, second):
        assert device[FORWARD][WEIGHTS] == 2 * NUMBERS
        assert device[FORWARD][OPTIMIZER] == (4 + 8) * NUMBERS // 2
    # In bfloat16, stage 1 keeps the sums of all gradients, and the gradients.
    assert first[FORWARD][of.BUFFERS] == (4 + 2) * NUMBERS > second[FORWARD][of.BUFFERS] == 0
    none = estimate(stage=0, reduce="bfloat16").device
    assert none[FORWARD][OPTIMIZER] == (4 + 8) * NUMBERS
    assert (
        none[FORWARD][of.GRADIENTS]
        == 0
        < none[of.END][of.GRADIENTS]
        < none[of.COLLECT][of.GRADIENTS]
    )
