"""LoRA layers whose product a kernel adds give peft's result, with fewer tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from anygauge.kernels.install_kernels import fuse_lora, plain_lora
from anygauge_kernels.lora import addmm
from tests.models.test_fused_loss import batch, build


def adapted(model_type: str = "llama", **options: Any) -> Any:
    names = ["c_attn", "c_proj"] if model_type == "gpt2" else ["q_proj", "down_proj"]
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 16, "target_modules": names, "init_lora_weights": False, **options}
    )
    torch.manual_seed(2)
    return get_peft_model(build(model_type), config, autocast_adapter_dtype=False).train()


def result(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(5)  # of dropout
    logits = model(input_ids=batch()["input_ids"], use_cache=False).logits
    logits.float().square().mean().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logits.detach(), found


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"lora_dropout": 0.3}], ids=str)
def test_it_is_pefts_result(model_type: str, options: dict[str, Any]) -> None:
    model = adapted(model_type, **options)
    wanted, exact = result(model)
    served, total = plain_lora(model)
    assert len(served) == total > 0
    fuse_lora(model, addmm())
    found, gradients = result(model)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == exact.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, exact[name], rtol=1e-4, atol=1e-7)


class Made(TorchDispatchMode):
    """How many tensors of a size operations returned."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        plain = isinstance(found, torch.Tensor) and found.numel() == torch.Size(self.shape).numel()
        views = ("view", "reshape", "t.default", "detach", "alias", "transpose")
        self.count += plain and not any(word in str(function) for word in views)
        return found


def test_fewer_tensors_of_the_output_s_size() -> None:
    layer = adapted().base_model.model.model.layers[0].mlp.down_proj
    x = torch.randn(7, 48)
    counts = []
    for fused in (False, True):
        if fused:
            fuse_lora(layer, addmm())
        with Made((7, 32)) as made:
            layer(x).sum().backward()
        counts.append(made.count)
    # Forward: the base's and the sum; peft's also the product and the scaled product. Backward:
    # the gradient as it comes; peft's also the scaled one.
    assert counts[0] - counts[1] == 3


class KeptBytes:
    """Bytes of the distinct tensors of (7, 32) that autograd keeps."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 7 * 32:
            self.held[tensor.data_ptr()] = tensor.nbytes
        return tensor


def test_layers_of_one_input_keep_it_once() -> None:
    block = adapted(target_modules=["q_proj", "k_proj", "v_proj"], lora_dropout=0.5)
    attention = block.base_model.model.model.layers[0].self_attn
    x = torch.randn(7, 32).requires_grad_()
    kept = []
    for fused in (False, True):
        if fused:
            fuse_lora(attention, addmm())
        counter = KeptBytes()
        with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda t: t):
            outputs = [each(x) for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
        kept.append(len(counter.held))
        del outputs
    # The factors that dropout draws, one for each; and three inputs, or the one.
    assert kept == [6, 4]


def test_what_is_not_plain_lora_stays_as_it_is() -> None:
    assert plain_lora(adapted(use_dora=True)) == ([], 4)
    assert plain_lora(adapted(lora_bias=True)) == ([], 4)
    model = adapted(target_modules=["q_proj", "embed_tokens"])
    served, total = plain_lora(model)
    assert (len(served), total) == (2, 3)
    fuse_lora(model, addmm())
    with model.disable_adapter(), torch.no_grad():
        base = model(input_ids=batch()["input_ids"]).logits
    assert not torch.allclose(base, result(model)[0], atol=1e-4)


def test_a_merged_layer_is_its_base() -> None:
    model = adapted()
    fuse_lora(model, addmm())
    wanted = result(model)[0]
    model.merge_adapter()
    with torch.no_grad():
        found = model(input_ids=batch()["input_ids"]).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
