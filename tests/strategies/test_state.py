"""A neutral state goes into every engine and comes out again, to the last bit.

It is made up. Sizes are odd on purpose: some divide by no number of ranks that is tried, so shards
are padded.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.config.schema import AdapterSection
from anygauge.interface import Backend, Counters, Engine, Precision
from anygauge.kernels.loss import model_loss
from anygauge.strategies.shared.common import trained_parameters
from anygauge.training.optimizer import optimizer_factory
from tests.helpers.build import (
    batch_of,
    build_context,
    model_factory,
    optimizer_section,
    rank_of_world,
    strategy_of,
)
from tests.helpers.gaudi import library_adamw
from tests.helpers.run_ranks import on_ranks

CONFIG = {
    **{"model_type": "llama", "hidden_size": 10, "intermediate_size": 21, "vocab_size": 37},
    **{"num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 10},
}
EVEN = {
    **{**CONFIG, "hidden_size": 20, "intermediate_size": 22, "vocab_size": 38},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
}
"""What two ranks can divide."""
UPDATES = 7
KERNEL = "adamw-kernel"
MOMENTS = ("exp_avg", "exp_avg_sq")
KEYS = {
    **{"adamw": MOMENTS, KERNEL: MOMENTS, "lion": ("exp_avg",)},
    "adamw_8bit": ("state1", "state2"),
}


@dataclass(frozen=True, kw_only=True)
class StateCase:
    """One engine on some ranks."""

    strategy: str
    ranks: int
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    param_dtype: str = "float32"
    all_weights: bool = False


def of(strategy: str, ranks: int, **more: Any) -> StateCase:
    options = {name: more.pop(name) for name in [*more] if name not in KEPT}
    return StateCase(strategy=strategy, ranks=ranks, options=options, **more)


KEPT = {each.name for each in dataclasses.fields(StateCase)}
CASES = [
    of("single", 1),
    of("zero", 1, stage=3),
    *(of("zero", 3, stage=stage) for stage in range(4)),
    # Vectors have a group of their own, without decay.
    *(of("zero", 3, stage=stage, all_weights=True) for stage in (1, 2, 3)),
    # DeepSpeed has an optimizer of its own for it.
    of("zero", 3, stage=1, param_dtype="bfloat16"),
    of("ddp", 3),
    of("fsdp", 3),
    of("ddp", 2, tp=2),
    *(of("zero", 3, stage=stage, offload="optimizer") for stage in (2, 3)),
    of("zero", 3, stage=3, optimizer="lion"),
    of("single", 1, optimizer="adamw_8bit"),
    *(of(name, 3, optimizer="adamw_8bit") for name in ("zero", "fsdp")),
    # A device's own AdamW, which counts the steps of a group, not of a parameter.
    *(of("zero", 3, stage=stage, optimizer=KERNEL, all_weights=True) for stage in (1, 2, 3)),
    of("zero", 3, stage=1, optimizer=KERNEL, param_dtype="bfloat16"),
]
SLOW = [
    of("fsdp", 4, dp_replicate=2),
    of("fsdp", 3, optimizer="lion"),
    of("ddp", 4, tp=2),
    of("fsdp", 4, tp=2),
    *(of("zero", 1, stage=stage) for stage in (0, 1, 2)),
    of("zero", 4, stage=3),
    of("zero", 3, stage=2, optimizer="adamw_8bit"),
]


@dataclass
class MadeUp:
    """A state with random digits; the same on every rank."""

    tensors: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    counters: Counters = field(default_factory=lambda: Counters(updates=UPDATES))

    @classmethod
    def like(cls, exported: Sequence[tuple[str, str, Tensor | None]], shapes: Any) -> MadeUp:
        generator = torch.Generator().manual_seed(1)
        made = cls()
        for name, key, _ in exported:
            values = torch.randn(shapes[name], generator=generator)
            # Second moments are never negative.
            made.tensors[name, key] = values.abs() if "sq" in key or key == "state2" else values
        return made

    def names(self) -> Sequence[str]:
        return list(dict.fromkeys(name for name, _ in self.tensors))

    def tensor(self, name: str, key: str) -> Tensor:
        return self.tensors[name, key]


def built(case: StateCase, backend: Backend) -> tuple[Engine, dict[str, tuple[int, ...]]]:
    """A case's engine, and the shapes of what it trains."""
    rank, world = rank_of_world()
    factory = model_factory(
        EVEN if "tp" in case.options else CONFIG,
        None if case.all_weights else AdapterSection(r=5),
        attention="sdpa",
        dtype=getattr(torch, case.param_dtype),
    )
    kernel = case.optimizer == KERNEL
    section = optimizer_section() if kernel else optimizer_section(name=case.optimizer)
    strategy, _ = strategy_of(case.strategy, case.options, rank, world)
    engine = strategy.build(
        build_context(
            factory=factory,
            optimizer=optimizer_factory(section, *((library_adamw(),) if kernel else ())),
            precision=Precision(param_dtype=case.param_dtype, reduce_dtype="float32"),
            backend=backend,
        )
    )
    skeleton = factory.adapt(factory.skeleton())
    return engine, {name: tuple(p.shape) for name, p in trained_parameters(skeleton)}


def works(backend: Backend, cases: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """One rank of some cases, in one process group."""
    found = []
    for fields in cases:
        print(fields, flush=True)  # the last one is shown with a failure
        found.append(work(backend, StateCase(**fields)))
    return found


def work(backend: Backend, case: StateCase) -> dict[str, list[float]]:
    """One rank of a case: the state after a step from what was put in; rank 0 compares."""
    rank, _ = rank_of_world()
    engine, shapes = built(case, backend)
    ids = torch.arange(8).reshape(1, 8) + rank

    def step(loss: Callable[..., Any] = model_loss) -> list[Tensor]:
        result = engine.run_step([batch_of(ids)], loss, 8 * case.ranks)
        engine.update(1e-3, 1.0)
        return list(result)

    keys = ("parameter", *KEYS[case.optimizer])
    state = MadeUp.like([(name, key, None) for name in shapes for key in keys], shapes)
    if case.all_weights:
        step()
        after_a_step = exported(engine)
        assert rank or len(after_a_step) == len(state.tensors), "all of it is there after a step"
    engine.import_state(state)
    first = exported(engine)
    if rank == 0:
        if case.ranks > 2:
            sizes = {value.numel() for value in state.tensors.values()}
            assert any(size % case.ranks for size in sizes), "so padding is among the cases"
        different = compare(first, state.tensors, torch.equal)
        if case.optimizer == "adamw_8bit":
            # Codes cannot hold any digits; what they hold comes out as it went in. Codes of 8 bits
            # have seven bits of mantissa at the largest, fewer for small values.
            assert not [name for name in different if name.endswith("parameter")]
            assert not compare(first, state.tensors, close_to_codes)
        else:
            assert not different
            # Lion corrects no bias, so it counts no steps.
            assert engine.counters().updates == (0 if case.optimizer == "lion" else UPDATES)
    of_rank_0 = [first]
    if case.strategy != "single":
        dist.broadcast_object_list(of_rank_0, src=0)
    engine.import_state(MadeUp(tensors=of_rank_0[0]))
    second = exported(engine)
    assert torch.stack(step()).isfinite().all()
    third = exported(engine)
    updates = engine.counters().updates
    step(lambda outputs: model_loss(outputs) * torch.inf)
    fourth = exported(engine)
    if rank == 0:
        assert case.optimizer in ("lion", "adamw_8bit") or updates == UPDATES + 1
        assert not compare(second, first, torch.equal), "it is stable"
        moved = compare(third, second, torch.equal)
        assert len(moved) >= 0.9 * len(first), "a step was made from there"
        assert not [
            name for name in compare(fourth, third, torch.equal) if name.endswith(" parameter")
        ], "infinity moves nothing"
    engine.close()
    return {" ".join(key): value.tolist() for key, value in third.items()} if rank == 0 else {}


def exported(engine: Engine) -> dict[tuple[str, str], Tensor]:
    return {(name, key): value for name, key, value in engine.export_state() if value is not None}


def compare(
    found: dict[tuple[str, str], Tensor],
    wanted: dict[tuple[str, str], Tensor],
    same: Callable[[Tensor, Tensor], bool],
) -> list[str]:
    assert found.keys() == wanted.keys()
    return [" ".join(key) for key in wanted if not same(found[key], wanted[key])]


def close_to_codes(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 0.02 * b.abs().max())


@functools.cache
def results(ranks: int, grouped: bool, slow: bool) -> dict[str, dict[str, list[float]]]:
    """What rank 0 found after a step, of each case of so many ranks, in a process group or not."""
    cases = [
        dataclasses.asdict(case)
        for case in (SLOW if slow else CASES)
        if (case.ranks, case.strategy != "single") == (ranks, grouped) and not lacks_library(case)
    ]
    found = on_ranks(works, cases, world=ranks, alone=grouped)[0]
    return dict(zip(map(str, cases), found, strict=True))


def after_a_step(case: StateCase) -> dict[str, list[float]]:
    """On rank 0."""
    found = results(case.ranks, case.strategy != "single", case in SLOW)
    return found[str(dataclasses.asdict(case))]


def lacks_library(case: StateCase) -> bool:
    return case.optimizer == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: " ".join(map(str, dataclasses.astuple(case))),
)
def test_what_went_in_comes_out(case: StateCase) -> None:
    if lacks_library(case):
        pytest.skip("bitsandbytes is not installed")
    assert after_a_step(case)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_devices_own_update_is_torchs(stage: int) -> None:
    """From the same made-up state, in parts of flat vectors; but for where epsilon is added."""
    wanted, found = (
        after_a_step(of("zero", 3, stage=stage, optimizer=optimizer, all_weights=True))
        for optimizer in ("adamw", KERNEL)
    )
    for key, value in wanted.items():
        torch.testing.assert_close(
            torch.tensor(found[key]), torch.tensor(value), rtol=1e-4, atol=1e-6
        )
