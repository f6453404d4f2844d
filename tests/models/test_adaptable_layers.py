"""What an adapter goes beside and begins with: names, expressions, groups, and refusals."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.cli import run as command
from anygauge.config.schema import AdapterSection
from anygauge.config.sections import AdapterGroup
from anygauge.interface import ModelError, UnsupportedError
from anygauge.models.adaptable_layers import patterns, peft_targets, planned_layers
from anygauge.models.adapter import adapted_layers, load_adapter
from anygauge.models.export import save_adapter
from anygauge.models.factors import Factors
from tests.helpers.build import model_factory, on_host
from tests.helpers.runs import TINY, run_file
from tests.models.families import adapted, config_of, saved


@pytest.fixture(scope="module")
def model() -> Any:
    return model_factory(TINY, attention="eager").skeleton()


def names(model: Any, **fields: Any) -> list[str]:
    return list(planned_layers(model, AdapterSection(**fields)))


Q = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]


@pytest.mark.parametrize(
    ("targets", "count", "first", "last"),
    [
        ("all-linear", 14, Q[0], "model.layers.1.mlp.down_proj"),
        (["q_proj"], 2, *Q),
        (["layers.1.mlp.up_proj"], 1, *["model.layers.1.mlp.up_proj"] * 2),
        (["lm_head", "all-linear", "embed_tokens"], 16, "model.embed_tokens", "lm_head"),
        # Whole names of layers, not of the blocks that hold them.
        (r".*layers\.1\..*", 7, Q[1], "model.layers.1.mlp.down_proj"),
        (".*", 16, "model.embed_tokens", "lm_head"),
    ],
)
def test_targets_name_layers_in_the_models_order(
    targets: Any, count: int, first: str, last: str, model: Any
) -> None:
    found = names(model, targets=targets)
    assert (len(found), found[0], found[-1]) == (count, first, last)


def test_groups_change_layers_and_add_some(model: Any) -> None:
    plan = planned_layers(
        model,
        AdapterSection(
            r=4,
            alpha=8,
            targets=["q_proj", "v_proj"],
            groups=[
                AdapterGroup(targets=["lm_head", "v_proj"], r=2),
                AdapterGroup(targets="lm_head", alpha=1.5),
            ],
        ),
    )
    assert plan["model.layers.0.self_attn.q_proj"] == Factors(4, 8)
    assert plan["model.layers.0.self_attn.v_proj"] == Factors(2, 8)
    assert plan["lm_head"] == Factors(4, 1.5)
    assert len(plan) == 5


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_prj"], r"adapter\.targets: no layer is called 'q_prj'; did you mean 'q_proj'\?"),
        (["all_linear"], "did you mean 'all-linear'"),
        (["self_attn"], "'self_attn' is a LlamaAttention, but only linear"),
        (["norm"], "'norm' is a LlamaRMSNorm"),
        ("q_proj", r"matches no layer; it must match a whole name, .*write a list: \[q_proj\]"),
    ],
)
def test_targets_that_mean_nothing_are_refused(model: Any, targets: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        names(model, targets=targets)


def test_groups_are_refused_by_their_place(model: Any) -> None:
    groups = [AdapterGroup(targets=["q_proj"]), AdapterGroup(targets=["nothing"])]
    with pytest.raises(ModelError, match=r"adapter\.groups\[1\]\.targets: no layer"):
        names(model, groups=groups)


def test_what_is_stored_is_as_short_as_it_can_be(model: Any) -> None:
    every = names(model)
    assert peft_targets(model, every)[0][:2] == ["down_proj", "gate_proj"]
    some = [name for name in every if "layers.1" in name or name.endswith("q_proj")]
    short, _ = peft_targets(model, some)
    assert "q_proj" in short and "model.layers.1.mlp.up_proj" in short
    assert patterns({"a.x": 4, "b.x": 4, "a.y": 2, "b.y": 4}, 4) == {"a.y": 2}
    assert patterns({"a.x": 2, "b.x": 2}, 4) == {"x": 2}


@pytest.mark.parametrize(
    ("family", "left_out", "taken"),
    [
        ("llama4_text", "router", "q_proj"),
        ("mamba", "out_proj", "in_proj"),
        ("falcon", "lm_head", "dense_h_to_4h"),
    ],
)
def test_all_linear_leaves_out_what_can_carry_no_adapter(
    family: str, left_out: str, taken: str
) -> None:
    """A router is a linear layer that returns two tensors; peft refuses those that Mamba's kernels
    read without calling them. Falcon's own kind of linear layer is one like any other."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family))
    assert any(f".{name}".endswith(f".{left_out}") for name, _ in model.named_modules())
    lasts = {name.rpartition(".")[2] for name in names(model)}
    assert taken in lasts and left_out not in lasts


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        *(
            ({"init": init}, UnsupportedError, f"adapter.init: {init} is not supported: it")
            for init in ("corda", "lora_ga", "mica", "eva", "loftq")
        ),
        ({"init": "other"}, ModelError, r"peft refused it: Unknown initialization.*'other'"),
        ({"init": "orthogonal", "r": 3}, ModelError, "rank to be even, got 3"),
        (
            {"modules_to_save": ["embed_tokens"], "targets": ["embed_tokens"]},
            ModelError,
            "peft refused it: No modules were targeted",
        ),
        ({"targets": []}, ModelError, "peft (refused it: No|did not build)"),
        ({"modules_to_save": ["lm_haed"]}, ModelError, "'lm_haed'; did you mean 'lm_head'"),
        (
            {"modules_to_save": ["up_proj"]},
            ModelError,
            "peft did not build .* first that differs is 'model.layers.0.mlp.up_proj'",
        ),
    ],
)
def test_fields_that_cannot_be_are_refused(
    fields: dict[str, Any], kind: type[Exception], message: str
) -> None:
    made = model_factory(TINY, AdapterSection(**{"r": 4, **fields}))
    with pytest.raises(kind, match=message):
        made.adapt(made.skeleton())


def test_divided_models_take_no_modules_to_save(tmp_path: Path) -> None:
    path = run_file(
        tmp_path, adapter={"modules_to_save": ["lm_head"]}, strategy={"name": "ddp", "tp": 2}
    )
    with pytest.raises(UnsupportedError, match=r"modules_to_save: .*strategy\.tp: 1"):
        command(["train", str(path), "--devices", "2"])


# -- experts in one tensor ----------------------------------------------------------------------

FUSED = pytest.mark.skipif(
    importlib.util.find_spec("transformers.core_model_loading") is None,
    reason="experts are layers before",
)
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


@FUSED
def test_the_experts_of_every_layer_are_named_once(tmp_path: Path) -> None:
    model = adapted(saved("mixtral", tmp_path), targets=["q_proj"], target_parameters=EXPERTS)
    assert sorted(adapted_layers(model)) == [
        f"model.layers.{layer}.{name}"
        for layer in range(2)
        for name in ("mlp.experts.down_proj", "mlp.experts.gate_up_proj", "self_attn.q_proj")
    ]
    assert model.peft_config["default"].target_parameters == set(EXPERTS)


@FUSED
def test_layers_that_peft_takes_for_experts_carry_their_own_adapter(tmp_path: Path) -> None:
    """`gate_proj` and its like: peft would adapt the routed experts in place of the shared ones."""
    made = model_factory(saved("deepseek_v3", tmp_path / "base"), AdapterSection(r=4, init=False))
    model: Any = made.adapt(on_host(made)).eval()
    layers = adapted_layers(model)
    assert "model.layers.1.mlp.shared_experts.gate_proj" in layers
    assert "model.layers.0.mlp.up_proj" in layers
    assert not any(".experts." in name for name in layers)
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    shapes = {name: tuple(tensor.shape) for name, tensor in trained.items()}
    save_adapter(model, trained, tmp_path / "adapter", shapes=shapes, base=made.section)
    again = load_adapter(on_host(made), tmp_path / "adapter")
    assert adapted_layers(again) == layers
    ids = torch.arange(3, 19)[None]
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits)


@FUSED
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["experts.gate_proj"], "no tensor is called 'experts.gate_proj'.*experts.gate_up_proj"),
        (["q_proj.weight"], "belongs to the layer 'model.layers.0.self_attn.q_proj'; name that in"),
        (EXPERTS, r"peft refused it: lora\.ParamWrapper .*lora_dropout"),
    ],
)
def test_tensors_that_can_carry_none(fields: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        adapted(saved("mixtral", tmp_path), target_parameters=fields, dropout=0.1)
