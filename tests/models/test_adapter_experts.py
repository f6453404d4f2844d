"""Adapters on tensors that are not layers: fused experts, alone and beside layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.config.schema import ModelSection
from anygauge.interface import ModelError
from anygauge.models.adapter import adapted_layers, load_adapter
from anygauge.models.export import save_adapter
from anygauge.models.files import WeightFiles
from anygauge.models.merge import merge
from anygauge.models.result_files import ResultFiles
from tests.helpers.build import model_factory, on_host
from tests.helpers.tokenizer import make_tokenizer
from tests.models.families import adapted, saved

pytest.importorskip("transformers.core_model_loading", reason="experts are layers before")

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
IDS = torch.arange(3, 19)[None]


def with_effect(model: Any) -> dict[str, torch.Tensor]:
    """Make an adapter say something; returns its tensors."""
    generator = torch.Generator().manual_seed(1)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return {name: p.detach() for name, p in trained.items()}


def write(model: Any, base: Path, folder: Path) -> Path:
    trained = with_effect(model)
    shapes = {name: tuple(t.shape) for name, t in trained.items()}
    save_adapter(model, trained, folder, shapes=shapes, base=ModelSection(name=str(base)))
    return folder


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_plain_peft_loads_it_and_it_merges(family: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = saved(family, tmp_path / "base")
    model = adapted(base, target_parameters=EXPERTS)
    folder = write(model, base, tmp_path / "adapter")
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        with model.disable_adapter():
            plain = model(input_ids=IDS).logits
        assert (logits - plain).abs().max() > 1e-3

        fresh = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        again = PeftModel.from_pretrained(fresh, folder).eval()(input_ids=IDS).logits
        torch.testing.assert_close(again, logits, atol=1e-5, rtol=1e-5)

        section = ModelSection(name=str(base), tokenizer=str(tmp_path))
        files = ResultFiles(section, make_tokenizer(tmp_path))
        report = merge(section, folder, tmp_path / "merged", files)
        assert report.from_adapter < 1e-5
        merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        torch.testing.assert_close(
            merged.eval()(input_ids=IDS).logits, logits, atol=1e-5, rtol=1e-5
        )
    assert WeightFiles(tmp_path / "merged").names() == WeightFiles(base).names()


def test_the_experts_of_every_layer_are_named_once(tmp_path: Path) -> None:
    model = adapted(saved("mixtral", tmp_path), targets=["q_proj"], target_parameters=EXPERTS)
    assert sorted(adapted_layers(model)) == [
        f"model.layers.{layer}.{name}"
        for layer in range(2)
        for name in ("mlp.experts.down_proj", "mlp.experts.gate_up_proj", "self_attn.q_proj")
    ]
    assert model.peft_config["default"].target_parameters == set(EXPERTS)


def test_layers_that_peft_takes_for_experts_carry_their_own_adapter(tmp_path: Path) -> None:
    """`gate_proj` and its like: peft would adapt the routed experts in place of the shared ones."""
    base = saved("deepseek_v3", tmp_path / "base")
    model = adapted(base)
    layers = adapted_layers(model)
    assert "model.layers.1.mlp.shared_experts.gate_proj" in layers
    assert "model.layers.0.mlp.up_proj" in layers
    assert not any(".experts." in name for name in layers)
    folder = write(model, base, tmp_path / "adapter")
    plain = model_factory(base)
    fresh = on_host(plain)
    again = load_adapter(fresh, folder)
    assert adapted_layers(again) == layers
    torch.testing.assert_close(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (["experts.gate_proj"], "no tensor is called 'experts.gate_proj'.*experts.gate_up_proj"),
        (["q_proj.weight"], "belongs to the layer 'model.layers.0.self_attn.q_proj'; name that in"),
    ],
)
def test_a_name_that_is_none_is_refused(tensors: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        adapted(saved("mixtral", tmp_path), target_parameters=tensors)


def test_what_peft_refuses_of_experts_it_says(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"peft refused it: lora\.ParamWrapper .*lora_dropout"):
        adapted(saved("mixtral", tmp_path), target_parameters=EXPERTS, dropout=0.1)
