"""The loss of a mixture's routers: transformers' formula, of the tokens, while training alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.config.schema import AdapterSection
from anygauge.interface import UnsupportedError
from tests.helpers.build import model_factory, on_host
from tests.models.families import saved

pytest.importorskip("transformers.core_model_loading", reason="routers are plain layers before")

COEFFICIENT = 0.5
IDS = torch.arange(3, 27).reshape(2, 12)
TOKENS = torch.ones_like(IDS)
TOKENS[1, 7:] = 0


def made(folder: Path, coefficient: float, adapter: AdapterSection | None = None) -> Any:
    factory = model_factory(folder, adapter, attention="eager", router_aux_loss_coef=coefficient)
    model = on_host(factory)
    model = factory.adapt(model)
    return model.train(), factory


def targets() -> torch.Tensor:
    labels = IDS.roll(-1, 1).masked_fill(TOKENS.roll(-1, 1) == 0, -100)
    labels[:, -1] = -100
    return labels


def loss(model: Any, **more: Any) -> torch.Tensor:
    found: torch.Tensor = model(
        input_ids=IDS, attention_mask=TOKENS, shift_labels=targets(), use_cache=False, **more
    ).loss
    return found


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_what_is_added_is_transformers_own(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = saved(family, tmp_path)
    plain, _ = made(folder, 0.0)
    routed, _ = made(folder, COEFFICIENT)
    upstream: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    aux = upstream(input_ids=IDS, attention_mask=TOKENS, output_router_logits=True).aux_loss
    loss_tokens = int((targets() != -100).sum())
    expected = loss(plain) + COEFFICIENT * loss_tokens * aux
    torch.testing.assert_close(loss(routed, tokens=TOKENS), expected)
    assert aux > 0.1


def test_padding_does_not_count(tmp_path: Path) -> None:
    routed, _ = made(saved("mixtral", tmp_path), COEFFICIENT)
    with torch.no_grad():
        for name, parameter in routed.named_parameters():
            parameter.mul_(100 if name.endswith("gate.weight") else 1)  # far from balance
    of_tokens = loss(routed, tokens=TOKENS)
    assert not torch.isclose(of_tokens, loss(routed, tokens=torch.ones_like(TOKENS)))


def test_it_is_no_part_of_an_evaluation(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    routed, plain = made(folder, COEFFICIENT)[0].eval(), made(folder, 0.0)[0].eval()
    assert torch.equal(loss(routed, tokens=TOKENS), loss(plain))


@pytest.mark.parametrize("recomputed", [False, True])
def test_it_trains_the_routers(recomputed: bool, tmp_path: Path) -> None:
    """Its gradient is that of the sum, whether layers run once or are recomputed."""
    from anygauge.interface import Activations
    from anygauge.models.recompute import recompute

    folder = saved("mixtral", tmp_path)
    routed, _ = made(folder, COEFFICIENT)
    if recomputed:
        recompute(routed, Activations(every=1))
    loss(routed, tokens=TOKENS).backward()
    plain, _ = made(folder, 0.0)
    loss(plain).backward()
    name = "model.layers.0.mlp.gate.weight"
    with_it, without = (m.get_parameter(name).grad for m in (routed, plain))
    assert (with_it - without).norm() > 0.1 * without.norm()
    if recomputed:
        again, _ = made(folder, COEFFICIENT)
        loss(again, tokens=TOKENS).backward()
        torch.testing.assert_close(with_it, again.get_parameter(name).grad)


def test_an_architecture_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="DeepseekV3ForCausalLM models have no auxiliary"):
        made(saved("deepseek_v3", tmp_path), COEFFICIENT)
