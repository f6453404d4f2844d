"""How factors begin: peft's own draws, the same on every strategy, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from anygauge.config.schema import AdapterSection
from anygauge.config.sections import AdapterGroup
from anygauge.interface import ModelError, UnsupportedError
from anygauge.models.adapter import load_adapter
from anygauge.models.export import save_adapter
from anygauge.models.initial import changes_base
from tests.helpers.build import model_factory, on_host
from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import TINY, run_file, trained_here
from tests.models.test_adapter_start import adapted

STRATEGIES = {
    "ddp": {"name": "ddp"},
    "fsdp": {"name": "fsdp"},
    "zero": {"name": "zero", "stage": 3},
}


def factors(init: Any) -> tuple[torch.Tensor, torch.Tensor]:
    layer = adapted(AdapterSection(r=4, init=init)).get_submodule(
        "base_model.model.model.layers.0.mlp.up_proj"
    )
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight


def test_what_each_begins_with() -> None:
    usual, zero = factors(True)
    normal, also_zero = factors("gaussian")
    assert not zero.any() and not also_zero.any() and not torch.equal(usual, normal)
    assert normal.std().item() == pytest.approx(1 / 4, rel=0.3)
    a, b = factors("orthogonal")
    assert a.any() and b.any()
    torch.testing.assert_close(b @ a, torch.zeros(64, 32), rtol=0, atol=1e-6)
    a, b = factors(False)
    assert a.any() and b.any() and (b @ a).abs().max() > 1e-3


@pytest.mark.parametrize("init", ["corda", "lora_ga", "mica", "eva", "loftq"])
def test_what_needs_more_than_a_seed_is_refused(init: str) -> None:
    with pytest.raises(UnsupportedError, match=f"adapter.init: {init} is not supported: it"):
        factors(init)


def test_what_peft_does_not_know_peft_refuses() -> None:
    with pytest.raises(ModelError, match=r"peft refused it: Unknown initialization.*'other'"):
        factors("other")
    with pytest.raises(ModelError, match="rank to be even, got 3"):
        adapted(AdapterSection(r=3, init="orthogonal"))


@pytest.mark.parametrize("init", ["pissa", "olora", "pissa_niter_4"])
@pytest.mark.parametrize("rslora", [False, True])
def test_factors_out_of_the_base_are_saved_for_the_base_as_it_was(
    init: str, rslora: bool, tmp_path: Path
) -> None:
    groups = [AdapterGroup(targets=["up_proj"], r=2, alpha=8)]
    section = AdapterSection(r=4, init=init, rslora=rslora, groups=[] if rslora else groups)
    made = model_factory(TINY, section)
    base = on_host(made)
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        model: Any = made.adapt(base)
        torch.testing.assert_close(model(input_ids=ids).logits, plain, rtol=1e-4, atol=1e-5)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for parameter in trained.values():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        logits = model(input_ids=ids).logits
    assert (logits - plain).abs().max() > 1e-2
    shapes = {name: tuple(p.shape) for name, p in trained.items()}
    save_adapter(
        model, trained, tmp_path, shapes=shapes, base=made.section, first=made.first_factors
    )
    again = on_host(made)
    loaded = load_adapter(again, tmp_path)
    torch.testing.assert_close(loaded(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-5)


def test_a_saved_adapter_has_its_factors(tmp_path: Path) -> None:
    common: dict[str, Any] = {"strategy": {"name": "single"}}
    run = trained_here(run_file(tmp_path, **common, adapter={"r": 4, "init": "orthogonal"}))
    config = json.loads((run.folder / "adapter" / "adapter_config.json").read_text())
    assert config["init_lora_weights"] == "orthogonal"
    start = str(run.folder / "adapter")
    from_there = adapted(AdapterSection(start_from=start))
    saved = load_file(run.folder / "adapter" / "adapter_model.safetensors")
    assert len(saved) == sum(p.requires_grad for p in from_there.parameters())
    with pytest.raises(ModelError, match=r"adapter\.init is gaussian, but"):
        adapted(AdapterSection(start_from=start, init="gaussian"))


@pytest.mark.slow
@pytest.mark.parametrize("init", ["gaussian", "orthogonal", False, "pissa", "olora"])
def test_ranks_have_the_losses_of_one(tmp_path: Path, init: Any) -> None:
    def file(name: str, strategy: dict[str, Any], devices: int) -> Path:
        (tmp_path / name).mkdir()
        path = run_file(tmp_path / name, name=name, adapter={"r": 4, "init": init})
        fields = yaml.safe_load(path.read_text())
        fields["strategy"], fields["launch"] = strategy, {"devices": devices}
        fields["precision"] = {"param_dtype": "float32"}
        path.write_text(yaml.safe_dump(fields))
        return path

    alone = trained_here(file("one", {"name": "single"}, 1))
    report = json.loads((alone.folder / "report.json").read_text())
    assert report["verified"]["logits"] < 1e-3
    before = {name: s for name, s in STRATEGIES.items() if name != "fsdp"}
    chosen = before if changes_base(init) else STRATEGIES
    parts = [RunPart(file=str(file(name, one, 2))) for name, one in chosen.items()]
    for run in finished(parts):
        assert run.steps("loss") == pytest.approx(alone.steps("loss"), abs=1e-5), run.folder
