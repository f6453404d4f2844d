"""Starting from a saved adapter: it decides what it is, and what is not trained is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from anygauge.config.load import check_paths, load_run_file
from anygauge.config.resolved import dump_run
from anygauge.config.schema import AdapterSection
from anygauge.config.sections import AdapterGroup
from anygauge.interface import ModelError, RunFileError, UnsupportedError
from anygauge.models.adapter import adapted_layers
from anygauge.models.factors import Factors
from tests.helpers.build import model_factory, on_host
from tests.helpers.runs import TINY, run_file, trained_here


def factory(adapter: AdapterSection | None, dtype: torch.dtype = torch.float32) -> Any:
    return model_factory(TINY, adapter, attention="eager", dtype=dtype)


def adapted(adapter: AdapterSection, dtype: torch.dtype = torch.float32) -> Any:
    made = factory(adapter, dtype)
    model = on_host(made, dtype)
    return made.adapt(model)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter made by peft alone: DoRA with a pattern of ranks, its factors not zero."""
    from peft import LoraConfig, get_peft_model

    made = factory(None)
    base = on_host(made)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "up_proj", "embed_tokens"],
        rank_pattern={"layers.1.mlp.up_proj": 2},
        use_dora=True,
        use_rslora=True,
        lora_dropout=0.3,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base, config)
    folder = tmp_path_factory.mktemp("plain") / "adapter"
    model.save_pretrained(str(folder), save_embedding_layers=False)
    torch.manual_seed(1)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        tensors[name] = tensor + 0.01 * torch.rand_like(tensor)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def changed(plain: Path, folder: Path, **fields: Any) -> AdapterSection:
    """A copy of the adapter whose configuration says something else too."""
    config = {**json.loads((plain / "adapter_config.json").read_text()), **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    data = (plain / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(data)
    return AdapterSection(start_from=str(folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_saved_adapter_decides_everything_but_dropout(plain: Path, dtype: torch.dtype) -> None:
    from peft import get_peft_model_state_dict

    model = adapted(AdapterSection(start_from=str(plain), dropout=0.2), dtype)
    layers = adapted_layers(model)
    assert len(layers) == 5
    assert layers["model.layers.0.mlp.up_proj"] == Factors(4, 8.0)
    assert layers["model.layers.1.mlp.up_proj"] == Factors(2, 8.0)
    config = model.peft_config["default"]
    assert (config.use_dora, config.use_rslora, config.lora_dropout) == (True, True, 0.2)
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    saved = load_file(plain / "adapter_model.safetensors")
    assert state.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(state[name], tensor.to(dtype)), name
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == len(saved) and {p.dtype for p in trained} == {dtype}


def test_equal_fields_are_no_contradiction(plain: Path) -> None:
    section = AdapterSection(
        start_from=str(plain),
        r=4,
        alpha=8,
        dora=True,
        rslora=True,
        targets=["up_proj", "embed_tokens", "q_proj"],
        groups=[AdapterGroup(targets=["layers.1.mlp.up_proj"], r=2)],
    )
    assert len(adapted_layers(adapted(section))) == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 16}, r"adapter\.r is 16, but .* has 4 "),
        ({"alpha": 32}, r"adapter\.alpha is 32\.0, but .* has 8 "),
        ({"dora": False}, r"adapter\.dora is False, but .* has True"),
        ({"rslora": False}, r"adapter\.rslora is False, but .* has True"),
        (
            {"targets": ["q_proj", "up_proj", "v_proj"]},
            r"adapter\.targets .*self_attn\.v_proj is r 16, .*, but .* has none",
        ),
        (
            {"groups": [AdapterGroup(targets=["up_proj"], r=2)], "r": 4, "alpha": 8,
             "targets": ["q_proj", "embed_tokens"]},
            r"adapter\.groups: .*layers\.0\.mlp\.up_proj is r 2, alpha 8, but .* has r 4, alpha 8",
        ),
    ],
)  # fmt: skip
def test_fields_that_differ_are_refused_with_both_values(
    plain: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        adapted(AdapterSection(start_from=str(plain), **fields))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "PREFIX_TUNING"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"bias": "all"}, 'bias: "all"'),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"ensure_weight_tying": True}, "ensure_weight_tying"),
        ({"lora_bias": True}, "lora_bias"),
        ({"invented_after_this_peft": 3}, "invented_after_this_peft"),
    ],
)
def test_kinds_that_are_not_trained_are_refused_by_name(
    plain: Path, tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        factory(changed(plain, tmp_path, **fields)).adapt(factory(None).skeleton())


def test_folders_that_hold_no_sound_adapter_are_refused(plain: Path, tmp_path: Path) -> None:
    section = changed(plain, tmp_path)
    weights = tmp_path / "adapter_model.safetensors"

    def refused(match: str) -> None:
        with pytest.raises(ModelError, match=match):
            adapted(section)

    tensors = load_file(weights)
    first = next(iter(tensors))
    save_file({**tensors, first: tensors[first][:1].clone()}, weights)
    refused(r"1 tensors .*: its shape is \(.*\), but this model needs \(")
    save_file({**tensors, first: tensors[first] * torch.nan}, weights)
    refused("values that are not numbers")
    save_file({name: t for name, t in tensors.items() if name != first}, weights)
    refused("1 tensors are missing, .*: its shape is missing, but this model needs")
    weights.write_bytes(b"\x10\x00")
    refused("is it whole")
    weights.unlink()
    refused(r"adapter_model\.safetensors is missing")
    (tmp_path / "adapter_config.json").write_text("{")
    weights.write_bytes(b"")
    refused(r"adapter_config\.json cannot be read as JSON \(Expecting property")


def test_the_path_is_relative_to_the_run_file_and_survives_the_resolved_one(
    plain: Path, tmp_path: Path
) -> None:
    path = run_file(tmp_path, adapter={"start_from": "first"})
    fields = yaml.safe_load(path.read_text())
    del fields["adapter"]["r"]
    path.write_text(yaml.safe_dump(fields))
    loaded = load_run_file(path)
    with pytest.raises(RunFileError, match=r"adapter\.start_from: no such folder"):
        check_paths(loaded)
    (tmp_path / "first").symlink_to(plain)
    check_paths(loaded)
    assert loaded.adapter is not None
    assert loaded.adapter.start_from == str(tmp_path / "first")
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_run(loaded))
    again = load_run_file(resolved)
    assert again == loaded
    assert again.adapter is not None
    assert again.adapter.own_fields == frozenset(), "defaults are not written as if they were given"


RSLORA = {"rslora": True, "alpha": 16, "groups": [{"targets": ["up_proj"], "r": 2, "alpha": 6}]}


OUT_OF_THE_BASE = {"init": "pissa", "groups": [{"targets": ["v_proj"], "r": 2, "alpha": 24}]}
TWICE = {"r": 8, "alpha": 64, "groups": [{"targets": ["v_proj"], "r": 4, "alpha": 48}]}
"""As which that is saved, for the base as it was."""


@pytest.mark.parametrize(
    "asked", [{"dora": True}, {"init": "orthogonal"}, RSLORA, OUT_OF_THE_BASE], ids=str
)
def test_training_goes_on_where_it_ended(asked: dict[str, Any], tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "data": {"eval_fraction": 0.2},
        "strategy": {"name": "single"},
        "train": {"steps": 2, "eval_at_start": True, "optimizer": {"lr": 2.0e-2}},
    }
    first = trained_here(run_file(tmp_path, **common, adapter=asked))
    folder = first.folder / "adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    whole = asked is OUT_OF_THE_BASE
    assert config["init_lora_weights"] == (True if whole else asked.get("init", True))
    given = {"start_from": str(folder), **(TWICE if whole else asked)}
    given.pop("init", None)
    second = trained_here(run_file(tmp_path, **common, name="second", adapter=given))
    assert second.evaluations()[0] == pytest.approx(first.evaluations()[-1], rel=1e-6)
    verified = json.loads((second.folder / "report.json").read_text())["verified"]
    assert verified["reloaded"] and verified["logits"] < 1e-5
    assert "adapter, trained on" in (second.folder / "adapter/README.md").read_text()
    for wrong, said in (
        ({"r": 3}, r"adapter\.r is 3, but .* has [48]"),
        ({"init": "gaussian"}, r"adapter\.init is gaussian, but"),
    ):
        with pytest.raises(ModelError, match=said):
            adapted(AdapterSection(start_from=str(folder), **wrong))
    model = adapted(AdapterSection(start_from=str(folder)))
    if asked is not RSLORA:
        return
    # The scale of its training is known again.
    layers = adapted_layers(model)
    assert model.peft_config["default"].use_rslora
    assert layers["model.layers.0.mlp.up_proj"] == Factors(2, 6.0)
    assert layers["model.layers.0.mlp.down_proj"] == Factors(4, 16.0)
    half = changed(folder, tmp_path, lora_alpha=16)  # of what every reader knows: alpha x sqrt(4)
    config = adapted(half).peft_config["default"]
    assert (config.use_rslora, config.lora_alpha) == (False, 16), "the configuration decides"
