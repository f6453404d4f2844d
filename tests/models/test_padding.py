"""Masks of fused attention by what the host knows of padding are those of the library itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from anygauge.models.padding import answer_from_host, state_padding
from tests.helpers.runs import TINY

SLIDING = {"model_type": "mistral", "sliding_window": 3}


@pytest.fixture(params=[{}, SLIDING], ids=["all before", "a window"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    fields = {**TINY, **request.param}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """For each mask: whether the library got one of padding, and might ask it."""
    seen: list[tuple[bool, bool]] = []
    made = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append((kwargs["attention_mask"] is not None, kwargs["allow_is_causal_skip"]))
        return made(*args, **kwargs)

    AttentionMaskInterface.register("sdpa", noting)
    yield seen
    AttentionMaskInterface.register("sdpa", made)


@pytest.mark.parametrize("has_padding", [False, True])
def test_the_model_computes_the_same_and_the_device_is_not_asked(
    has_padding: bool, model: Any, asked: list[tuple[bool, bool]]
) -> None:
    ids = torch.arange(16).reshape(2, 8)
    mask = torch.ones_like(ids)
    if has_padding:
        mask[1, 5:] = 0
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
        assert asked and all(got and may_ask for got, may_ask in asked)
        asked.clear()
        answer_from_host(model, "sdpa")
        state_padding(mask, has_padding)
        found = model(ids, attention_mask=mask).logits
        assert asked and not any(got and may_ask for got, may_ask in asked)
        assert torch.equal(found, wanted)
        asked.clear()
        again = model(ids, attention_mask=mask.clone()).logits
    assert all(got and may_ask for got, may_ask in asked), "nobody stated it of this one"
    assert torch.equal(again, wanted)
