"""Puts a made-up state into engines and takes it out again, on several numbers of ranks.

Sizes are odd on purpose: some divide by no number of ranks that is tried, so shards are padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.config.schema import AdapterSection
from anygauge.config.sections import OptimizerSection
from anygauge.interface import Backend, Counters, Engine, Precision, Strategy
from anygauge.kernels.loss import model_loss
from anygauge.strategies.ddp.engine import Ddp
from anygauge.strategies.fsdp.engine import Fsdp
from anygauge.strategies.fsdp.options import FsdpOptions
from anygauge.strategies.shared.common import trained_parameters
from anygauge.strategies.shared.degrees import Degrees
from anygauge.strategies.single.engine import Single
from anygauge.strategies.zero.engine import Zero
from anygauge.strategies.zero.options import ZeroOptions
from anygauge.training.optimizer import optimizer_factory
from tests.helpers.build import batch_of, build_context, model_factory, rank_of_world
from tests.helpers.gaudi import library_adamw

CONFIG = {
    "model_type": "llama",
    "hidden_size": 10,
    "intermediate_size": 21,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "vocab_size": 37,
    "tie_word_embeddings": False,
}
EVEN = {
    "hidden_size": 20,
    "intermediate_size": 22,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 38,
}
"""What two ranks can divide."""

UPDATES = 7
KERNEL = "adamw-kernel"


@dataclass(frozen=True, kw_only=True)
class StateCase:
    """One engine on some ranks."""

    strategy: str
    ranks: int
    optimizer: str = "adamw"
    param_dtype: str = "float32"
    all_weights: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return {**CONFIG, **EVEN} if "tensor" in self.strategy else CONFIG

    @property
    def name(self) -> str:
        dtype = "" if self.param_dtype == "float32" else f"-{self.param_dtype}"
        trained = "-all" if self.all_weights else ""
        return f"{self.strategy}-{self.ranks}-{self.optimizer}{dtype}{trained}"

    def make(self) -> Strategy:
        name, stage = self.strategy.rstrip("0123"), self.strategy[-1:]
        offload = "optimizer" if name == "zero-offloading" else "none"
        return {
            "single": Single,
            "ddp": lambda: Ddp(Degrees()),
            "tensor": lambda: Ddp(Degrees(tp=2)),
            "tensor-fsdp": lambda: Fsdp(FsdpOptions(tp=2)),
            "fsdp": lambda: Fsdp(FsdpOptions()),
            "hsdp": lambda: Fsdp(FsdpOptions(dp_replicate=2)),
        }.get(name, lambda: Zero(ZeroOptions(stage=int(stage), offload=offload)))()


CASES = (
    StateCase(strategy="single", ranks=1),
    *(
        StateCase(strategy=f"zero{stage}", ranks=ranks)
        for stage in (0, 1, 2, 3)
        for ranks in (1, 3)
    ),
    # Vectors have a group of their own, without decay.
    *(StateCase(strategy=f"zero{stage}", ranks=3, all_weights=True) for stage in (1, 2, 3)),
    # DeepSpeed has an optimizer of its own for it.
    StateCase(strategy="zero1", ranks=3, param_dtype="bfloat16"),
    *(StateCase(strategy=name, ranks=3) for name in ("ddp", "fsdp")),
    *(StateCase(strategy=name, ranks=4) for name in ("zero3", "hsdp", "tensor-fsdp")),
    *(StateCase(strategy="tensor", ranks=ranks) for ranks in (2, 4)),
    *(StateCase(strategy=f"zero-offloading{stage}", ranks=3) for stage in (2, 3)),
    *(StateCase(strategy=name, ranks=3, optimizer="lion") for name in ("zero3", "fsdp")),
    *(
        StateCase(strategy=name, ranks=ranks, optimizer="adamw_8bit")
        for name, ranks in (("single", 1), ("zero2", 3), ("zero3", 3), ("fsdp", 3))
    ),
    # A device's own AdamW, which counts the steps of a group, not of a parameter.
    *(
        StateCase(strategy=f"zero{stage}", ranks=3, optimizer=KERNEL, all_weights=True)
        for stage in (1, 2, 3)
    ),
    StateCase(strategy="zero1", ranks=3, optimizer=KERNEL, param_dtype="bfloat16"),
)


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


def work(backend: Backend, fields: dict[str, Any]) -> dict[str, Any]:
    """One rank of a case: what it found; rank 0 compares."""
    case = StateCase(**fields)
    rank, _ = rank_of_world()
    factory = model_factory(
        case.config,
        None if case.all_weights else AdapterSection(r=5),
        attention="sdpa",
        dtype=getattr(torch, case.param_dtype),
    )
    engine = case.make().build(
        build_context(
            factory=factory,
            optimizer=optimizer_factory(OptimizerSection(), library_adamw())
            if case.optimizer == KERNEL
            else optimizer_factory(OptimizerSection(name=case.optimizer)),
            precision=Precision(param_dtype=case.param_dtype, reduce_dtype="float32"),
            backend=backend,
        )
    )
    ids = torch.arange(8).reshape(1, 8) + rank
    after_a_step = 0
    if case.all_weights:
        engine.run_step([batch_of(ids)], model_loss, 8 * case.ranks)
        engine.update(1e-3, 1.0)
        after_a_step = len(exported(engine)) if rank == 0 else len(list(engine.export_state()))
    skeleton = factory.adapt(factory.skeleton())
    shapes = {name: tuple(p.shape) for name, p in trained_parameters(skeleton)}
    keys = keys_of(case.optimizer)
    empty = [(name, key, None) for name in shapes for key in ("parameter", *keys)]
    state = MadeUp.like(empty, shapes)
    engine.import_state(state)
    first = exported(engine)
    found: dict[str, Any] = {
        "after_a_step": after_a_step if case.all_weights else len(first),
        "tensors": len(first),
        "expected": len(state.tensors),
        "updates": engine.counters().updates,
        "sizes": sorted({value.numel() for value in state.tensors.values()}),
    }
    if rank == 0:
        found["different"] = compare(first, state.tensors, torch.equal)
        # Codes of 8 bits have seven bits of mantissa at the largest, fewer for small values.
        found["far"] = compare(first, state.tensors, close_to_codes)
    of_rank_0 = [first]
    if case.strategy != "single":
        dist.broadcast_object_list(of_rank_0, src=0)
    state = MadeUp(tensors=of_rank_0[0])
    engine.import_state(state)
    second = exported(engine)
    result = engine.run_step([batch_of(ids)], model_loss, 8 * case.ranks)
    engine.update(1e-3, 1.0)
    found["goes_on"] = bool(torch.stack(list(result)).isfinite().all())
    third = exported(engine)
    found["updates_after"] = engine.counters().updates
    engine.run_step([batch_of(ids)], lambda outputs: model_loss(outputs) * torch.inf, 8)
    engine.update(1e-3, 1.0)
    fourth = exported(engine)
    if rank == 0:
        found["not_stable"] = compare(second, first, torch.equal)
        found["moved"] = compare(third, second, torch.equal)
        weights = [
            {key: value for key, value in each.items() if key[1] == "parameter"}
            for each in (third, fourth)
        ]
        found["moved_by_infinity"] = compare(weights[1], weights[0], torch.equal)
        found["third"] = {" ".join(key): value.tolist() for key, value in third.items()}
    engine.close()
    return found


def keys_of(optimizer: str) -> Sequence[str]:
    return {
        "adamw": ("exp_avg", "exp_avg_sq"),
        KERNEL: ("exp_avg", "exp_avg_sq"),
        "lion": ("exp_avg",),
        "adamw_8bit": ("state1", "state2"),
    }[optimizer]


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
