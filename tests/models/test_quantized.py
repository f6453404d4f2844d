"""A quantized base: its codes, what is saved beside an adapter, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anygauge.config.load import load_run_file
from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.config.sections import QuantizeSection
from anygauge.interface import AnygaugeError, ModelError, UnsupportedError
from anygauge.launch.request import read_request
from anygauge.models.factory import dtype_name
from anygauge.models.generate import load_for_inference
from anygauge.models.merge import merge
from anygauge.models.quantization import RECORD_FILE, refuse_format
from anygauge.models.quantized import (
    QuantizedLinear,
    keep_scales,
    quantize_layers,
    quantized_layers,
    transformers_config,
)
from anygauge.models.result_files import ResultFiles
from anygauge.models.tokenizer import load_tokenizer
from anygauge.models.verify import probe_tokens
from anygauge.registry import Registry
from anygauge.training.build_strategy import check_quantized
from tests.helpers.build import model_factory, on_host
from tests.helpers.runs import TINY, Run, anygauge, run_file, tiny_model, trained_here

HOST = torch.device("cpu")
SECTIONS = [
    QuantizeSection(type="nf4"),
    QuantizeSection(type="nf4", double_quantization=True),
    QuantizeSection(type="int8"),
    QuantizeSection(type="nf4", compute_dtype="float32"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama in bfloat16."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model().to(torch.bfloat16).save_pretrained(folder)
    return folder


def upstream(model: Path, section: QuantizeSection, dtype: torch.dtype) -> Any:
    """As a user of transformers loads it."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        model,
        **{dtype_name(): dtype},
        quantization_config=transformers_config(section, dtype),
        device_map={"": "cpu"},
        attn_implementation="eager",
    )
    keep_scales(loaded)
    return loaded.eval()


def ours(model: Path, section: QuantizeSection, dtype: torch.dtype) -> Any:
    factory = model_factory(
        ModelSection(name=str(model), quantize=section), AdapterSection(), dtype=dtype
    )
    made = on_host(factory, dtype)
    return made.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("section", SECTIONS, ids=["nf4", "double", "int8", "compute"])
def test_codes_and_logits_are_those_of_transformers(
    model: Path, section: QuantizeSection, dtype: torch.dtype
) -> None:
    theirs, mine = upstream(model, section, dtype), ours(model, section, dtype)
    layers = quantized_layers(mine)
    assert len(layers) == 2 * 7
    for name, parameter in theirs.named_parameters():
        value = mine.get_parameter(name)
        assert (name in layers) == (not parameter.is_floating_point()), name
        assert torch.equal(value, parameter), name
    probe = probe_tokens(512)
    with torch.no_grad():
        found, expected = (m(input_ids=probe).logits for m in (mine, theirs))
    assert torch.allclose(found.float(), expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("section", SECTIONS[:3], ids=["nf4", "double", "int8"])
def test_drawn_weights_are_quantized_as_read_ones_are(section: QuantizeSection) -> None:
    def made(**more: Any) -> Any:
        factory = model_factory(
            ModelSection(config=TINY, tokenizer="none", **more),
            AdapterSection(),
            dtype=torch.bfloat16,
            seed=3,
        )
        return on_host(factory, torch.bfloat16)

    plain, quantized = made(), made(quantize=section)
    found = quantized_layers(quantized)
    assert found
    for name, layer in found.items():
        assert torch.equal(layer.encode(plain.get_parameter(name).detach()), layer.weight), name


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """LoRA on nf4 with double quantization, in float32."""
    folder = tmp_path_factory.mktemp("run")
    section = {"type": "nf4", "double_quantization": True}
    path = run_file(folder, model=fields(folder, model, section), train=STRONG, strategy=SINGLE)
    return trained_here(path)


SINGLE = {"name": "single"}
STRONG = {"optimizer": {"lr": 3.0e-2}, "steps": 6}


def fields(folder: Path, model: Path, quantize: Any) -> dict[str, Any]:
    return {"name": str(model), "tokenizer": str(folder / "tokenizer"), "quantize": quantize}


def section_of(run: Run, model: Path) -> ModelSection:
    tokenizer = run.folder.parent.parent / "tokenizer"
    return ModelSection(name=str(model), tokenizer=str(tokenizer), quantize=SECTIONS[1])


def test_a_result_tells_of_its_base_and_was_verified_on_it(run: Run) -> None:
    report = json.loads((run.folder / "report.json").read_text())
    assert report["choices"]["quantized_base"] == "nf4, double quantization, by bitsandbytes"
    assert report["verified"]["reloaded"]
    assert report["verified"]["logits"] < 1e-5 < report["verified"]["effect"]
    record = json.loads((run.folder / "adapter" / RECORD_FILE).read_text())
    assert record["type"] == "nf4" and record["double_quantization"]
    assert record["quantized_from"] == "float32"
    assert "quantized: nf4, double" in (run.folder / "adapter" / "README.md").read_text()
    assert run.steps("loss")[-1] < run.steps("loss")[0]


def test_an_adapter_loads_in_plain_peft(run: Run, model: Path) -> None:
    from peft import PeftModel

    probe = probe_tokens(512)
    plain = PeftModel.from_pretrained(
        upstream(model, SECTIONS[1], torch.float32), str(run.folder / "adapter")
    )
    mine = load_for_inference(
        ModelSection(name=str(model)),  # the record beside the adapter tells the rest
        adapter=run.folder / "adapter",
        device=HOST,
        dtype=torch.float32,
        attention="eager",
    )
    with torch.no_grad():
        found, expected = (m(input_ids=probe).logits for m in (mine, plain))
    assert torch.equal(found, expected)


def test_merged_into_dequantized_weights(run: Run, model: Path, tmp_path: Path) -> None:
    section = section_of(run, model)
    files = ResultFiles(section, load_tokenizer(section))
    report = merge(section, run.folder / "adapter", tmp_path / "merged", files)
    assert report.quantized == "nf4, double quantization, by bitsandbytes"
    assert report.from_codes is not None and report.from_codes < 1e-5
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "from the adapter on codes (nf4, double quantization" in card
    # Without an adapter's share, what lies there is the codes' values, not the original's.
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    layer: Any = ours(model, SECTIONS[1], torch.float32).get_submodule(name)
    factors = load_file(run.folder / "adapter" / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{name}.lora_{one}.weight"] for one in "AB")
    expected = (layer.dequantize() + 32 / 4 * (b @ a)).to(torch.bfloat16)
    assert torch.allclose(weights[f"{name}.weight"].float(), expected.float(), atol=1e-2)
    assert isinstance(layer, QuantizedLinear)


def test_a_merge_that_misses_the_codes_is_refused(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anygauge.models.merge._on_codes", lambda *_: torch.ones(1, 16, 512))
    section = section_of(run, model)
    with pytest.raises(ModelError, match=r"dequantized base .* went wrong"):
        files = ResultFiles(section, load_tokenizer(section))
        merge(section, run.folder / "adapter", tmp_path / "merged", files)
    assert not (tmp_path / "merged").exists()


def test_a_run_of_int8_is_verified_and_answers(model: Path, tmp_path: Path) -> None:
    found = trained_here(
        run_file(tmp_path, model=fields(tmp_path, model, "int8"), train=STRONG, strategy=SINGLE)
    )
    report = json.loads((found.folder / "report.json").read_text())
    assert report["verified"]["logits"] < 1e-4 < report["verified"]["effect"]
    done = anygauge(["generate", found.folder, "--prompt", "x", "--max-new-tokens", "3"])
    assert done.returncode == 0, done.stderr


REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({"adapter": None}, "nf4", "quantized weights cannot be trained.*Add an adapter section"),
    ({"adapter": {"r": 4, "dora": True}}, "int8", "adapter.dora: peft cannot load"),
    ({"strategy": {"name": "ddp", "tp": 2}}, "nf4", "strategy.tp cuts weights by rows"),
    ({"strategy": {"name": "fsdp"}, "adapter": {"r": 4, "dora": True}}, "nf4", "adapter.dora"),
    ({}, {"type": "int8", "double_quantization": True}, "for type nf4 alone"),
    ({}, "nf3", "nf4"),
]


@pytest.mark.parametrize(("changes", "quantize", "said"), REFUSED)
def test_refused_before_ranks_start(
    model: Path, tmp_path: Path, changes: dict[str, Any], quantize: Any, said: str
) -> None:
    changes = {"strategy": {"name": "ddp"}, **changes}
    path = run_file(tmp_path, model=fields(tmp_path, model, quantize), **changes)
    with pytest.raises(AnygaugeError, match=said):
        read_request(path, [], {"launch.devices": 2}, need_device=True)


def test_a_device_without_it_says_why(model: Path, tmp_path: Path) -> None:
    backend = Registry.load().create_backend("hpu")
    run = load_run_file(run_file(tmp_path, model=fields(tmp_path, model, "int8")))
    with pytest.raises(UnsupportedError, match=r"lacks 'quantized_base_int8'.*for nf4 alone"):
        check_quantized(run, backend, ranks_run_here=True)


@pytest.mark.parametrize(
    ("method", "quantize", "said"),
    [
        *((one, False, rf"format '{one}'.*set model.quantize") for one in ("gptq", "awq")),
        ("bitsandbytes", False, "format 'bitsandbytes'.*set model.quantize"),
        # A format that becomes plain numbers is not quantized again.
        ("fp8", True, r"model.quantize: .*'fp8'.*Leave model.quantize"),
    ],
)
def test_a_folder_of_codes_is_refused(method: str, quantize: bool, said: str) -> None:
    config = SimpleNamespace(quantization_config={"quant_method": method})
    with pytest.raises(UnsupportedError, match=said):
        refuse_format(config, quantize=quantize)


def test_fused_experts_are_refused() -> None:
    fused = torch.nn.Module()
    fused.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 3, 4))
    with pytest.raises(UnsupportedError, match=r"gate_up_proj.*experts as one tensor"):
        quantize_layers(fused, SECTIONS[0], torch.float32)
