"""Runs, cards and what is planned of runs, for tests of plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from anygauge.config.schema import RunFile
from anygauge.interface import Precision
from anygauge.interface.estimate import BACKWARD
from anygauge.planning.forecast import PHASES, Peak, RunMemory, Work
from anygauge.planning.machines import Hardware
from anygauge.planning.memory_plan import plan_run
from anygauge.registry import Registry
from tests.helpers.runs import TINY, merged

REGISTRY = Registry.load()
HARDWARE = Hardware.load(REGISTRY)


def values(*several: Mapping[str, Any]) -> dict[str, Any]:
    """A run file's, of eight ranks; sections of `several` are merged over it in turn."""
    found: dict[str, Any] = {
        "model": {"config": TINY, "tokenizer": "none"},
        "data": {"train": {"path": "rows.jsonl"}, "max_length": 1024},
        "train": {"steps": 100, "global_batch_size": 64, "micro_batch_size": 8},
        "launch": {"devices": 8},
        "strategy": {"name": "zero"},
    }
    for sections in several:
        model = {**found["model"], **sections.get("model", {})}
        strategy = sections.get("strategy", found["strategy"])
        found = {**merged(found, sections), "model": model, "strategy": strategy}
    return found


def run(*several: Mapping[str, Any], **sections: Any) -> RunFile:
    return RunFile.model_validate(values(*several, sections))


def planned(of: RunFile, backend: str = "cuda") -> RunMemory:
    """Of a run on devices of a backend."""
    ranks = of.launch.nodes * of.launch.devices
    return plan_run(of, REGISTRY, REGISTRY.create_backend(backend), ranks)


def memory(step: int, host: int | None = None, **more: Any) -> RunMemory:
    """Of a run that needs so many bytes in backward; `more` are other fields."""
    sizes = {phase: step if phase == BACKWARD else step // 4 for phase in PHASES}
    found = RunMemory(
        work=Work(),
        model_flops=(0.0, 0.0),
        device={phase: Peak.of({"tensors": size}) for phase, size in sizes.items()},
        host={} if host is None else {"load": Peak.of({"tensors": host}), BACKWARD: Peak.of()},
        strategy="square",
        precision=Precision(param_dtype="bfloat16", reduce_dtype="float32"),
        numbers=(1000, 100),
        per_layer=2**20,
        kernels={"attention": "fused", "linear_cross_entropy": "chunked"},
    )
    return replace(found, **more)
