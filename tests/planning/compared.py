"""Runs cases twice: on ranks with values, whose tensors are counted, and rehearsed without any.

Run as a script: ``compared.py FOLDER CASE...``; writes what it found to FOLDER, and prints the
table of docs/planning.md. Without a case, it runs all.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from anygauge.planning.live import LiveBytes
from anygauge.planning.rehearsal import (
    OpenedUp,
    PlannedBackend,
    PlannedFactory,
    RehearsedBatches,
    rehearse,
    save,
)
from anygauge.planning.watch import EngineWatch

from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.config.sections import CheckpointingSection, OptimizerSection
from anygauge.interface.strategy import DeviceBatch, Precision, Strategy, Workload
from anygauge.kernels.loss import model_loss
from anygauge.models.factory import CausalModelFactory
from anygauge.planning.counting import Counter
from anygauge.planning.memory import EVALUATION, FORWARD, SAVE, STEP, UPDATE, Peak
from anygauge.registry import Registry
from anygauge.registry.registry import load_options
from anygauge.training.optimizer import optimizer_factory
from tests.helpers.build import batch_of, build_context

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One run on some ranks, of which one is compared."""

    name: str
    strategy: Mapping[str, Any]
    ranks: int = 2
    rank: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = field(default_factory=lambda: {"r": 8})
    recompute: bool | Mapping[str, Any] = True
    optimizer: str = "adamw"
    micro_batch: int = 4
    micro_batches: int = 1
    length: int = 64
    param_dtype: str = "bfloat16"
    reduce_dtype: str = "float32"

    def strategy_of(self, registry: Registry) -> Strategy:
        fields = dict(self.strategy)
        name = fields.pop("name")
        options = load_options(registry.find_strategy(name), "strategy")
        return registry.strategy(name)(options(**fields))

    def factory(self, kind: type[Any]) -> Any:
        asked = self.recompute
        return kind(
            ModelSection(config={**CONFIG, **self.config}, tokenizer="none", **self.model),
            None if self.adapter is None else AdapterSection(**self.adapter),
            attention="sdpa",
            dtype=getattr(torch, self.param_dtype),
            seed=0,
            gradient_checkpointing=asked
            if isinstance(asked, bool)
            else CheckpointingSection(**asked),
        )

    def workload(self, registry: Registry, backend: Any, rank: int) -> Workload:
        spec = registry.find_strategy(self.strategy["name"]).spec
        options = self.strategy_of(registry)
        return build_context(
            factory=self.factory(CausalModelFactory),
            optimizer=lambda *_: None,
            precision=Precision(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype),
            backend=backend,
            rank=rank,
            world_size=self.ranks,
            micro_batch=self.micro_batch,
            accumulation=self.micro_batches,
            length=self.length,
            share=spec.share(getattr(options, "options", None), rank, self.ranks),
        ).workload

    @property
    def adapted(self) -> dict[str, Any]:
        """Fields that are not as usual, in words."""
        usual = ComparedRun(name="", strategy={})
        names = ("recompute", "optimizer", "micro_batch", "micro_batches", "length", "param_dtype")
        found = {n: getattr(self, n) for n in names if getattr(self, n) != getattr(usual, n)}
        return {**found, **({"dora": True} if (self.adapter or {}).get("dora") else {})}

    @property
    def on_its_way(self) -> int:
        """Bytes that may still be on their way to another stage, or not: two ranks' clocks tell."""
        width = {**CONFIG, **self.config}["hidden_size"]
        stages = self.strategy.get("pp", 1) > 1
        return self.micro_batch * self.length * width * 2 if stages else 0

    def batch(self, device: torch.device) -> DeviceBatch:
        return batch_of(torch.zeros(self.micro_batch, self.length, dtype=torch.long, device=device))


def _case(**fields: Any) -> ComparedRun:
    return ComparedRun(**fields)


FULL = {"adapter": None}
SINGLE, DDP, FSDP = ({"name": name} for name in ("single", "ddp", "fsdp"))
STAGES = {"name": "ddp", "pp": 2}
DORA = {"r": 8, "dora": True}
NF4 = {"model": {"quantise": "nf4"}}
WIDE = {"config": {"vocab_size": 20_000}}
CASES = {
    case.name: case
    for case in (
        _case(name="single", strategy=SINGLE, ranks=1),
        _case(name="single-all", strategy=SINGLE, ranks=1, **FULL),
        _case(name="single-float32", strategy=SINGLE, ranks=1, param_dtype="float32"),
        _case(name="single-keeps", strategy=SINGLE, ranks=1, recompute=False),
        _case(name="single-half", strategy=SINGLE, ranks=1, recompute={"every": 2}),
        _case(name="single-selective", strategy=SINGLE, ranks=1, recompute={"selective": True}),
        _case(name="single-wide", strategy=SINGLE, ranks=1, **WIDE),
        _case(name="single-long", strategy=SINGLE, ranks=1, micro_batch=1, length=512),
        _case(name="single-sums", strategy=SINGLE, ranks=1, micro_batches=3, **FULL),
        _case(name="single-dora", strategy=SINGLE, ranks=1, adapter=DORA),
        _case(name="single-lion", strategy=SINGLE, ranks=1, optimizer="lion", **FULL),
        *(
            _case(
                name=f"{name}-{kind}{suffix}", strategy=of, ranks=ranks, model={"quantise": asked}
            )
            for name, of, ranks in (("single", SINGLE, 1), ("ddp", DDP, 2), ("fsdp", FSDP, 2))
            for kind, suffix, asked in (
                ("nf4", "", "nf4"),
                ("nf4", "-double", {"type": "nf4", "double_quantisation": True}),
                ("int8", "", "int8"),
            )
        ),
        _case(
            name="single-nf4-dora", strategy=SINGLE, ranks=1, adapter={"r": 8, "dora": True}, **NF4
        ),
        _case(name="zero3-nf4", strategy={"name": "zero"}, **NF4),
        _case(name="ddp", strategy=DDP),
        _case(name="ddp-all", strategy=DDP, **FULL),
        _case(name="ddp-sums", strategy=DDP, micro_batches=3),
        _case(name="tp", strategy={"name": "ddp", "tp": 2}),
        _case(name="tp-all", strategy={"name": "ddp", "tp": 2}, **FULL),
        _case(name="pp", strategy=STAGES, micro_batches=4),
        _case(name="pp-last", strategy=STAGES, micro_batches=4, rank=1),
        _case(name="pp-all", strategy=STAGES, micro_batches=4, **FULL),
        _case(name="pp-all-last", strategy=STAGES, micro_batches=4, rank=1, **FULL),
        _case(name="pp-gpipe", strategy={**STAGES, "schedule": "gpipe"}, micro_batches=4),
        _case(name="cp", strategy={"name": "ddp", "cp": 2}),
        _case(name="fsdp-cp-all", strategy={"name": "fsdp", "cp": 2}, **FULL),
        _case(name="fsdp", strategy=FSDP),
        _case(name="fsdp-all", strategy=FSDP, **FULL),
        _case(name="fsdp-keeps", strategy=FSDP, recompute=False),
        _case(name="fsdp-wide", strategy=FSDP, **WIDE),
        _case(name="fsdp-sums", strategy=FSDP, micro_batches=3, **FULL),
        _case(name="fsdp-once", strategy={"name": "fsdp", "gather": "step"}, micro_batches=2),
        _case(name="hsdp", strategy={"name": "fsdp", "dp_replicate": 2}, ranks=4, **FULL),
        _case(name="fsdp-tp", strategy={"name": "fsdp", "tp": 2}, ranks=4),
        *(
            _case(
                name=f"zero{stage}{suffix}",
                strategy={"name": "zero", "stage": stage},
                reduce_dtype="float32" if stage == 3 else "bfloat16",
                **more,
            )
            for stage in (0, 1, 2, 3)
            for suffix, more in (("", {}), ("-all", FULL))
        ),
        _case(name="zero3-keeps", strategy={"name": "zero"}, recompute=False),
        _case(name="zero3-wide", strategy={"name": "zero"}, **WIDE),
        _case(name="zero3-sums", strategy={"name": "zero"}, micro_batches=3),
        _case(name="zero3-4", strategy={"name": "zero"}, ranks=4),
    )
}


def rehearsed(case: ComparedRun) -> dict[str, Any]:
    """Peaks by phase of the rank that is compared, on tensors without values."""
    registry = Registry.load()
    backend = PlannedBackend(registry.create_backend("cpu"))
    backend.open(0)
    if case.strategy["name"] != "single":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group(
            "cpu:fake", store=FakeStore(), rank=case.rank, world_size=case.ranks
        )
    factory = case.factory(PlannedFactory)
    factory.device = backend.device_type
    found = rehearse(
        case.strategy_of(registry),
        factory,
        optimizer_factory(OptimizerSection(name=case.optimizer)),
        case.workload(registry, backend, case.rank),
        case.batch,
        micro_batches=case.micro_batches if case.on_its_way else 2,
    )
    return {
        **totals(found.device),
        "sent": found.work.given,
        "flops": found.work.flops,
    }


def totals(found: Mapping[str, Peak]) -> dict[str, Any]:
    """Bytes by phase, with the largest of a step's; and the kinds of what is largest of all."""
    most = max(found.values(), key=lambda peak: peak.total)
    step = max(found[phase].total for phase in STEP if phase in found)
    by_phase = {phase: peak.total for phase, peak in found.items()}
    return {**by_phase, "step": step, "kinds": dict(most.kinds)}


def measured(case: ComparedRun, rank: int, rendezvous: Path) -> dict[str, Any]:
    """Peaks by phase of a rank that computes."""
    registry = Registry.load()
    backend = registry.create_backend("cpu")
    backend.open(rank)
    if case.strategy["name"] != "single":
        backend.collectives.open(
            rendezvous=f"file://{rendezvous}",
            rank=rank,
            world_size=case.ranks,
            timeout_s=120,
            device=backend.placement.device,
        )
    workload = case.workload(registry, backend, rank)
    live = LiveBytes("cpu")
    live.counter = Counter("cpu")
    watch = EngineWatch(live, adapted=case.adapter is not None)
    found: dict[str, Peak] = {}

    def batch() -> DeviceBatch:
        watch.enter(FORWARD)
        return case.batch(backend.placement.device)

    with live, OpenedUp():
        from anygauge.interface.strategy import BuildContext

        optimizer = optimizer_factory(OptimizerSection(name=case.optimizer))
        engine = case.strategy_of(registry).build(
            BuildContext(
                factory=case.factory(CausalModelFactory),
                optimizer=watch.optimizer(optimizer),
                workload=workload,
            )
        )
        watch.built(engine)
        found |= live.take_peaks("cpu")
        for step in range(3):
            live.counter.taken()
            engine.run_step(
                RehearsedBatches(case.micro_batches, batch, lambda: None), model_loss, 100
            )
            if case.strategy["name"] != "single":
                # Gloo's thread keeps what it sent last until it has something else to do.
                dist.barrier()
            peaks = live.take_peaks("cpu")
            watch.enter(UPDATE)
            engine.update(1e-4, workload.max_norm)
            work = live.counter.taken()
            # The first step creates what later ones have.
            found |= least(found if step == 2 else {}, peaks | live.take_peaks("cpu"))
        watch.enter(EVALUATION)
        engine.evaluate(map(case.batch, [backend.placement.device]), model_loss)
        found |= live.take_peaks("cpu")
        for _ in range(3):
            watch.enter(SAVE)
            save(engine)
            found |= least(found, live.take_peaks("cpu"))
    return {
        **totals(found),
        "sent": work.given,
        "flops": work.flops,
    }


def least(before: Mapping[str, Peak], again: Mapping[str, Peak]) -> dict[str, Peak]:
    """The smaller peak of each phase that is measured again.

    A busy machine may let gloo's thread hold the tensors of a collective for a moment after the
    ranks have its result; that is no part of what the phase needs.
    """
    return {
        phase: min(peak, before.get(phase, peak), key=lambda one: one.total)
        for phase, peak in again.items()
    }


def work(role: str, case: ComparedRun, rank: int, folder: Path) -> None:
    """One process of a case."""
    world = case.ranks
    identity = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in identity.items()})
    torch.set_num_threads(1)
    if role == "rehearsed":
        found = rehearsed(case)
    else:
        found = measured(case, rank, folder / f"{case.name}.rendezvous")
    if rank == case.rank:
        (folder / f"{case.name}.{role}.json").write_text(json.dumps(found))


PHASES = ("step", "update", "evaluation", "save")


def row(case: ComparedRun, folder: Path) -> str:
    """A line of the table: bytes that were measured at most, and how far each phase was missed."""
    files = (folder / f"{case.name}.{role}.json" for role in ("rehearsed", "measured"))
    one, two = (json.loads(file.read_text()) for file in files)
    ours = ", ".join(f"{name}: {value}" for name, value in case.strategy.items() if name != "name")
    changes = [
        f"{name} {value}" for name, value in {**case.config, **case.model, **case.adapted}.items()
    ]
    cells = [
        case.name,
        case.strategy["name"] + (f" ({ours})" if ours else ""),
        str(case.ranks),
        "all weights" if case.adapter is None else "LoRA",
        ", ".join(changes),
        f"{max(two[phase] for phase in PHASES):,}",
        *(f"{100 * (one[phase] / two[phase] - 1):+.2f}%" for phase in PHASES),
    ]
    return "| " + " | ".join(cells) + " |"


def main(folder: Path, *names: str) -> None:
    print(
        "| "
        + " | ".join(("case", "strategy", "ranks", "trained", "other settings", "bytes", *PHASES))
        + " |"
    )
    print("|---|---|---:|---|---|---:|---:|---:|---:|---:|")
    for case in (CASES[name] for name in names or CASES):
        (folder / f"{case.name}.rendezvous").unlink(missing_ok=True)
        pids = []
        for role, rank in [("rehearsed", case.rank), *(("measured", r) for r in range(case.ranks))]:
            pid = os.fork()
            if not pid:
                status = 1
                try:
                    work(role, case, rank, folder)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(status)
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(f"{case.name}: exit {codes}" if any(codes) else row(case, folder), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
