"""Rotary position embeddings by a kernel: in models whose rotation is plain, and in no others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from anygauge.kernels.rope import FUNCTION, apply_rotation, plain_rotations, replace_rotations
from tests.helpers.runs import TINY, tiny_model

LAYERS = TINY["num_hidden_layers"]


def model(**config: Any) -> Any:
    return tiny_model("eager", **config).eval()


class Counting:
    """The plain formula; it counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, query: Any, key: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
        self.calls += 1
        return apply_rotation(query, cos, sin), apply_rotation(key, cos, sin)


IDS = torch.arange(2, 26).reshape(2, 12)
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"model_type": "mistral"},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "gemma2": {"model_type": "gemma2", "head_dim": 8},
}


@pytest.mark.parametrize("case", PLAIN)
def test_a_kernel_computes_what_the_library_does(case: str) -> None:
    plain, kernel = model(**PLAIN[case]), Counting()
    replaced = model(**PLAIN[case])
    found, total = plain_rotations(replaced)
    assert len(found) == total == LAYERS
    replace_rotations(replaced, kernel)
    with torch.no_grad():
        wanted = plain(IDS).logits
        assert torch.allclose(replaced(IDS).logits, wanted, atol=1e-5)
    assert kernel.calls == LAYERS


def test_other_models_of_the_process_keep_the_librarys() -> None:
    before = getattr(modeling_llama, FUNCTION)
    kernel, other = Counting(), model()
    replace_rotations(model(), kernel)
    with torch.no_grad():
        other(IDS)
    assert kernel.calls == 0 and getattr(modeling_llama, FUNCTION) is before


def test_a_copy_computes_with_its_own_weights() -> None:
    kernel, first = Counting(), model()
    replace_rotations(first, kernel)
    second = copy.deepcopy(first)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
        assert not torch.equal(first(IDS).logits, second(IDS).logits)
    assert kernel.calls == 2 * LAYERS


def test_gradients_come_through_recomputation() -> None:
    gradients = []
    for replaced in (False, True):
        made, kernel = model().train(), Counting()
        if replaced:
            replace_rotations(made, kernel)
        made.gradient_checkpointing_enable({"use_reentrant": True})
        made.enable_input_require_grads()
        made(IDS).logits.pow(2).mean().backward()
        gradients.append(made.model.layers[0].self_attn.q_proj.weight.grad)
        assert kernel.calls == (2 * LAYERS if replaced else 0)
    assert torch.allclose(*gradients, atol=1e-6)


OTHERS: dict[str, dict[str, Any]] = {
    "pairs instead of halves": {"model_type": "cohere", "logit_scale": 1.0},
    "another part of the head": {"model_type": "glm", "head_dim": 16, "pad_token_id": 0},
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_rotation_that_is_not_plain_is_left(case: str) -> None:
    other = model(**OTHERS[case])
    found, total = plain_rotations(other)
    assert found == [] and total == LAYERS
    replace_rotations(other, Counting())
    assert not any("forward" in vars(module) for module in other.modules())


def test_a_model_without_rotations_has_none() -> None:
    plain = model(model_type="gpt2", n_embd=32, n_layer=1, n_head=4)
    assert plain_rotations(plain) == ([], 0)


def test_a_call_with_more_arguments_is_left() -> None:
    class Other(torch.nn.Module):
        def forward(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
            return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)

    class Plain(torch.nn.Module):
        def forward(self, q: Any, k: Any, cos: Any, sin: Any) -> Any:
            return apply_rotary_pos_emb(q, k, cos, sin)

    assert plain_rotations(Other()) == ([], 1)
    plain = Plain()
    assert plain_rotations(plain) == ([plain], 1)


apply_rotary_pos_emb = getattr(modeling_llama, FUNCTION)
