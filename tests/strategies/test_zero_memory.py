"""Bytes of `zero`: what plans are told by moment, and what simulated cards count by phase.

Run as a script (``python -m tests.strategies.test_zero_memory``), it prints the table of
docs/measured.md: peaks by phase, of each way of gathering.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.config.schema import AdapterSection
from anygauge.interface import Backend, MemoryEstimate, Precision
from anygauge.interface import estimate as of
from anygauge.interface.estimate import FORWARD, GATHERED, OPTIMIZER, WEIGHTS
from anygauge.kernels.loss import model_loss
from anygauge.strategies.shared.flat import not_flat
from anygauge.strategies.shared.footprint import weight_bytes
from anygauge.strategies.zero.engine import Zero
from anygauge.strategies.zero.footprint import zero_memory
from anygauge.strategies.zero.spec import ZeroOptions
from tests.helpers.build import a_workload, batch_of, build_context, model_factory
from tests.helpers.run_ranks import on_ranks

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
    monkeypatch.setattr(
        "anygauge.strategies.zero.deepspeed_config.offloads_gradients", lambda: True
    )
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


# -- counted by the allocator of simulated cards --------------------------------------------------

COUNTED = {**CONFIG, "hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 688}
PHASES = ("build", "forward", "backward", "update")


def peaks(backend: Backend, gather: str, words: int) -> dict[str, int]:
    """Most bytes that this rank's card held in each phase of a build and three steps."""
    placement, found = backend.placement, dict.fromkeys(PHASES, 0)

    def ends(phase: str) -> None:
        found[phase] = max(found[phase], placement.memory().peak)
        placement.reset_peak()

    def loss(outputs: Any) -> Any:
        computed = model_loss(outputs)
        ends("forward")
        return computed

    placement.reset_peak()
    factory = model_factory(
        {**COUNTED, "vocab_size": words},
        AdapterSection(r=16),
        attention="sdpa",
        dtype=torch.bfloat16,
        gradient_checkpointing=True,
    )
    precision = Precision(param_dtype="bfloat16", reduce_dtype="float32")
    context = build_context(factory=factory, precision=precision, backend=backend)
    engine = Zero(ZeroOptions(gather=gather)).build(context)
    ends("build")
    ids = torch.arange(256, device=placement.device)[None]
    for _ in range(3):
        engine.run_step([batch_of(ids)], loss, 2 * 255)
        ends("backward")
        engine.update(1e-3, 1.0)
        ends("update")
    engine.close()
    return found


def of_ways(words: int) -> dict[str, dict[str, int]]:
    """Way of gathering -> phase -> bytes of the first of two cards."""
    pytest.importorskip("anygauge_sim", reason="needs `make plugins`")
    cards = {"ANYGAUGE_SIM_LOCKS": "", "ANYGAUGE_SIM_CARDS": "2"}
    return {
        way: on_ranks(peaks, way, words, world=2, backend="sim", environment=cards)[0]
        for way in ("module", "layer", "flat")
    }


@pytest.mark.slow
def test_flat_layers_need_least_in_forward_and_backward() -> None:
    found = of_ways(2_000)
    for phase in ("forward", "backward"):
        assert found["flat"][phase] < 0.8 * found["layer"][phase]
    # What stays whole: half of two tables more, and the buffers.
    more = found["flat"]["build"] - found["layer"]["build"]
    assert 0 < more < 2_000 * 256 * 2 + 2 * 2 * 256 * (4 * 256 + 3 * 688 + 200)


LLAMA_3 = {"8B": (4096, 14336, 32), "70B": (8192, 28672, 80)}


@pytest.mark.slow
@pytest.mark.parametrize("name", LLAMA_3)
def test_what_flat_layers_cost_is_what_the_docs_say(name: str) -> None:
    """Weights that a device holds, and has gathered, of 8 with an adapter."""
    width, inner, layers = LLAMA_3[name]
    config = {**CONFIG, "vocab_size": 128_256, "hidden_size": width, "intermediate_size": inner}
    heads = {"num_attention_heads": width // 128, "num_key_value_heads": 8}
    fields = {**config, **heads, "num_hidden_layers": layers, "tie_word_embeddings": False}
    factory = model_factory(fields, AdapterSection(r=16), dtype=torch.bfloat16)
    model = factory.adapt(factory.skeleton())
    precision = Precision(param_dtype="bfloat16", reduce_dtype="float32")
    workload = a_workload(Unopened(), precision, skeleton=model, world_size=8)
    row = [f"Llama 3 {name}", f"{weight_bytes(not_flat(model), 'bfloat16') / 1e9:.1f}"]
    for gather in ("flat", "layer"):
        device = zero_memory(ZeroOptions(gather=gather), workload).device
        for moment in (of.LOSS, of.BACKWARD):
            row.append(f"{(device[moment][WEIGHTS] + device[moment][GATHERED]) / 1e9:.1f}")
    docs = (Path(__file__).parents[2] / "docs/measured.md").read_text(encoding="utf-8")
    assert f"| {' | '.join(row)} |" in docs


if __name__ == "__main__":
    from tests.strategies import test_zero_memory as by_name  # ranks import what they run

    print(f"| classes | gather | {' | '.join(PHASES)} |\n|---:|---|{'---:|' * len(PHASES)}")
    for count in (2_000, 32_000):
        for name, of_phases in by_name.of_ways(count).items():
            figures = " | ".join(f"{of_phases[phase] / 2**20:,.1f}" for phase in PHASES)
            print(f"| {count:,} | `{name}` | {figures} |")
