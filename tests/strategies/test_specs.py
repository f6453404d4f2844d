"""What strategies refuse before torch is imported, and how they divide rows among ranks."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from anygauge.interface import (
    Activations,
    AnygaugeError,
    Backend,
    Precision,
    StrategyRun,
    UnsupportedError,
)
from anygauge.strategies.ddp.spec import DDP
from anygauge.strategies.fsdp.spec import FSDP, FsdpOptions, num_shards
from anygauge.strategies.shared.degrees import Degrees, check_model, mesh_axes, rank_share
from anygauge.strategies.zero import deepspeed_versions
from anygauge.strategies.zero.spec import ZERO, ZeroOptions
from tests.helpers.run_ranks import on_ranks

SPECS: dict[str, tuple[Any, Any]] = {
    "ddp": (DDP, Degrees),
    "fsdp": (FSDP, FsdpOptions),
    "zero": (ZERO, ZeroOptions),
}
OF_THE_RUN = {each.name for each in dataclasses.fields(StrategyRun)} - {"options"}


def check(name: str, **given: Any) -> None:
    """By a strategy's spec: a run of 4 ranks; `given` are fields of its section, and of the run."""
    spec, options = SPECS[name]
    usual = {"world_size": 4, "optimizer": "adamw"}
    of_run = {field: given.pop(field) for field in OF_THE_RUN & given.keys()}
    spec.check(StrategyRun(options=options(**given), **{**usual, **of_run}))


INTERLEAVED = {"pp": 2, "schedule": "interleaved"}
ZERO_BUBBLE = {"pp": 2, "schedule": "zero_bubble", "micro_batches": 4}
BF16 = Precision(param_dtype="bfloat16", reduce_dtype="bfloat16")
MIXED = Precision(param_dtype="bfloat16", reduce_dtype="float32")
OF_ROUTERS = {"micro_batches": 2, "router_aux_loss": True}
OF_ITS_OWN = r"only its own optimizer.*strategy\.offload: opt"
DISK = {"device": "nvme", "nvme_path": "/fast"}
OFFLOADING: list[dict[str, Any]] = [
    *({"offload_optimizer": where} for where in ({"device": "cpu"}, DISK)),
    *({"offload_param": DISK}, {"cpu_offload": True}),
]
OTHER_OPTIONS: list[dict[str, Any]] = [
    *({"offload_optimizer": where} for where in ({"device": "none"}, None)),
    *({"cpu_offload": False}, {"reduce_bucket_size": 1000}),
]
ON_DISK = {"nvme": "/fast", "offload": "optimizer"}
CASES: list[tuple[str, dict[str, Any], str | None]] = [
    ("ddp", {"pp": 3}, r"not a multiple of 3\. Set strategy\.pp to one of 1, 2, 4"),
    ("ddp", {"pp": 2, "tp": 2, "micro_batches": 2}, None),
    ("ddp", {"tp": 4, "pp": 2}, r"pp: 4 ranks .* divided by strategy\.tp 4 are not .* of 2"),
    *(
        ("ddp", {"cp": 2, name: 2}, rf"strategy\.cp: 2 and strategy\.{name}: 2 cannot be combined")
        for name in ("tp", "pp")
    ),
    ("ddp", {"schedule": "gpipe"}, "nothing to order"),
    ("ddp", {"pp": 2, "micro_batches": 2}, None),
    ("ddp", {"pp": 2}, "at least 2 micro-batches, but a rank has 1"),
    ("ddp", {**INTERLEAVED, "micro_batches": 5}, "a multiple of 2, or fewer than 4 micro-batches"),
    ("ddp", {**ZERO_BUBBLE, "activations": Activations()}, None),
    ("ddp", {**ZERO_BUBBLE, "activations": Activations(every=2)}, r"strategy\.schedule: 1f1b, or"),
    ("ddp", {"pp": 2, "micro_batches": 4, "adapter": "dora"}, r"DoRA.*strategy\.pp divides"),
    *(
        ("ddp", {name: 2, **OF_ROUTERS}, f"router_aux_loss_coef.*strategy.{name}: 1")
        for name in ("cp", "tp", "pp")
    ),
    ("fsdp", {"pp": 2}, r"name: fsdp and strategy\.pp: 2 cannot.*Use strategy\.name: ddp"),
    ("fsdp", {"dp_replicate": 3}, "dp_replicate 3 does not divide 4.*one of 1, 2, 4"),
    ("fsdp", {"dp_replicate": 2, "dp_shard": 4}, "2 x 4 is not 4"),
    ("fsdp", {"dp_shard": 0}, "1 x 0 is not 4"),
    ("fsdp", {"cp": 3}, "4 ranks .* are not a multiple of 3. Set strategy.cp to one of 1, 2, 4"),
    ("fsdp", {"cp": 2, "dp_shard": 4}, "1 x 4 is not 2, .* ranks .* divided by strategy.cp 2"),
    ("fsdp", {"optimizer_sees_full_parameters": True}, "only parts of them.*adamw_8bit"),
    ("fsdp", {"adapter": "dora"}, "norms of whole weights.*zero, ddp or single"),
    *(("zero", {"options": options}, OF_ITS_OWN) for options in OFFLOADING),
    *(("zero", {"options": options}, None) for options in OTHER_OPTIONS),
    ("zero", {"stage": 0, "offload": "optimizer"}, "stage 0 offloads nothing"),
    ("zero", {"stage": 2, "offload": "parameters"}, "stage 2 keeps all weights on every device"),
    ("zero", {"stage": 1, "offload": "both"}, "stage 1 keeps all weights on every device"),
    *(("zero", {"offload": name}, None) for name in ("optimizer", "parameters", "both")),
    ("zero", ON_DISK, None),
    *(
        ("zero", {**ON_DISK, **other}, r"optimizer of stage 3 goes; with weights.*without a mes")
        for other in ({"offload": "none"}, {"offload": "both"}, {"stage": 2})
    ),
    ("zero", {**ON_DISK, "optimizer": "adamw_8bit"}, r"only 32-bit state.*adamw, lion or sgd"),
    ("zero", {"stage": 1, "precision": MIXED}, None),
    ("zero", {"stage": 0, "precision": BF16}, None),
    ("zero", {"stage": 0, "precision": MIXED}, r"stage 0.*precision\.reduce_dtype: param_dtype"),
]
RECOMPUTED = Activations(every=1)
SELECTIVE = Activations(every=1, selective=True)
HOST = {"offload": "optimizer"}
NOBODY = {"reentrant_only": "nobody has tried the other"}
OTHER = {"reentrant": False, "activations": RECOMPUTED}
ROUTED = {"reentrant": True, "activations": RECOMPUTED, "router_aux_loss": True}
VERSIONS: list[tuple[str, dict[str, Any], str | None]] = [
    ("0.16.9", {"stage": 3, **HOST}, None),
    ("0.16.9", {"stage": 2, **HOST}, r"stage 2, DeepSpeed 0\.16\.9 trains with other losses"),
    ("0.19.8+cpu", {"stage": 3, **HOST}, None),
    ("0.19.8+cpu", {"stage": 2, **HOST}, None),
    ("0.16.9", ON_DISK, r"tested with DeepSpeed 0\.19\.8, not with 0\.16\.9"),
    ("0.16.9", {**ON_DISK, "ranks_run_here": False}, None),
    ("0.16.9", {"activations": Activations(every=2)}, None),
    ("0.16.9", {"activations": SELECTIVE}, r"0\.16\.9 needs .* from 0\.19\.6.*Leave it out"),
    ("0.19.6", {"activations": SELECTIVE}, None),
    ("0.19.8", {"reentrant": True, "activations": SELECTIVE}, r"reentrant asks.*reentrant out"),
    *((version, ROUTED, r"router_aux_loss_coef") for version in ("0.16.9", "0.19.8")),
    # A device that recomputes by one form alone gets no other.
    ("0.19.8", OTHER, None),
    ("0.19.8", {**OTHER, **NOBODY}, r"false: with .* 0\.19\.8.*nobody has tried .* Set strat"),
    ("0.19.8", {**OTHER, **NOBODY, "reentrant": True}, None),
    ("0.19.8", {**NOBODY, "reentrant": False}, None),
    ("0.19.5", {**OTHER, **NOBODY}, None),
    ("0.16.1+hpu.synapse.v1.21.0", {**OTHER, **NOBODY}, None),
]
"""Releases of DeepSpeed, fields of `zero`, and what is said of them."""


@pytest.mark.parametrize(
    ("version", "name", "given", "said"),
    [
        *(("0.19.8", *case) for case in CASES),
        *((version, "zero", *case) for version, *case in VERSIONS),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(
    version: str,
    name: str,
    given: dict[str, Any],
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deepspeed_versions.metadata, "version", lambda package: version)
    if said is None:
        check(name, **given)
        return
    with pytest.raises(AnygaugeError, match=said):
        check(name, **given)


def test_options_and_checks_of_strategies_need_no_torch() -> None:
    code = "import sys; import anygauge.strategies; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_kernels_of_the_device_are_called_where_they_were_tried() -> None:
    for stage in (1, 2, 3):
        assert ZERO.unused_kernels(ZeroOptions(stage=stage)).keys() == {"clip_grad_norm"}
    assert "stage 0" in ZERO.unused_kernels(ZeroOptions(stage=0))["adamw"]
    for options in (ZeroOptions(stage=2, offload="optimizer"), ZeroOptions(offload="both")):
        assert "host" in ZERO.unused_kernels(options)["adamw"]
    assert FSDP.unused_kernels(FsdpOptions()).keys() == {"clip_grad_norm"}
    assert "host" in FSDP.unused_kernels(FsdpOptions(offload="both"))["adamw"]


# -- models -----------------------------------------------------------------------------------


def test_heads_and_layers_are_divided_by_their_number() -> None:
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_hidden_layers": 3}
    config = AutoConfig.for_model("llama", **sizes)
    for divided in (Degrees(cp=4), Degrees(cp=3, cp_method="ulysses"), Degrees(pp=3)):
        check_model(divided, config)
    with pytest.raises(UnsupportedError, match=r"has 6 heads. Set strategy.cp to one of 1, 2, 3"):
        check_model(Degrees(cp=4, cp_method="ulysses"), config)
    with pytest.raises(UnsupportedError, match=r"4 stages, but .* 3 layers.*to at most 1"):
        check_model(Degrees(**INTERLEAVED), config)
    check_model(Degrees(), AutoConfig.for_model("gpt2"))  # degree 1 asks nothing of a model


# -- shares -----------------------------------------------------------------------------------


def test_what_is_left_shards() -> None:
    assert [num_shards(FsdpOptions(dp_replicate=n), 4) for n in (1, 2, 4)] == [4, 2, 1]
    assert num_shards(FsdpOptions(dp_shard=4), 4) == 4
    assert [num_shards(FsdpOptions(cp=2, dp_replicate=n), 4) for n in (1, 2)] == [4, 2]


@given(
    degrees=st.sampled_from([("cp",), ("tp",), ("pp",), ("tp", "pp")]),
    degree=st.integers(1, 4),
    rows=st.integers(1, 4),
)
def test_each_part_of_the_rows_has_one_leader_and_whoever_computes_it(
    degrees: tuple[str, ...], degree: int, rows: int
) -> None:
    """Of `cp` and `pp`, ranks drop tokens of their own; those of `tp` draw alike."""
    options = Degrees(**dict.fromkeys(degrees, degree))
    world = options.tp * options.cp * options.pp * rows
    shares = [rank_share(options, rank, world) for rank in range(world)]
    assert {each.count for each in shares} == {rows}
    assert sorted(each.index for each in shares if each.leads) == list(range(rows))
    assert sorted(each.index for each in shares) == sorted([*range(rows)] * (world // rows))
    assert len({each.random_stream for each in shares}) == world // options.tp
    neighbours = options.tp * options.cp
    assert [each.index for each in shares] == [rank // neighbours % rows for rank in range(world)]
    parts = [each.sequence and (each.sequence.index, each.sequence.count) for each in shares]
    in_parts = options.cp > 1
    assert parts == [(rank % degree, degree) if in_parts else None for rank in range(world)]
    assert {each.multiple for each in shares} == {neighbours}
    assert {each.one_width for each in shares} == {64 if options.pp > 1 else 0}


def test_the_axes_of_a_mesh_are_those_of_the_degrees() -> None:
    names = ["pipeline", "data", "shard", "context", "tensor"]
    for options, sizes in (
        (Degrees(tp=2, pp=2), [2, 2, 1, 1, 2]),
        (Degrees(cp=2), [1, 4, 1, 2, 1]),
        (FsdpOptions(tp=2, dp_replicate=2), [1, 2, 2, 1, 2]),
        (FsdpOptions(cp=4, dp_shard=2), [1, 1, 2, 4, 1]),
    ):
        assert mesh_axes(options, 8) == dict(zip(names, sizes, strict=True))


# -- means ------------------------------------------------------------------------------------


def answers_of_means(backend: Backend) -> list[str]:
    """Whichever way the installed torch's gloo answers, a mean that is a sum is refused."""
    import torch.distributed as dist

    from anygauge.strategies.fsdp.engine import check_average

    reduce, group = dist.all_reduce, dist.group.WORLD
    assert group is not None

    def mean(value: Any, op: Any, group: Any, *, divisor: int | None) -> None:
        if divisor is None:
            raise RuntimeError("no such operation")
        reduce(value, op=dist.ReduceOp.SUM, group=group)
        value.div_(divisor)

    said = []
    for divisor in (2, 1, None):
        with mock.patch.object(dist, "all_reduce", functools.partial(mean, divisor=divisor)):
            try:
                check_average(group, backend.placement.device)
                said.append("accepted")
            except UnsupportedError as error:
                said.append(str(error))
    return said


def test_means_that_are_none_are_refused() -> None:
    """Where torch cannot be told to sum: asked once, with what real collectives have answered."""
    right, wrong, lacking = on_ranks(answers_of_means, world=2)[0]
    assert right == "accepted"
    assert "gloo gives 1.0 as the mean of 0 to 1. Use strategy.name: ddp" in wrong
    assert "gloo says: no such operation" in lacking
