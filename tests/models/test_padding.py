"""Masks of fused attention by what the host knows of padding are those of the library itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from anygauge.interface import AttentionKernel
from anygauge.kernels.attention import register_attention
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


class CausalAlone:
    """An attention that is causal by itself; it notes whether it was given masks."""

    def __init__(self, name: str) -> None:
        self.masked: list[bool] = []
        self.kernel = AttentionKernel(
            name=name, forward=self.forward, describe="for tests", causal=True
        )

    def forward(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any
    ) -> tuple[Any, None]:
        self.masked.append(mask is not None)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, enable_gqa=True
        )
        return out.transpose(1, 2), None


@pytest.mark.parametrize("length", [8, 3, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_a_kernel_that_is_causal_alone_gets_no_mask_where_all_before_is_seen(
    length: int, window: int | None
) -> None:
    attention = CausalAlone(f"causal_{length}_{window}")
    fields = {**TINY, **({} if window is None else {**SLIDING, "sliding_window": window})}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    ids = torch.arange(2 * length).reshape(2, length)
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    models = []
    for name in ("eager", register_attention(attention.kernel)):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(config, attn_implementation=name).eval())
    plain, model = models
    real = mask.bool()
    with torch.no_grad():
        wanted = plain(ids, attention_mask=mask).logits[real]
        answer_from_host(model, attention.kernel.name, causal=True)
        unstated = model(ids, attention_mask=mask).logits[real]
        assert all(attention.masked), "who laid that batch out is not known"
        attention.masked.clear()
        state_padding(mask, True)
        found = model(ids, attention_mask=mask).logits[real]
    # A window that is not shorter than the sequence hides nothing.
    needs = window is not None and length >= window
    assert set(attention.masked) == {needs}
    assert torch.allclose(unstated, wanted, atol=1e-5)
    assert torch.allclose(found, wanted, atol=1e-5)
