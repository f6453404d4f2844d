"""Kernels in models: attention through the library's registry, norms by module."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anygauge.interface import AttentionKernel
from anygauge.kernels.attention import register_attention
from anygauge.kernels.install_kernels import plain_norms, replace_norms
from anygauge_hpu.gaudi_kernels import (
    attention_with_softmax_in_bfloat16,
    attention_with_softmax_in_float32,
)
from tests.helpers.runs import TINY, tiny_model

GEMMA = {**TINY, "model_type": "gemma2", "head_dim": 8, "sliding_window": 64}


def model(attention: str = "eager", **config: Any) -> Any:
    return tiny_model(attention, **config).eval()


def batch() -> dict[str, torch.Tensor]:
    """Two rows, one of them padded."""
    ids = torch.arange(2, 26).reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("config", [{}, GEMMA], ids=["llama", "gemma2 with soft caps"])
def test_a_registered_attention_equals_the_librarys(config: dict[str, Any]) -> None:
    name = register_attention(attention_with_softmax_in_float32())
    inputs = batch()
    with torch.no_grad():
        wanted = model(**config)(**inputs).logits
        found = model(name, **config)(**inputs).logits
    real = inputs["attention_mask"].bool()
    assert torch.allclose(found[real], wanted[real], atol=1e-5)


def test_a_softmax_in_bfloat16_is_near_and_not_the_same() -> None:
    name = register_attention(attention_with_softmax_in_bfloat16())
    inputs = batch()
    with torch.no_grad():
        wanted = model().bfloat16()(**inputs).logits
        found = model(name).bfloat16()(**inputs).logits
    assert torch.allclose(found, wanted, atol=0.05)


def test_a_name_that_the_library_takes_for_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="sdpa"):
        AttentionKernel(name="my_sdpa", forward=lambda: None, describe="")


def test_plain_norms_are_replaced_and_others_left() -> None:
    calls = []

    def kernel(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        calls.append(tuple(x.shape))
        return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)

    llama = model()
    wanted = llama(**batch()).logits
    norms, total = plain_norms(llama)
    assert len(norms) == total == 5
    replace_norms(llama, kernel)
    assert torch.allclose(llama(**batch()).logits, wanted, atol=1e-5)
    assert len(calls) == 5
    # One is added to its weight.
    norms, total = plain_norms(model(**GEMMA))
    assert not norms and total > 0


def test_regions_are_what_the_device_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from anygauge.interface import Backend, Compiler
    from anygauge.strategies.shared.common import compile_regions

    class Compiling(Backend):
        name, device_type = "compiling", "cpu"

    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, backend: asked.append((type(self).__name__, backend)),
    )
    backend = Compiling()
    assert compile_regions(model(), backend) == 0
    backend.graph.compiler = Compiler(backend="eager", regions="layer")
    assert compile_regions(model(), backend) == 2
    assert asked == [("LlamaDecoderLayer", "eager")] * 2
    backend.graph.compiler = Compiler(backend="eager", regions="model")
    assert compile_regions(model(), backend) == 1
