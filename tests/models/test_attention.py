"""Attention of our own in the library's models: padded and packed batches as eager attention's."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor

from anygauge import open_backend
from anygauge.interface import AttentionKernel, UnsupportedError
from anygauge.kernels.attention import (
    library_attention,
    model_class,
    never_called,
    register_attention,
)
from anygauge.models.inputs import model_inputs, plan_masks
from anygauge_kernels.blocks import block_attention
from anygauge_kernels.softmax import softmax
from anygauge_kernels.softmax_attention import with_softmax
from tests.models.test_fused_loss import MODELS, SMALL

LENGTH = 40
WITH_WINDOWS = {
    "mistral": {"sliding_window": 7},
    "mixtral": {"num_local_experts": 4, "sliding_window": 7},
    "phi3": {"sliding_window": 7},
    "starcoder2": {"sliding_window": 7},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": 7,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {"head_dim": 8, "sliding_window": 7, "sliding_window_pattern": 2},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {"head_dim": 8, "use_sliding_window": True, "sliding_window": 7,
              "max_window_layers": 1},
    "cohere2": {"sliding_window": 7, "sliding_window_pattern": 2},
}  # fmt: skip
OUTSIDE = ("bloom", "falcon", "mpt")
if Version(version("transformers")) < Version("5.24"):
    OUTSIDE = ("gptj", *OUTSIDE)
"""Architectures that compute attention themselves."""
CASES = {
    **{name: fields for name, fields in MODELS.items() if name not in OUTSIDE},
    **{f"{name}, windows": fields for name, fields in WITH_WINDOWS.items()},
    "gpt_oss, sinks and windows": {
        "head_dim": 8,
        "sliding_window": 7,
        "num_local_experts": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def padded() -> dict[str, Tensor]:
    ids = torch.randint(1, 96, (3, LENGTH), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 23:] = 0
    mask[2, 5:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def packed() -> dict[str, Tensor]:
    segments = torch.ones(3, LENGTH, dtype=torch.long)
    segments[:, 9:] = 2
    segments[0, 30:] = 3
    segments[1, 33:] = 0
    positions = torch.arange(LENGTH).expand(3, -1).clone()
    for row in range(3):
        for number in segments[row].unique():
            here = segments[row] == number
            positions[row, here] = torch.arange(int(here.sum()))
    return {
        "input_ids": padded()["input_ids"].clamp(min=1),
        "attention_mask": (segments != 0).long(),
        "position_ids": positions,
        "segment_ids": segments,
    }


def config(case: str) -> Any:
    from transformers import AutoConfig

    fields = CASES[case] if case in CASES else MODELS[case]
    return AutoConfig.for_model(case.partition(",")[0], **{**SMALL, **fields})


def build(made: Any, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(made, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def kernel(name: str) -> AttentionKernel:
    if name == "softmax":
        return with_softmax(softmax)
    from torch.nn.attention.flex_attention import flex_attention

    return block_attention(flex_attention)


def results(
    model: Any, batch: dict[str, Tensor], masks_of: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits where there are tokens, and gradients of their mean square."""
    plan = plan_masks(model.config, masks_of, LENGTH)
    # Torch's attention by blocks has no backward on the host.
    model.requires_grad_(masks_of != "flex_attention")
    # transformers compiles what makes masks by blocks; on processors without AVX-512 the code that
    # torch writes for it reads beyond the end of short rows, and says so.
    with torch.compiler.set_stance("force_eager"):
        logits = model(**model_inputs(batch, torch.float32, plan)).logits
    real = logits[batch["attention_mask"].bool()]
    if real.requires_grad:
        real.pow(2).mean().backward()
    return real.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rows", [padded, packed])
@pytest.mark.parametrize("name", ["softmax", "blocks"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_it_equals_eager_attention(case: str, name: str, rows: Any) -> None:
    made = config(case)
    chosen = kernel(name)
    if reason := never_called(model_class(made), chosen.mask):
        pytest.skip(f"transformers {version('transformers')}: {reason}")
    wanted, exact = results(build(made, "eager"), rows(), "eager")
    found, gradients = results(build(made, register_attention(chosen)), rows(), chosen.mask)
    assert float(wanted.std()) > 1e-3
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert name == "blocks" or gradients.keys() == exact.keys()
    for each, gradient in gradients.items():
        torch.testing.assert_close(gradient, exact[each], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("case", [c for c in CASES if "windows" in c])
def test_windows_matter(case: str) -> None:
    """Else the test above would say nothing of them."""
    made = config(case)
    batch = packed()
    with torch.no_grad():
        model = build(made, "eager")
        plan = plan_masks(made, "eager", LENGTH)
        assert 7 in dict(plan.windows).values()
        right = model(**model_inputs(batch, torch.float32, plan)).logits
        wide = model(**model_inputs(batch, torch.float32)).logits
    assert not torch.allclose(right, wide, atol=1e-4)


@pytest.mark.parametrize("case", [*CASES, *OUTSIDE])
def test_a_packed_document_is_what_it_is_alone_or_packing_is_refused(case: str) -> None:
    """By the library's own masks for one document, and ours for three."""
    made = config(case)
    own = never_called(model_class(made))
    attention = "eager" if own else register_attention(kernel("softmax"))
    try:
        plan = plan_masks(made, "eager" if own else "sdpa", LENGTH)
    except UnsupportedError as refused:
        assert case in OUTSIDE and "build their own masks" in str(refused)
        return
    model = build(made, attention).eval()
    batch = packed()
    here = batch["segment_ids"][0] == 2
    with torch.no_grad():
        together = model(**model_inputs(batch, torch.float32, plan)).logits[0, here]
        alone = model(input_ids=batch["input_ids"][:1, here], use_cache=False).logits[0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_weights_are_dropped_in_training_alone() -> None:
    made = config("llama")
    made.attention_dropout = 0.5
    model = build(made, register_attention(kernel("softmax")))
    ids = padded()["input_ids"]
    one, other = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    assert not torch.allclose(one, other)
    model.eval()
    one, other = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    assert torch.equal(one, other)


@pytest.mark.parametrize("model_type", OUTSIDE)
def test_architectures_without_the_interface_are_told_apart(model_type: str) -> None:
    assert "computes attention itself" in str(never_called(model_class(config(model_type))))
    assert never_called(model_class(config("llama"))) is None


def test_blocks_refuse_what_they_would_leave_out() -> None:
    flex = kernel("blocks").forward
    module = torch.nn.Module().train()
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(UnsupportedError, match="drops attention weights"):
        flex(module, q, q, q, None, dropout=0.1)
    with pytest.raises(UnsupportedError, match="'alibi'"):
        flex(module, q, q, q, None, alibi=torch.zeros(2))


def test_without_a_mask_they_are_causal_unless_the_module_is_not() -> None:
    forward = kernel("softmax").forward
    module = torch.nn.Module().eval()
    q, k, v = (torch.randn(1, 2, n, 8) for n in (3, 5, 5))
    out, weights = forward(module, q, k, v, None)
    assert out.shape == (1, 3, 2, 8)
    assert torch.equal(weights[0, 0] > 0, torch.ones(3, 5).tril(2).bool())
    blocks = kernel("blocks").forward(module, q, k, v, None)[0]
    torch.testing.assert_close(blocks, out, rtol=1e-5, atol=1e-5)
    module.is_causal = False  # type: ignore[assignment]
    assert (forward(module, q, k, v, None)[1] > 0).all()


def test_scores_with_a_cap_are_never_sdpas() -> None:
    """transformers 4.55 hands them to it all the same, and loses the cap."""
    backend = open_backend("cpu")
    assert library_attention(backend, config("gemma2, windows")).name == "eager"
    assert library_attention(backend, config("llama")).name == "sdpa"
