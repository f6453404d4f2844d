"""Adapters on a quantised base: each strategy has the losses of plain peft and transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.config.sections import QuantiseSection
from anygauge.interface import Precision
from anygauge.models.factory import dtype_name
from anygauge.models.quantised import transformers_config
from anygauge.registry import Registry
from anygauge.registry.registry import load_options
from anygauge.strategies.zero_versions import offloads_gradients
from tests.helpers.build import build_context, model_factory
from tests.helpers.ranks import run_ranks
from tests.strategies.matrix import NOTHING_RESIDENT
from tests.strategies.quantised_rank import LR, STEPS, rows

NF4 = {"type": "nf4"}
DOUBLE = {"type": "nf4", "double_quantisation": True}
INT8 = {"type": "int8"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small Llama in float32, with biases in its attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def by_hand(model: Path, quantise: dict[str, Any], dora: bool = False) -> list[float]:
    """Losses of a loop with transformers, bitsandbytes and peft alone."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(
        model,
        **{dtype_name(): torch.float32},
        quantization_config=transformers_config(QuantiseSection(**quantise), torch.float32),
        device_map={"": "cpu"},
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=32, use_dora=dora, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(base, config).train()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0)
    losses = []
    tokens = rows()
    for _ in range(STEPS):
        logits = adapted(input_ids=tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1), reduction="sum"
        )
        (loss / (tokens.shape[0] * 15)).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def results(folder: Path, model: Path, cases: Any, world: int) -> list[list[dict[str, Any]]]:
    """Rank -> case -> what it found."""
    output = folder / f"ranks{world}"
    run_ranks(
        "tests.strategies.quantised_rank",
        [str(output), str(model), json.dumps(cases)],
        world=world,
        folder=folder,
    )
    return [json.loads(output.with_suffix(f".{r}.json").read_text()) for r in range(world)]


SINGLE = [
    *(("single", {}, q, d) for q in (NF4, DOUBLE) for d in (False, True)),
    ("single", {}, INT8, False),
]


@pytest.mark.slow
def test_single_has_the_losses_of_peft_and_transformers(model: Path, tmp_path: Path) -> None:
    (found,) = results(tmp_path, model, SINGLE, 1)
    for (_, _, quantise, dora), one in zip(SINGLE, found, strict=True):
        expected = by_hand(model, quantise, dora)
        assert one["losses"] == pytest.approx(expected, rel=1e-5), (quantise, dora)
        assert expected[-1] < expected[0] - 1


def test_one_layer_at_most_is_in_memory_beside_codes(model: Path, tmp_path: Path) -> None:
    cases = [("fsdp", {}, NF4, False)]
    # Older releases of DeepSpeed gather weights of one type alone, and are refused.
    cases += [("zero", {"stage": 3}, NF4, False)] if offloads_gradients() else []
    layer = 4 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    for rank, found in enumerate(results(tmp_path, model, cases, 2)):
        for case, one in zip(cases, found, strict=True):
            if case[0] == "fsdp" or rank == 0:
                assert one["peak"] <= one["held"] + layer, case
                assert one["peak"] > 0, case
            assert one["losses"] == pytest.approx(found[0]["losses"], rel=1e-5), case


DIVIDED: list[Any] = [
    *(("ddp", {}, q, False) for q in (NF4, INT8)),
    *(("fsdp", {}, q, False) for q in (NF4, DOUBLE, INT8)),
    *(("zero", {"stage": 3}, q, d) for q in (NF4, DOUBLE) for d in (False, True)),
    ("zero", {"stage": 3}, INT8, False),
    ("zero", {"stage": 3, "offload": "both"}, NF4, False),
    ("zero", {"stage": 2}, NF4, False),
    ("fsdp", {"gather": "step"}, DOUBLE, False),
    ("ddp", {"pp": 2}, DOUBLE, False),
    ("ddp", {"cp": 2}, NF4, False),
]


@pytest.mark.slow
def test_ranks_have_the_losses_of_one_and_a_part_of_its_codes(model: Path, tmp_path: Path) -> None:
    (alone,) = results(tmp_path, model, SINGLE, 1)
    usual = {str(case[2:]): one for case, one in zip(SINGLE, alone, strict=True)}
    ranks = results(tmp_path, model, DIVIDED, 2)
    for number, case in enumerate(DIVIDED):
        expected = usual[str(case[2:])]
        first, second = (rank[number] for rank in ranks)
        assert first["losses"] == pytest.approx(expected["losses"], rel=1e-5), case
        whole = case[1] in ({}, {"cp": 2}, {"stage": 2}) and case[0] != "fsdp"
        assert first["codes"] + second["codes"] == expected["codes"] * (2 if whole else 1), case


@pytest.mark.parametrize(
    ("strategy", "ranks", "share"), [("single", 1, 1.0), ("fsdp", 2, 0.5), ("zero", 2, 0.5)]
)
def test_a_footprint_counts_codes_as_bytes_and_their_scales(
    strategy: str, ranks: int, share: float, model: Path
) -> None:
    def weights(quantise: Any) -> tuple[int, int, int]:
        """(Footprint, bytes of codes, bytes of scales.)"""
        registry = Registry.load()
        factory = model_factory(
            ModelSection(name=str(model), quantise=quantise),
            AdapterSection(r=4),
            dtype=torch.bfloat16,
        )
        kind = load_options(registry.find_strategy(strategy), "strategy")
        context = build_context(
            factory=factory,
            precision=Precision(param_dtype="bfloat16", reduce_dtype="float32"),
            backend=registry.create_backend("cpu"),
            rank=0,
            world_size=ranks,
            micro_batch=1,
        )
        skeleton = factory.adapt(factory.skeleton())
        workload = dataclasses.replace(context.workload, skeleton=skeleton)
        # Without codes, fsdp would keep embedding and output layer whole.
        options = {"fsdp": {"gather": "step"}, "zero": {"options": NOTHING_RESIDENT}}.get(
            strategy, {}
        )
        made = registry.strategy(strategy)(kind(**options))
        codes = sum(p.numel() for p in skeleton.parameters() if not p.is_floating_point())
        scales = sum(b.numel() * b.element_size() for b in skeleton.buffers() if b.is_meta)
        return made.footprint(workload).weights, codes, scales

    plain, *_ = weights(None)
    nf4, codes, scales = weights("nf4")
    assert codes > 0 and scales > 0
    # A byte of codes stands for two numbers of two bytes.
    assert plain - nf4 == pytest.approx((4 * codes - codes) * share - scales, rel=0.01)
