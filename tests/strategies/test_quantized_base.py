"""Adapters on a quantized base: each strategy has the losses, and the codes, of one rank."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any
from unittest import mock

import pytest
import torch

from anygauge.interface import Backend
from anygauge.models.quantized import Nf4Linear
from anygauge.strategies.zero.deepspeed_versions import offloads_gradients
from tests.helpers.build import model_factory, on_host, rank_of_world
from tests.helpers.run_ranks import on_ranks
from tests.strategies.matrix import GATHERED, NOTHING_RESIDENT, PIPELINE, Result, of_ranks, results
from tests.strategies.parity_rank import CONFIG, ParityCase, built

NF4 = {"type": "nf4"}
DOUBLE = {"type": "nf4", "double_quantization": True}
INT8 = {"type": "int8"}
DORA = {"adapter": {"dora": True}}
BIASED = {**CONFIG, "num_hidden_layers": 2, "attention_bias": True}
WHOLE = {"gather": "step"}
# Older releases of DeepSpeed gather weights of one type alone, and are refused.
ZERO3 = {"stage": 3} if offloads_gradients() else {"stage": 2}


def of(strategy: str, options: dict[str, Any], codes: dict[str, Any], **more: Any) -> ParityCase:
    return ParityCase(strategy=strategy, options=options, quantize=codes, **more)


USUAL = [
    of("fsdp", {}, NF4),
    of("zero", ZERO3, NF4),
    *(
        of(name, options, NF4, dtype="bfloat16")
        for name, options in (
            *(("ddp", {}), ("fsdp", {}), ("fsdp", WHOLE), ("zero", {"stage": 2})),
            *(("zero", ZERO3), ("ddp", PIPELINE)),
        )
    ),
]
MORE = [
    *(of("ddp", {}, codes) for codes in (NF4, INT8)),
    *(of("fsdp", {}, codes) for codes in (DOUBLE, INT8)),
    *(of("zero", {"stage": 3}, codes, **more) for codes in (NF4, DOUBLE) for more in ({}, DORA)),
    of("zero", {"stage": 3}, INT8),
    of("zero", {"stage": 3, "options": NOTHING_RESIDENT}, NF4),
    of("zero", {"stage": 3, "offload": "both"}, NF4),
    of("zero", {"stage": 2}, NF4),
    of("fsdp", WHOLE, DOUBLE),
    of("ddp", PIPELINE, DOUBLE),
    of("ddp", GATHERED, NF4),
]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The section of a model in files."""
    folder = tmp_path_factory.mktemp("model")
    on_host(model_factory(BIASED)).save_pretrained(folder)
    return {"name": str(folder)}


@pytest.mark.parametrize(
    "cases", [USUAL, pytest.param(MORE, marks=pytest.mark.slow)], ids=["usual", "more"]
)
def test_ranks_have_the_losses_of_one_and_a_part_of_its_codes(
    cases: list[ParityCase], read: dict[str, str]
) -> None:
    """To the byte: no engine converts them."""
    cases = [dataclasses.replace(case, model=read) for case in cases]
    alone = {case.alone().name: case.alone() for case in cases}
    usual: dict[str, Result] = dict(zip(alone, results(1, [*alone.values()]), strict=True))
    for case, *found in zip(cases, *of_ranks(2, cases), strict=True):
        expected = usual[case.alone().name]
        close = 1e-5 if case.dtype == "float32" else 3e-3
        whole = case.options in ({}, GATHERED, {"stage": 2}) and case.strategy != "fsdp"
        for one in found:
            assert one["losses"] == pytest.approx(expected["losses"], rel=close), case
            # Of `zero`, parameters show no shards; a stage has the scales of its own layers.
            if case.strategy != "zero" and case.options != PIPELINE:
                said = one["footprint"]
                assert one["held"] + said["scales"] == said["weights"], case
        assert expected["codes"]
        for key, codes in expected["codes"].items():
            # Parts are rows one behind the other, or layers on one of the ranks.
            parts = [code for one in found for code in one["codes"].get(key, [])]
            assert parts == (codes + codes if whole else codes), (case, key)


def live_bytes() -> int:
    """Of all tensors in this process's memory, each storage counted once."""
    found = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and not one.is_meta:
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def peaks_while_loading(backend: Backend, cases: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Of each case: bytes at most after a tensor was quantized, and when all were."""
    found = []
    plain = Nf4Linear.encode
    for fields in cases:
        seen: list[int] = []

        def counted(self: Any, weight: torch.Tensor, seen: list[int] = seen) -> torch.Tensor:
            codes = plain(self, weight)
            seen.append(live_bytes())
            return codes

        before = live_bytes()
        with mock.patch.object(Nf4Linear, "encode", counted):
            engine, _, _ = built(ParityCase(**fields), backend, *rank_of_world())
        found.append((max(seen, default=0) - before, live_bytes() - before))
        engine.close()
    return found


def test_one_layer_at_most_is_in_memory_beside_codes(read: dict[str, str]) -> None:
    layer = 4 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    given = [{**dataclasses.asdict(case), "model": read} for case in USUAL[:2]]
    first, second = on_ranks(peaks_while_loading, given, world=2, alone=False)
    # Rank 0 of DeepSpeed reads for both.
    for peak, held in (*first, second[0]):
        assert 0 < peak <= held + layer
