"""Masks of fused attention by what the host knows of padding are those of the library itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from anygauge.interface import AttentionKernel
from anygauge.kernels.attention import register_attention
from anygauge.models.inputs import answer_from_host, state_padding
from tests.helpers.runs import tiny_model

SLIDING = {"model_type": "mistral", "sliding_window": 3}


@pytest.fixture(params=[{}, SLIDING], ids=["all before", "a window"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model("sdpa", **request.param).eval()


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
    real = mask.bool()
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits[real]
        assert asked and all(got and may_ask for got, may_ask in asked)
        asked.clear()
        answer_from_host(model, "sdpa")
        state_padding(mask, has_padding)
        found = model(ids, attention_mask=mask).logits[real]
        assert asked and not any(got and may_ask for got, may_ask in asked)
        assert torch.equal(found, wanted)
        asked.clear()
        again = model(ids, attention_mask=mask.clone()).logits[real]
    assert all(got and may_ask for got, may_ask in asked), "nobody stated it of this one"
    assert torch.equal(again, wanted)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool, int]]:
    """For each call of fused attention: whether it has a mask, is causal, and heads of its keys."""
    seen = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def noting(query: Any, key: Any, value: Any, attn_mask: Any = None, **named: Any) -> Any:
        seen.append((attn_mask is not None, bool(named.get("is_causal")), key.shape[1]))
        return fused(query, key, value, attn_mask=attn_mask, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    return seen


LAYERS = {
    "all before": ({"num_key_value_heads": 4}, {(False, True, 4)}),
    "all before, heads in groups": ({}, {(False, True, 2)}),
    "a window": (SLIDING, {(True, False, 4)}),
    "window and all before": (
        {
            "model_type": "qwen2",
            "num_key_value_heads": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "use_sliding_window": True,
            "sliding_window": 3,
        },
        {(True, False, 4), (False, True, 4)},
    ),
}


@pytest.mark.parametrize(("fields", "expected"), LAYERS.values(), ids=LAYERS)
def test_padding_on_the_right_costs_neither_a_mask_nor_a_bit(
    fields: dict[str, Any], expected: set[Any], called: list[tuple[bool, bool, int]]
) -> None:
    """Torch's flash attention takes no mask, and grouped keys are repeated for one."""
    model = tiny_model("sdpa", **fields)
    ids = torch.arange(16).reshape(2, 8)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    labels = ids.where(mask.bool(), torch.full_like(ids, -100))

    def computed() -> list[torch.Tensor]:
        called.clear()
        model.zero_grad()
        outputs = model(ids, attention_mask=mask, labels=labels)
        outputs.loss.backward()
        gradients = (parameter.grad.clone() for parameter in model.parameters())
        return [outputs.logits.detach()[mask.bool()], *gradients]

    wanted = computed()
    assert set(called) == {(True, False, 4)}, "the library alone gives a mask, and repeats keys"
    answer_from_host(model, "sdpa")
    state_padding(mask, True)
    found = computed()
    assert set(called) == expected
    # Gradients of keys that are not repeated are summed over heads in another order.
    tolerance = (
        1e-6 if model.config.num_key_value_heads < 4 and expected != {(True, False, 4)} else 0.0
    )
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=tolerance)
    assert torch.equal(found[0], wanted[0])


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
    fields = {} if window is None else {**SLIDING, "sliding_window": window}
    ids = torch.arange(2 * length).reshape(2, length)
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    names = ("eager", register_attention(attention.kernel))
    plain, model = (tiny_model(name, **fields).eval() for name in names)
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
