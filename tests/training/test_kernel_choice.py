"""The kernels of a run: what nothing would call is refused, what cannot serve says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from anygauge.config.schema import RunFile
from anygauge.interface import AttentionKernel, Compiler, UnsupportedError
from anygauge.kernels import kernel_plan
from anygauge.kernels.choose import KernelChoice, kernels_of_run, load_kernel
from anygauge.kernels.install_kernels import ModelKernels
from anygauge.kernels.kernel_plan import KernelPlan, plan_kernels
from anygauge.kernels.loss import state_loss_rows
from anygauge.models.factory import CausalModelFactory
from anygauge.registry import Registry
from anygauge_cpu.backend import CpuBackend
from anygauge_kernels import why_no_triton
from tests.helpers.build import model_factory
from tests.helpers.runs import TINY, trained_here
from tests.helpers.runs import run_file as write_run_file

LLAMA = {"model_type": "llama"}
OWN_ATTENTION = {"model_type": "bloom"}
"""An architecture that computes attention itself, in all allowed releases of transformers."""
SMALL: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "bloom": {"hidden_size": 32, "n_layer": 1, "n_head": 4},
}


def run_file(**fields: Any) -> RunFile:
    return RunFile.model_validate(
        {
            "model": {"config": TINY, "tokenizer": "none"},
            "data": {"train": {"path": "rows.jsonl"}},
            **fields,
        }
    )


def chosen(run: RunFile, backend: Any = None) -> dict[str, Any]:
    return kernels_of_run(run, backend or CpuBackend(), Registry.load())


class Factory(CausalModelFactory):
    """Makes models that `change` has changed."""

    change: Callable[[Any], None] = staticmethod(lambda model: None)

    def skeleton(self) -> nn.Module:
        model = super().skeleton()
        self.change(model)
        return model


def planned(
    run: RunFile, backend: Any = None, change: Callable[[Any], None] | None = None
) -> KernelPlan:
    """The plan of a run, with weights on no device."""
    backend = backend or CpuBackend()
    factory = Factory(
        run.model, run.adapter, dtype=torch.float32, seed=0, gradient_checkpointing=False
    )
    if change is not None:
        factory.change = change
    return plan_kernels(run, backend, chosen(run, backend), factory)


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


def attention_of(run: RunFile, config: dict[str, Any], backend: Any = None) -> Any:
    section = run.model.model_copy(update={"config": {**SMALL[config["model_type"]], **config}})
    return planned(run.model_copy(update={"model": section}), backend).attention


class PackedRowsBackend(CpuBackend):
    """Prefers what drops no weights, for packed rows."""

    packed_kernels: ClassVar = {"attention": "softmax"}


SOFTMAX = {"kernels": {"attention": "softmax"}}
PACKED = {"data": {"train": {"path": "rows.jsonl"}, "packing": True}}


@pytest.mark.parametrize(
    ("fields", "config", "backend", "name", "said"),
    [
        ({}, LLAMA, CpuBackend, "sdpa", "fused operation"),
        ({}, OWN_ATTENTION, CpuBackend, "eager", "this architecture has no sdpa"),
        (SOFTMAX, LLAMA, CpuBackend, "anygauge_softmax", "float32"),
        ({}, LLAMA, PackedRowsBackend, "sdpa", ""),
        (PACKED, LLAMA, PackedRowsBackend, "anygauge_softmax", ""),
        # Preferred, not asked for: it gives way.
        (PACKED, OWN_ATTENTION, PackedRowsBackend, "eager", ""),
    ],
)
def test_attention_is_what_was_asked_for_or_the_backends_or_the_architectures(
    fields: dict[str, Any], config: dict[str, Any], backend: Any, name: str, said: str
) -> None:
    choice = attention_of(run_file(**fields), config, backend())
    assert choice.name == name
    assert said in f"{choice.describe()}, {choice.why}"
    if fields is SOFTMAX:
        assert (choice.masks_of, choice.why) == ("sdpa", "asked for by name")


@pytest.mark.parametrize(
    ("limits", "served", "config", "said"),
    [
        (None, {}, OWN_ATTENTION, "BloomForCausalLM computes attention itself.* the model's own"),
        ({"smallest_head": 16}, {"head_dim": 16}, {"head_dim": 8}, "of 8 are below the 16"),
        ({"drops": False}, {}, {"attention_dropout": 0.1}, "drops attention weights in training"),
    ],
)
def test_what_a_kernel_that_was_asked_for_cannot_serve_is_refused_with_the_way_out(
    limits: dict[str, Any] | None,
    served: dict[str, Any],
    config: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_file(**SOFTMAX)
    if limits is not None:
        made = AttentionKernel(name="limited", forward=print, describe="-", **limits)

        def load(choices: Mapping[str, KernelChoice], operation: str) -> Any:
            return made if operation == "attention" else load_kernel(choices, operation)

        monkeypatch.setattr(kernel_plan, "load_kernel", load)
        assert attention_of(run, {**LLAMA, **served}).name == "limited"
    with pytest.raises(UnsupportedError, match=rf"(?s){said}"):
        attention_of(run, {**LLAMA, **config})


def test_code_of_a_model_s_own_that_calls_no_kernel_is_refused_once_it_is_there() -> None:
    def of_its_own(model: Any) -> None:
        model.__class__ = type("OfItsOwn", (type(model),), {"__module__": __name__})

    assert planned(run_file(), change=of_its_own).attention.name == "sdpa"
    run = run_file(**SOFTMAX)
    with pytest.raises(UnsupportedError, match="OfItsOwn computes attention itself"):
        planned(run, change=of_its_own)


def test_nothing_is_compiled_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("anygauge_kernels.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda program: program)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    assert "Python's headers (Python.h" in str(why_no_triton())
    (tmp_path / "Python.h").touch()
    assert why_no_triton() is None
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert "no C compiler" in str(why_no_triton())
    monkeypatch.setattr("anygauge_kernels.find_spec", lambda _: None)
    assert "triton is not installed" in str(why_no_triton())


def sequence_as_head(model: Any) -> None:
    model.lm_head = nn.Sequential(model.lm_head)


NO_LINEAR = "the output layer of LlamaForCausalLM is a Sequential, not a torch.nn.Linear"


ON_HEAD = {"r": 4, "targets": ["lm_head"]}


@pytest.mark.parametrize(
    ("fields", "change", "compiled", "why"),
    [
        ({}, None, False, ""),
        ({"adapter": ON_HEAD}, None, False, ""),
        ({}, sequence_as_head, False, NO_LINEAR),
        ({"adapter": {**ON_HEAD, "dora": True}}, None, False, "DoRA on the output layer"),
        ({"kernels": {"linear_cross_entropy": "reference"}}, None, False, "asked for by name"),
        ({}, None, True, "compiles the whole model"),
    ],
)
def test_the_loss_is_made_in_the_output_layer_or_the_reason_is_recorded(
    fields: dict[str, Any], change: Any, compiled: bool, why: str
) -> None:
    backend = CpuBackend()
    if compiled:
        backend.graph.compiler = Compiler(backend="eager", regions="model")
    found = planned(run_file(**fields), backend, change)
    assert (found.model.loss is None) == bool(why)
    record = found.record()["kernels"]["linear_cross_entropy"]
    assert record["name"] == ("reference" if why else "chunked") and why in record["reason"]
    made = f"all logits held ({record['reason']})" if why else "chunked, without holding the logits"
    assert found.describe().endswith(f"; loss {made}")
    if why is NO_LINEAR:
        assert record["rejected"] == [["chunked", NO_LINEAR]]


def test_a_loss_that_was_asked_for_never_gives_way() -> None:
    run = run_file(kernels={"linear_cross_entropy": "chunked"})
    with pytest.raises(UnsupportedError, match=rf"'chunked' cannot serve this run: {NO_LINEAR}"):
        planned(run, change=sequence_as_head)


def test_a_kernel_that_no_lora_layer_can_have_is_not_said_to_be_there() -> None:
    found = planned(run_file(adapter={"r": 4}))
    assert found.lora_layers == (14, 14)
    assert "; 14 of 14 LoRA layers fused; " in found.describe()
    dora = {"r": 4, "dora": True}
    found = planned(run_file(adapter=dora))
    assert found.model.lora is None and "LoRA" not in found.describe()
    assert found.choices["lora_linear"].name == "reference"
    assert found.choices["lora_linear"].reason == "none of the 14 adapted layers is plain LoRA"
    asked = run_file(adapter=dora, kernels={"lora_linear": "addmm"})
    with pytest.raises(UnsupportedError, match="none of the 14 adapted layers is plain LoRA"):
        planned(asked)
    with pytest.raises(UnsupportedError, match="there is no adapter"):
        chosen(run_file(kernels={"lora_linear": "addmm"}))


def test_what_is_planned_is_what_the_model_gets() -> None:
    run = run_file(adapter={"r": 4})
    found = planned(run)
    factory = model_factory(run.model, run.adapter)
    for kernels, replaced in ((found.model, found.lora_layers[0]), (ModelKernels(), 0)):
        made = factory.with_kernels(found.attention.name, kernels)
        model: Any = made.adapt(made.skeleton())
        lora = [m for m in model.modules() if hasattr(m, "lora_A") and "forward" in vars(m)]
        assert len(lora) == replaced
        assert "forward" in vars(model.get_base_model())  # either way, the loss is the model's
        assert ("forward" in vars(model.get_output_embeddings())) == (kernels.loss is not None)


def test_a_run_states_the_rows_that_have_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the loss asks the device for them in each micro-batch, and waits."""
    stated: list[bool] = []

    def noting(labels: torch.Tensor, rows: torch.Tensor, counts: tuple[int, ...]) -> None:
        wanted = (labels.flatten() != -100).nonzero().squeeze(1)
        stated.append(torch.equal(rows, wanted))
        stated.append(counts == tuple((labels != -100).sum(dim=1).tolist()))
        state_loss_rows(labels, rows, counts)

    monkeypatch.setattr("anygauge.training.to_device.state_loss_rows", noting)
    train = {"steps": 2, "global_batch_size": 4, "micro_batch_size": 2}
    path = write_run_file(tmp_path, name="rows", strategy={"name": "single"}, train=train)
    assert trained_here(path).status == 0
    assert len(stated) >= 4 and all(stated)


def test_counterparts_are_kernels_for_all_devices() -> None:
    specs = {(p.spec.operation, p.spec.name): p.spec for p in Registry.load().kernels}
    named = {(s.operation, s.counterpart) for s in specs.values() if s.counterpart}
    assert ("adamw", "early_epsilon") in named
    for each in named:
        assert not specs[each].device_types
        assert specs[each].counterpart == specs[each].name, "it has the other formula itself"
