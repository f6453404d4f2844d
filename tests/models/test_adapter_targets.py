"""Which layers an adapter goes beside: names, expressions, groups, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anygauge.config.schema import AdapterSection
from anygauge.config.sections import AdapterGroup
from anygauge.interface import ModelError
from anygauge.models.targets import Factors, patterns, planned_layers, short_names
from tests.helpers.build import model_factory
from tests.helpers.runs import TINY
from tests.models.zoo_configs import tiny_config


@pytest.fixture(scope="module")
def model() -> Any:
    return model_factory(TINY, attention="eager").skeleton()


def names(model: Any, **fields: Any) -> list[str]:
    return list(planned_layers(model, AdapterSection(**fields)))


def test_all_linear_is_all_but_the_output_layer(model: Any) -> None:
    found = names(model)
    assert len(found) == 14
    assert "lm_head" not in found and "model.embed_tokens" not in found


def test_a_list_has_last_parts_of_names_and_all_linear(model: Any) -> None:
    assert names(model, targets=["q_proj"]) == [
        f"model.layers.{i}.self_attn.q_proj" for i in range(2)
    ]
    assert names(model, targets=["layers.1.mlp.up_proj"]) == ["model.layers.1.mlp.up_proj"]
    both = names(model, targets=["lm_head", "all-linear", "embed_tokens"])
    assert len(both) == 16
    assert (both[0], both[-1]) == ("model.embed_tokens", "lm_head"), "in the model's order"


def test_an_expression_matches_whole_names_of_layers(model: Any) -> None:
    assert len(names(model, targets=r".*layers\.1\..*")) == 7, "not the blocks that hold them"
    assert len(names(model, targets=".*")) == 16


def test_groups_change_layers_and_add_some(model: Any) -> None:
    plan = planned_layers(
        model,
        AdapterSection(
            r=4,
            alpha=8,
            targets=["q_proj", "v_proj"],
            groups=[
                AdapterGroup(targets=["v_proj"], r=2),
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
        ("(", "is not a regular expression"),
        ("(a+" * 5, "is not a regular expression"),
        ("x{99999999999}", "is not a regular expression"),
        ([], "an empty list"),
    ],
)
def test_targets_that_mean_nothing_are_refused(model: Any, targets: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        names(model, targets=targets)


def test_groups_are_refused_by_their_place(model: Any) -> None:
    groups = [AdapterGroup(targets=["q_proj"]), AdapterGroup(targets=["nothing"])]
    with pytest.raises(ModelError, match=r"adapter\.groups\[1\]\.targets: no layer"):
        names(model, groups=groups)
    groups[1] = AdapterGroup(targets=".*q_proj")
    with pytest.raises(ModelError, match=r"groups\[1\].*q_proj' is also in adapter\.groups\[0\]"):
        names(model, groups=groups)


def test_what_is_stored_is_as_short_as_it_can_be(model: Any) -> None:
    every = names(model)
    assert short_names(model, every)[:2] == ["down_proj", "gate_proj"]
    some = [name for name in every if "layers.1" in name or name.endswith("q_proj")]
    short = short_names(model, some)
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
        model = AutoModelForCausalLM.from_config(tiny_config(family))
    assert any(f".{name}".endswith(f".{left_out}") for name, _ in model.named_modules())
    lasts = {name.rpartition(".")[2] for name in names(model)}
    assert taken in lasts and left_out not in lasts
