"""What `single`, `ddp` and `fsdp` say of a rank's memory: how cases differ.

Weights, and bytes that are sent, are held against real ranks in `test_matrix`.
"""

from __future__ import annotations

from typing import Any

import pytest

from anygauge.config.schema import AdapterSection
from anygauge.interface import Precision, Share
from anygauge.interface import estimate as at
from anygauge.strategies.shared import footprint
from anygauge.strategies.shared.footprint import memory_of, update_made
from anygauge.strategies.shared.materialize import decoder_layers
from anygauge_cpu.backend import CpuBackend
from tests.helpers.build import a_workload, model_factory, strategy_of
from tests.helpers.runs import TINY

CONFIG = {**TINY, "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128}
MIXED = Precision(param_dtype="bfloat16", reduce_dtype="float32")


class _Device(CpuBackend):
    device_type = "card"


def _model(lora: bool) -> Any:
    factory = model_factory(CONFIG, AdapterSection(r=4) if lora else None)
    return factory.adapt(factory.skeleton())


def _numbers(lora: bool) -> tuple[int, int, int]:
    """Of what is outside of layers, of a layer, and of what is trained."""
    every = list((model := _model(lora)).parameters())
    layer = sum(p.numel() for p in next(iter(decoder_layers(model))).parameters())
    trained = sum(p.numel() for p in every if p.requires_grad)
    return sum(p.numel() for p in every) - 4 * layer, layer, trained


def _estimate(
    name: str, ranks: int = 2, *, lora: bool = False, micro_batches: int = 1, **options: Any
) -> Any:
    strategy, _ = strategy_of(name, options, 0, ranks)
    asked = {"world_size": ranks, "share": Share(0, ranks), "accumulation": micro_batches}
    return memory_of(strategy, a_workload(_Device(), MIXED, skeleton=_model(lora), **asked))


def test_a_replica_of_ddp_has_its_buckets_beside_what_one_rank_has() -> None:
    one, two = (_estimate(*way).device[at.EVALUATION] for way in (("single", 1), ("ddp", 2)))
    assert two == {**one, at.BUFFERS: 2 * _numbers(False)[2]}


@pytest.mark.parametrize("name", ["single", "ddp"])
def test_sums_of_micro_batches_are_there_before_the_next_one(name: str) -> None:
    trained = _numbers(False)[2]
    once, several = (_estimate(name, micro_batches=n).device for n in (1, 3))
    assert (once[at.BEGIN][at.GRADIENTS], several[at.BEGIN][at.GRADIENTS]) == (0, 4 * trained)
    assert several[at.COLLECT][at.GRADIENTS] == 6 * trained
    assert several[at.UPDATE] == once[at.UPDATE]


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp_gathers_two_layers_beside_the_root(ranks: int) -> None:
    root, layer, every = _numbers(False)
    device = _estimate("fsdp", ranks).device
    assert device[at.UPDATE][at.OPTIMIZER] == 8 * every // ranks
    for moment in (at.FORWARD, at.BACKWARD, at.END):
        assert device[moment][at.GATHERED] == 2 * (root + 2 * layer)
    assert device[at.LOSS][at.GATHERED] == 2 * (root + layer)
    assert device[at.END][at.BUFFERS] == 4 * layer
    at_once = _estimate("fsdp", ranks, gather="step").device
    assert at_once[at.FORWARD][at.GATHERED] == 2 * (every + layer)


def test_frozen_layers_have_two_buffers_and_an_adapters_gradients_are_added_up_whole() -> None:
    _, layer, trained = _numbers(True)
    frozen = layer - trained // 4
    device = _estimate("fsdp", lora=True).device
    assert device[at.UPDATE][at.GATHERED] == 4 * frozen
    assert device[at.FORWARD][at.GATHERED] == 4 * frozen + 4 * trained
    assert at.BUFFERS not in device[at.BEGIN]
    added_up = _estimate("fsdp", lora=True, micro_batches=3, offload="both").device
    assert added_up[at.BEGIN][at.GRADIENTS] == 4 * trained


def test_offload_moves_what_is_held_to_the_host() -> None:
    here, there = _estimate("fsdp"), _estimate("fsdp", offload="both")
    for kind in (at.WEIGHTS, at.OPTIMIZER, at.GRADIENTS):
        assert there.device[at.UPDATE].get(kind, 0) == 0
        assert there.host[at.UPDATE][kind] == here.device[at.UPDATE][kind]
    assert there.device[at.FORWARD][at.GATHERED] == here.device[at.FORWARD][at.GATHERED]
    assert here.copied_bytes == 0 < there.copied_bytes


def test_replicas_sum_over_ranks_of_the_same_place_and_rank_0_saves_all_on_the_host() -> None:
    estimate = _estimate("fsdp", 4, dp_replicate=2)
    found = {t.operation: t.group for t in estimate.traffic}
    assert found == {"all_gather": (0, 1), "reduce_scatter": (0, 1), "all_reduce": (0, 2)}
    assert 4 < estimate.host[at.SAVE][at.SAVED] / _numbers(False)[2] < 8


@pytest.mark.parametrize(
    ("at_once", "sizes", "made"), [(5, (2, 9, 2, 2, 2), 9), (9, (4, 4, 12), 12), (9, (4, 4, 4), 8)]
)
def test_an_update_makes_something_for_so_many_numbers_at_once(
    monkeypatch: pytest.MonkeyPatch, at_once: int, sizes: tuple[int, ...], made: int
) -> None:
    monkeypatch.setattr(footprint, "UPDATED_AT_ONCE", at_once)
    assert update_made(a_workload(_Device(), MIXED, update_bytes=1.0), sizes) == made
