"""The kernels of a run: what nothing would call is refused, what cannot serve says why."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from transformers import AutoConfig

from anygauge.config.schema import RunFile
from anygauge.interface import (
    FULL,
    AttentionKernel,
    Compiler,
    Level,
    Support,
    UnsupportedError,
)
from anygauge.registry import Registry
from anygauge.strategies import create_strategy
from anygauge.training import attention
from anygauge.training.attention import choose_attention
from anygauge.training.kernels import (
    kernels_of_run,
    load_loss_kernel,
    settle_lora,
    settle_loss,
)
from anygauge_cpu.backend import CpuBackend
from anygauge_kernels import why_no_compiler

LLAMA = {"model_type": "llama"}
GPTJ = {"model_type": "gptj"}


def run_file(**fields: Any) -> RunFile:
    return RunFile.model_validate(
        {
            "model": {"config": {"model_type": "llama"}, "tokenizer": "none"},
            "data": {"train": {"path": "rows.jsonl"}},
            **fields,
        }
    )


def chosen(run: RunFile, backend: Any = None) -> dict[str, Any]:
    return kernels_of_run(
        run, backend or CpuBackend(), Registry.load(), create_strategy(run.strategy, 1)
    )


def test_an_operation_is_recorded_where_it_is_called() -> None:
    assert "softmax" not in chosen(run_file())
    found = chosen(run_file(kernels={"attention": "softmax"}))
    assert found["softmax"].name == "reference" and found["softmax"].provided is not None


def test_a_softmax_that_nothing_would_call_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"ask for one that does \(kernels.attention: soft"):
        chosen(run_file(kernels={"softmax": "reference"}))
    with pytest.raises(UnsupportedError, match="no kernel of this run uses softmax"):
        chosen(
            run_file(
                model={
                    "config": {"model_type": "llama"},
                    "tokenizer": "none",
                    "attention": "eager",
                },
                kernels={"softmax": "reference"},
            )
        )


def test_attention_is_made_with_the_softmax() -> None:
    run = run_file(kernels={"attention": "softmax", "softmax": "reference"})
    choice = attention_of(run, LLAMA)
    assert choice.name == "anygauge_softmax" and choice.masks_of == "sdpa"
    assert choice.why == "asked for by name" and "float32" in choice.describe()


def attention_of(run: RunFile, config: dict[str, Any], backend: Any = None) -> Any:
    backend = backend or CpuBackend()
    table = chosen(run, backend)
    made = AutoConfig.for_model(**config)
    return choose_attention(run, backend, Registry.load(), table, made)


def test_auto_is_the_backend_s_or_what_the_architecture_has() -> None:
    choice = attention_of(run_file(), LLAMA)
    assert choice.name == "sdpa" and "fused operation" in choice.describe()
    choice = attention_of(run_file(), GPTJ)
    assert (choice.name, choice.why) == ("eager", "this architecture has no sdpa")


def test_an_architecture_that_no_kernel_reaches_is_refused_with_the_way_out() -> None:
    run = run_file(kernels={"attention": "softmax"})
    with pytest.raises(UnsupportedError) as refused:
        attention_of(run, GPTJ)
    for part in ("GPTJForCausalLM computes attention itself", "Leave it out: the model's own"):
        assert part in str(refused.value)


class Blocks(CpuBackend):
    """Prefers what drops no weights, for packed rows."""

    packed_kernels: ClassVar = {"attention": "softmax"}


def test_packed_rows_may_prefer_another_kernel() -> None:
    data = {"train": {"path": "rows.jsonl"}, "packing": True}
    assert attention_of(run_file(), LLAMA, Blocks()).name == "sdpa"
    assert attention_of(run_file(data=data), LLAMA, Blocks()).name == "anygauge_softmax"
    # Preferred, not asked for: it gives way.
    choice = attention_of(run_file(data=data), GPTJ, Blocks())
    assert choice.name == "eager"


def test_heads_that_a_kernel_does_not_serve_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    made = AttentionKernel(name="wide_heads", forward=print, describe="-", smallest_head=16)
    monkeypatch.setattr(attention, "load_kernel", lambda *_: made)
    run = run_file(kernels={"attention": "softmax"})
    assert attention_of(run, {**LLAMA, "head_dim": 16}).name == "wide_heads"
    with pytest.raises(UnsupportedError, match="heads of 8 are below the 16"):
        attention_of(run, {**LLAMA, "head_dim": 8})


def test_nothing_is_compiled_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert "no C compiler" in str(why_no_compiler())
    monkeypatch.setattr("anygauge_kernels.find_spec", lambda _: None)
    assert "triton is not installed" in str(why_no_compiler())


def test_what_cannot_drop_weights_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_file(kernels={"attention": "softmax"})
    made = AttentionKernel(name="no_dropout", forward=print, describe="-", drops=False)
    monkeypatch.setattr(attention, "load_kernel", lambda *_: made)
    assert attention_of(run, LLAMA).name == "no_dropout"
    with pytest.raises(UnsupportedError, match="drops attention weights in training"):
        attention_of(run, {**LLAMA, "attention_dropout": 0.1})


def test_a_model_that_keeps_its_logits_is_recorded_with_the_reason() -> None:
    run = run_file()
    kernels = chosen(run)
    reason = Support(Level.NOT_WRITTEN_YET, "it has none")
    assert settle_loss(run, kernels, reason) == "all logits held (it has none)"
    assert kernels["linear_cross_entropy"].record()["reason"] == "it has none"
    kernels = chosen(run)
    assert settle_loss(run, kernels, FULL) == "chunked, without holding the logits"


def test_a_loss_that_was_asked_for_never_gives_way() -> None:
    run = run_file(kernels={"linear_cross_entropy": "chunked"})
    with pytest.raises(UnsupportedError, match=r"'chunked' cannot serve this run: it has none"):
        settle_loss(run, chosen(run), Support(Level.NOT_WRITTEN_YET, "it has none"))


def test_a_kernel_that_no_lora_layer_can_have_is_not_said_to_be_there() -> None:
    run = run_file(adapter={"r": 4})
    kernels = chosen(run)
    assert settle_lora(run, kernels, (12, 14)) == "12 of 14 LoRA layers fused"
    assert settle_lora(run, kernels, (0, 14)) == ""
    assert kernels["lora_linear"].name == "reference"
    assert kernels["lora_linear"].reason == "none of the 14 adapted layers is plain LoRA"
    asked = run_file(adapter={"r": 4}, kernels={"lora_linear": "addmm"})
    with pytest.raises(UnsupportedError, match="none of the 14 adapted layers is plain LoRA"):
        settle_lora(asked, chosen(asked), (0, 14))
    with pytest.raises(UnsupportedError, match="there is no adapter"):
        chosen(run_file(kernels={"lora_linear": "addmm"}))


def test_logits_can_be_asked_for() -> None:
    run = run_file(kernels={"linear_cross_entropy": "reference"})
    kernels = chosen(run)
    assert load_loss_kernel(run, CpuBackend(), Registry.load(), kernels) is None
    assert settle_loss(run, kernels, None) == "all logits held (asked for by name)"


def test_a_device_that_compiles_the_whole_model_keeps_the_logits() -> None:
    backend = CpuBackend()
    backend.graph.compiler = Compiler(backend="eager", regions="model")
    run = run_file()
    kernels = chosen(run, backend)
    assert load_loss_kernel(run, backend, Registry.load(), kernels) is None
    assert "compiles the whole model" in kernels["linear_cross_entropy"].reason
