"""What `zero` does around DeepSpeed: cuts, waits, types, layers as one piece, settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from anygauge.config.schema import AdapterSection
from anygauge.interface import (
    Activations,
    Backend,
    Graph,
    Phase,
    Precision,
    RunFileError,
    Setting,
    UnsupportedError,
)
from anygauge.kernels.loss import model_loss
from anygauge.strategies.shared.materialize import decoder_layers
from anygauge.strategies.zero import deepspeed_config, deepspeed_versions
from anygauge.strategies.zero.deepspeed_config import ModelSizes, as_config, zero_settings
from anygauge.strategies.zero.deepspeed_runtime import (
    _differentiable_input_first,
    check_fields,
    import_deepspeed,
    leave_as_a_step_does,
    refuse_unserved_type,
)
from anygauge.strategies.zero.engine import Zero, on_the_host
from anygauge.strategies.zero.spec import ZeroOptions
from anygauge.training.optimizer import optimizer_factory
from tests.helpers.build import (
    a_workload,
    batch_of,
    build_context,
    model_factory,
    optimizer_section,
)
from tests.helpers.run_ranks import on_ranks
from tests.helpers.runs import TINY


class Recording(Graph):
    """Cuts nothing; remembers what it was asked."""

    sync_on_release = True

    def __init__(self) -> None:
        self.phases: list[str] = []

    def mark_step(self, phase: Phase) -> None:
        self.phases.append(phase.value)


def observed(backend: Backend) -> dict[str, Any]:
    """Of ZeRO-3 on a device that wants its graph cut and its memory released in step."""
    graph, waits = Recording(), 0
    backend.graph = graph

    def synchronize() -> None:
        nonlocal waits
        waits += 1

    backend.placement.synchronize = synchronize  # type: ignore[method-assign]
    context = build_context(
        factory=model_factory(
            TINY,
            AdapterSection(r=4),
            attention="eager",
            dtype=torch.bfloat16,
            gradient_checkpointing=True,
        ),
        precision=Precision(param_dtype="bfloat16", reduce_dtype="float32"),
        backend=backend,
    )
    # Nothing may stay resident, or nothing would be released.
    engine = Zero(ZeroOptions(options={"stage3_param_persistence_threshold": 0})).build(context)
    batch = batch_of(torch.arange(8)[None])
    waits_in_step = []
    for _ in range(2):
        before = waits
        engine.run_step([batch, batch], model_loss, 14)
        waits_in_step.append(waits - before)
        engine.update(1e-3, 1.0)
    whole = context.factory.adapt(context.factory.skeleton())
    result: dict[str, Any] = {
        "whole": {n: engine.parameter_shape(p) for n, p in engine.model.named_parameters()}
        == {n: tuple(p.shape) for n, p in whole.named_parameters()},
        "phases": graph.phases,
        "waits_in_step": waits_in_step,
        "buffers": sorted({str(b.dtype) for b in engine.model.buffers()}),
        "parameters": sorted({str(p.dtype) for p in engine.model.parameters()}),
        "shards": sorted({p.numel() for p in engine.model.parameters() if not p.requires_grad}),
        "exported": sorted({str(t.dtype) for t in engine.export_trained().values()}),
    }
    engine.close()

    class Elsewhere(type(backend)):  # type: ignore[misc]
        def engine_settings(self, engine: str) -> Any:
            return [
                type(s)(name=s.name, value="xpu", reason=s.reason, source=s.source)
                for s in super().engine_settings(engine)
            ]

    try:
        import_deepspeed(Elsewhere())
    except UnsupportedError as error:
        result["refusal"] = str(error)
    return result


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    (found,) = on_ranks(observed, world=1)
    return found  # type: ignore[no-any-return]


def test_a_step_cuts_the_graph_after_each_phase_and_waits_for_the_device_to_free_weights(
    record: dict[str, Any],
) -> None:
    assert record["phases"] == (["forward", "backward"] * 2 + ["update"]) * 2
    first, second = record["waits_in_step"]
    # Seven linear layers in each of two decoder layers, in each of two micro-batches, at least.
    assert first >= 28 and second >= 28


def test_types_and_shards(record: dict[str, Any]) -> None:
    assert record["parameters"] == ["torch.bfloat16"]
    assert record["buffers"] == ["torch.float32"], "rotary tables keep their digits"
    assert record["exported"] == ["torch.float32"], "the master's type"
    assert record["shards"] == [0], "frozen weights are whole only while they are used"
    assert record["whole"], "the engine tells their shapes"


def test_another_accelerator_than_the_one_imported_is_refused(record: dict[str, Any]) -> None:
    assert "DS_ACCELERATOR=xpu" in record["refusal"]


def test_a_type_that_deepspeed_does_not_train_in_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = [torch.float32, torch.bfloat16]
    card = SimpleNamespace(supported_dtypes=lambda: served, device_name=lambda: "card")
    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", lambda: card)
    with pytest.raises(UnsupportedError, match=r"in float16 on .card.*float32, bfloat16"):
        refuse_unserved_type("float16")
    served.append(torch.float16)
    refuse_unserved_type("float16")


# -- layers that are gathered as one piece ----------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


def test_layers_are_the_outermost_members_with_parameters() -> None:
    layers = nn.ModuleList([Layer(), Layer(), nn.Identity()])
    model = nn.ModuleDict({"body": nn.ModuleDict({"layers": layers}), "head": nn.Linear(2, 2)})
    assert list(decoder_layers(model)) == [layers[0], layers[1]]


def test_a_hidden_state_given_by_name_becomes_positional() -> None:
    hidden, mask = torch.zeros(1, requires_grad=True), torch.zeros(1)
    args, kwargs = _differentiable_input_first(Layer(), (), {"mask": mask, "hidden": hidden})
    assert args == (hidden,)
    assert kwargs == {"mask": mask}


def test_a_positional_hidden_state_is_left_alone() -> None:
    hidden = torch.zeros(1, requires_grad=True)
    assert _differentiable_input_first(Layer(), (hidden,), {}) == ((hidden,), {})


@pytest.mark.parametrize("args", [(), (torch.zeros(1),)])
def test_a_layer_whose_gradients_would_be_lost_is_refused(args: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(UnsupportedError, match=r"received no input.*strategy\.gather: module"):
        _differentiable_input_first(Layer(), args, {"mask": torch.zeros(1)})
    with torch.no_grad():
        assert _differentiable_input_first(Layer(), args, {}) == (args, {})


class Weight:
    """What DeepSpeed knows of a parameter, and what was done with it."""

    def __init__(self, status: str, *, resident: bool = False) -> None:
        self.ds_status = SimpleNamespace(name=status)
        self.ds_persist = resident
        self.done: list[object] = []

    def partition(self) -> None:
        self.done.append("freed")

    def all_gather(self, together: list[Weight]) -> None:
        for each in together:
            each.done.append(("gathered", len(together)))


def test_after_an_evaluation_weights_are_as_a_step_leaves_them() -> None:
    """Intel's DeepSpeed also frees what is resident, while it records evaluations."""
    kept, freed, ahead = Weight("AVAILABLE"), Weight("NOT_AVAILABLE"), Weight("INFLIGHT")
    resident = Weight("AVAILABLE", resident=True)
    lost = [Weight("NOT_AVAILABLE", resident=True) for _ in range(2)]
    model = SimpleNamespace(
        parameters=lambda: iter([kept, lost[0], freed, ahead, resident, lost[1]])
    )
    leave_as_a_step_does(model)  # type: ignore[arg-type]
    assert kept.done == ["freed"]
    assert [each.done for each in lost] == [[("gathered", 2)]] * 2
    assert freed.done == ahead.done == resident.done == []


# -- settings ---------------------------------------------------------------------------------


class UnmarkedBackend(Backend):
    name = "plain"
    device_type = "plain"

    def engine_settings(self, engine: str) -> list[Setting]:
        return [
            Setting(name="accelerator", value="plain", reason="its own", source="test"),
            Setting(
                name="zero_optimization.overlap_comm", value=False, reason="device", source="test"
            ),
        ]


def config(sizes: ModelSizes | None = None, **changes: Any) -> dict[str, Any]:
    names = ("stage", "options", "gather", "offload", "nvme")
    options = {"gather": "layer", **{n: changes.pop(n) for n in names if n in changes}}
    half = Precision(param_dtype="bfloat16", reduce_dtype="float32")
    workload = a_workload(UnmarkedBackend(), changes.pop("precision", half), **changes)
    return as_config(zero_settings(ZeroOptions(**options), workload, sizes))


def zero_section(sizes: tuple[int, int, int] | None = None, **changes: Any) -> dict[str, Any]:
    """Args: sizes: numbers that are trained, of the largest factor, and of the largest layer."""
    names = ("trained", "largest_factor", "largest_block")
    of_model = None if sizes is None else ModelSizes(**dict(zip(names, sizes, strict=True)))
    return config(of_model, **changes)["zero_optimization"]  # type: ignore[no-any-return]


def test_factors_stay_resident_and_layers_until_their_backward() -> None:
    """Of a 70B model; of a small one, DeepSpeed's own threshold is enough."""
    layer, factor = 855_654_400, 16 * 28672
    zero = zero_section((2**27, factor, layer))
    assert zero["stage3_param_persistence_threshold"] == factor
    assert zero["stage3_max_reuse_distance"] >= 2 * layer
    assert zero["stage3_max_live_parameters"] >= 2 * layer + zero["stage3_prefetch_bucket_size"]
    assert zero_section((640, 64, 1000))["stage3_param_persistence_threshold"] == 100_000


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_buffer_of_gradients_is_no_larger_than_they_are(stage: int) -> None:
    name = "reduce_bucket_size"
    assert zero_section((123_456, 0, 0), stage=stage)[name] == 123_456
    assert name not in zero_section((10**9, 0, 0), stage=stage), "DeepSpeed's default: many buckets"


def test_linear_layers_are_torchs_own_where_recomputation_bounds_what_they_keep() -> None:
    name = "memory_efficient_linear"
    assert zero_section()[name] is False
    # The layers between would keep theirs.
    for kept in (Activations(), Activations(every=2)):
        assert zero_section(activations=kept)[name] is True
    assert name not in zero_section(stage=2)
    assert zero_section(options={name: True})[name] is True


def test_the_device_wins_over_us_and_the_run_file_over_the_device() -> None:
    assert zero_section()["overlap_comm"] is False
    changed = config(options={"overlap_comm": True})
    assert changed["zero_optimization"]["overlap_comm"] is True
    assert "accelerator" not in changed, "that one is for the import, not for the engine"


def test_precision_is_said_in_deepspeeds_words() -> None:
    found = config()
    assert found["bf16"] == {"enabled": True}
    assert found["data_types"] == {"grad_accum_dtype": "fp32"}
    assert found["communication_data_type"] == "fp32"
    half = config(precision=Precision(param_dtype="float16", reduce_dtype="float16"))
    assert half["fp16"] == {"enabled": True} and "bf16" not in half


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reduce_bukcet_size": 1}, r"bukcet_size: .* mean 'reduce_bucket_size'\? DeepSpeed"),
        ({"stage3_max_live_parametres": 1}, "; did you mean 'stage3_max_live_parameters'"),
        ({"reduce_bucket_size": "many"}, r"options\.reduce_bucket_size: .* valid integer"),
    ],
)
def test_fields_that_deepspeed_refuses_are_named(options: dict[str, Any], said: str) -> None:
    check_fields(zero_section(options={"overlap_comm": True}))
    with pytest.raises(RunFileError, match=said):
        check_fields(zero_section(options=options))


@pytest.mark.parametrize(
    ("version", "reentrant"), [("0.16.9", True), ("0.19.2", True), ("0.19.6", False)]
)
def test_checkpointing_is_reentrant_where_deepspeed_needs_it(
    version: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_versions.metadata, "version", lambda package: version)
    assert deepspeed_versions.needs_reentrant_checkpointing() is reentrant


def test_an_offloaded_optimizer_is_the_hosts_fused_one() -> None:
    meta = [("a.weight", nn.Parameter(torch.empty(2, 3, device="meta")))]
    meta += [("b.bias", nn.Parameter(torch.empty(3, device="meta")))]
    shapes = {name: tuple(p.shape) for name, p in meta}
    factory = optimizer_factory(optimizer_section(weight_decay=0.1))
    assert {group["fused"] for group in factory(meta, shapes).param_groups} == {None}
    groups = on_the_host(factory, meta, shapes).param_groups
    assert [group["fused"] for group in groups] == [True, True]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    for group, (_, parameter) in zip(groups, meta, strict=True):
        assert group["params"][0] is parameter


# -- who gathers frozen weights ----------------------------------------------------------------

FLAT = {
    "of itself": ({}, {}, 1),
    "optimizer on the host": ({"offload": "optimizer"}, {}, 2),
    "layer": ({"gather": "layer"}, {}, "strategy.gather is layer"),
    "module": ({"gather": "module"}, {}, "strategy.gather is module"),
    "fields": ({"options": {"overlap_comm": True}}, {}, "strategy.options sets fields"),
    "hpZ": ({"options": {"zero_hpz_partition_size": 2}}, {}, "strategy.options sets fields"),
    "a stage 2 that is wrong": (
        {"offload": "optimizer"},
        {"offloads": False},
        "stage 2 does not add up gradients",
    ),
    "disk": ({"offload": "optimizer", "nvme": "/fast"}, {}, "strategy.nvme needs"),
    "weights on the host": ({"offload": "parameters"}, {}, "keeps weights on the host"),
    "all on the host": ({"offload": "both"}, {}, "keeps weights on the host"),
    "one rank": ({}, {"world_size": 1}, "there is one rank"),
    "dora": ({}, {"adapter": "dora"}, "values that whole weights give"),
    "pissa": ({}, {"adapter": "taken"}, "values that whole weights give"),
    "compiled": ({}, {"compiler": object()}, "layers are compiled"),
    "accumulates": ({}, {"accumulates": True}, "a device that accumulates a graph"),
    "all weights": ({}, {"trains": "all"}, "layers are not frozen weights of their own"),
    "embedding": ({}, {"trains": "embedding"}, "weights that are larger than an adapter's"),
}


@pytest.mark.parametrize("case", FLAT)
def test_layers_are_flat_unless_something_is_named_that_keeps_them(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, changes, wanted = FLAT[case]
    changes, backend = dict(changes), UnmarkedBackend()
    right = changes.pop("offloads", True)
    monkeypatch.setattr(deepspeed_config, "offloads_gradients", lambda: right)
    for name in ("compiler", "accumulates"):
        if name in changes:
            monkeypatch.setattr(Graph, name, changes.pop(name), raising=False)
    trains = changes.pop("trains", "adapter")
    factory = model_factory({**TINY, "vocab_size": 4096}, AdapterSection(r=4))
    model = factory.skeleton() if trains == "all" else factory.adapt(factory.skeleton())
    if trains == "embedding":
        model.get_input_embeddings().requires_grad_(True)
    workload = a_workload(backend, Precision(param_dtype="float32", reduce_dtype="float32"),
                          skeleton=model, **changes)  # fmt: skip
    strategy = Zero(ZeroOptions(**options))
    stage = next(s for s in strategy.settings(workload) if s.name == "zero_optimization.stage")
    if isinstance(wanted, int):
        assert stage.value == wanted
        assert "anygauge shards frozen layers" in stage.reason
        return
    assert stage.value == 3
    assert wanted in stage.reason
    demanded = Zero(ZeroOptions(**{**options, "gather": "flat"}))
    if "gather" not in options:
        with pytest.raises(UnsupportedError, match=wanted):
            demanded.settings(workload)
