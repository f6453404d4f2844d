"""Adapters on a quantised base: each strategy has the losses of plain peft and transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.config.sections import OptimizerSection, QuantiseSection
from anygauge.interface import Backend, Precision
from anygauge.kernels.loss import model_loss
from anygauge.models.factory import dtype_name
from anygauge.models.quantised import Nf4Linear, QuantisedLinear, transformers_config
from anygauge.registry import Registry
from anygauge.strategies.zero_versions import offloads_gradients
from anygauge.training.optimizer import optimizer_factory
from tests.helpers.build import build_context, model_factory, rank_of_world, strategy_of
from tests.helpers.ranks import on_ranks
from tests.strategies.matrix import NOTHING_RESIDENT
from tests.strategies.parity_rank import ParityCase, placed

NF4 = {"type": "nf4"}
DOUBLE = {"type": "nf4", "double_quantisation": True}
INT8 = {"type": "int8"}


STEPS, ROWS, LR = 5, 4, 5e-3
CASE = ParityCase(strategy="")


def rows() -> torch.Tensor:
    """(ROWS, 16) tokens of each step."""
    return torch.randint(1, 255, (ROWS, 16), generator=torch.Generator().manual_seed(0))


def live_bytes() -> int:
    """Of all tensors in this process's memory, each storage counted once."""
    found = {}
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter) and not one.is_meta:
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@contextlib.contextmanager
def peak_of_encoding() -> Iterator[list[int]]:
    """What is in memory after each tensor was quantised, the tensor and its codes included."""
    peaks = [0]

    def counted(self: Any, weight: torch.Tensor) -> torch.Tensor:
        codes = plain(self, weight)
        peaks.append(live_bytes())
        return codes

    plain = Nf4Linear.encode
    with mock.patch.object(Nf4Linear, "encode", counted):
        yield peaks


def trained(backend: Backend, model: str, cases: list[Any]) -> list[dict[str, Any]]:
    return [trained_one(backend, model, *case) for case in cases]


def trained_one(
    backend: Backend, model: str, name: str, options: Any, quantise: Any, dora: bool, dtype: str
) -> dict[str, Any]:
    """Losses of all ranks, this rank's bytes of codes by weight, and bytes of memory."""
    strategy, share = strategy_of(name, options, *rank_of_world())
    before = live_bytes()
    with peak_of_encoding() as peaks:
        engine = strategy.build(
            build_context(
                factory=model_factory(
                    ModelSection(name=model, quantise=quantise),
                    AdapterSection(r=4, dora=dora),
                    attention="sdpa",
                    dtype=getattr(torch, dtype),
                ),
                optimizer=optimizer_factory(OptimizerSection(name="adamw", lr=LR)),
                precision=Precision(param_dtype=dtype, reduce_dtype="float32"),
                backend=backend,
                share=share,
                accumulation=ROWS // share.count,
            )
        )
    held = live_bytes() - before
    losses = []
    for _ in range(STEPS):
        batches = [
            placed(CASE, ids, ids, share, backend.placement.device)
            for ids in rows().split(1)[share.index :: share.count]
        ]
        sums = engine.run_step(batches, model_loss, ROWS * 15).loss_sums
        engine.update(LR, 1.0)
        losses += backend.collectives.sum_on_host([float(sum(map(float, sums)))])
    codes = codes_of(engine.model)
    engine.close()
    return {"losses": losses, "codes": codes, "peak": max(peaks) - before, "held": held}


def codes_of(model: torch.nn.Module) -> dict[str, list[int]]:
    """The codes of each weight that this rank has, or of its part of it."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            weight: Any = module.weight
            part = weight.to_local() if hasattr(weight, "to_local") else weight
            part = getattr(weight, "ds_tensor", part)
            if not part.is_meta:
                assert not part.is_floating_point(), (name, part.dtype)
                found[name.rpartition("model.")[2]] = part.flatten().tolist()
    return found


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


FLOAT32 = "float32"
SINGLE = [
    *(("single", {}, q, d, FLOAT32) for q in (NF4, DOUBLE) for d in (False, True)),
    ("single", {}, INT8, False, FLOAT32),
    ("single", {}, NF4, False, "bfloat16"),
]


@pytest.mark.slow
def test_single_has_the_losses_of_peft_and_transformers(model: Path) -> None:
    (found,) = on_ranks(trained, str(model), SINGLE[:-1], world=1)
    for (_, _, quantise, dora, _), one in zip(SINGLE[:-1], found, strict=True):
        expected = by_hand(model, quantise, dora)
        assert one["losses"] == pytest.approx(expected, rel=1e-5), (quantise, dora)
        assert expected[-1] < expected[0] - 1


# Older releases of DeepSpeed gather weights of one type alone, and are refused.
ZERO3 = {"stage": 3} if offloads_gradients() else {"stage": 2}
USUAL: list[Any] = [
    ("fsdp", {}, NF4, False, FLOAT32),
    ("zero", ZERO3, NF4, False, FLOAT32),
    *(
        (name, options, NF4, False, "bfloat16")
        for name, options in (
            ("ddp", {}),
            ("fsdp", {}),
            ("fsdp", {"gather": "step"}),
            ("zero", {"stage": 2}),
            ("zero", ZERO3),
            ("ddp", {"pp": 2}),
        )
    ),
]
MORE: list[Any] = [
    *(
        (*case, FLOAT32)
        for case in (
            *(("ddp", {}, q, False) for q in (NF4, INT8)),
            *(("fsdp", {}, q, False) for q in (DOUBLE, INT8)),
            *(("zero", {"stage": 3}, q, d) for q in (NF4, DOUBLE) for d in (False, True)),
            ("zero", {"stage": 3}, INT8, False),
            ("zero", {"stage": 3, "offload": "both"}, NF4, False),
            ("zero", {"stage": 2}, NF4, False),
            ("fsdp", {"gather": "step"}, DOUBLE, False),
            ("ddp", {"pp": 2}, DOUBLE, False),
            ("ddp", {"cp": 2}, NF4, False),
        )
    )
]


@pytest.mark.parametrize(
    "cases", [USUAL, pytest.param(MORE, marks=pytest.mark.slow)], ids=["usual", "more"]
)
def test_ranks_have_the_losses_of_one_and_a_part_of_its_codes(
    cases: list[Any], model: Path
) -> None:
    """To the byte: no engine converts them. One layer at most is in memory beside them."""
    (alone,) = on_ranks(trained, str(model), SINGLE, world=1)
    usual = {str(case[2:]): one for case, one in zip(SINGLE, alone, strict=True)}
    layer = 4 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    ranks = on_ranks(trained, str(model), cases, world=2)
    for case, *found in zip(cases, *ranks, strict=True):
        name, options, *_, dtype = case
        expected = usual[str(case[2:])]
        close = 1e-5 if dtype == FLOAT32 else 3e-3
        whole = options in ({}, {"cp": 2}, {"stage": 2}) and name != "fsdp"
        for one in found:
            assert one["losses"] == pytest.approx(expected["losses"], rel=close), case
        for key, codes in expected["codes"].items():
            # Parts are rows one behind the other, or layers on one of the ranks.
            parts = [code for one in found for code in one["codes"].get(key, [])]
            assert parts == (codes + codes if whole else codes), (case, key)
        # Rank 0 of DeepSpeed reads for both.
        for one in found if name == "fsdp" else found[:1]:
            if cases is USUAL and dtype == FLOAT32:
                assert 0 < one["peak"] <= one["held"] + layer, case


@pytest.mark.parametrize(
    ("strategy", "ranks", "share"), [("single", 1, 1.0), ("fsdp", 2, 0.5), ("zero", 2, 0.5)]
)
def test_a_footprint_counts_codes_as_bytes_and_their_scales(
    strategy: str, ranks: int, share: float, model: Path
) -> None:
    def weights(quantise: Any) -> tuple[int, int, int]:
        """(Footprint, bytes of codes, bytes of scales.)"""
        factory = model_factory(
            ModelSection(name=str(model), quantise=quantise),
            AdapterSection(r=4),
            dtype=torch.bfloat16,
        )
        context = build_context(
            factory=factory,
            precision=Precision(param_dtype="bfloat16", reduce_dtype="float32"),
            backend=Registry.load().create_backend("cpu"),
            rank=0,
            world_size=ranks,
        )
        skeleton = factory.adapt(factory.skeleton())
        workload = dataclasses.replace(context.workload, skeleton=skeleton)
        # Without codes, fsdp would keep embedding and output layer whole.
        options = {"fsdp": {"gather": "step"}, "zero": {"options": NOTHING_RESIDENT}}.get(
            strategy, {}
        )
        made, _ = strategy_of(strategy, options, 0, ranks)
        codes = sum(p.numel() for p in skeleton.parameters() if not p.is_floating_point())
        scales = sum(b.numel() * b.element_size() for b in skeleton.buffers() if b.is_meta)
        return made.footprint(workload).weights, codes, scales

    plain, *_ = weights(None)
    nf4, codes, scales = weights("nf4")
    assert codes > 0 and scales > 0
    # A byte of codes stands for two numbers of two bytes.
    assert plain - nf4 == pytest.approx((4 * codes - codes) * share - scales, rel=0.01)
