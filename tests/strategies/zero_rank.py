"""One rank of ZeRO-3 on a device that wants its graph cut and its memory released in step.

Run as a script: ``zero_rank.py OUTPUT``. The device is the host under a stand-in facet that only
records; what is recorded is written as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from anygauge.config.schema import AdapterSection
from anygauge.interface import Graph, Phase, UnsupportedError
from anygauge.interface.strategy import Precision
from anygauge.kernels.loss import model_loss
from anygauge.registry import Registry
from anygauge.strategies.zero import Zero
from anygauge.strategies.zero_options import ZeroOptions
from anygauge.strategies.zero_runtime import import_deepspeed, refuse_unserved_type
from tests.helpers.build import batch_of, build_context, model_factory
from tests.helpers.runs import TINY


class Recording(Graph):
    """Cuts nothing; remembers what it was asked."""

    sync_on_release = True

    def __init__(self) -> None:
        self.phases: list[str] = []

    def mark_step(self, phase: Phase) -> None:
        self.phases.append(phase.value)


def main(output: Path) -> None:
    backend = Registry.load().create_backend("cpu")
    graph = Recording()
    backend.graph = graph
    waits = 0

    def synchronize() -> None:
        nonlocal waits
        waits += 1

    backend.placement.synchronize = synchronize  # type: ignore[method-assign]
    device = backend.open(0)
    backend.collectives.open(
        rendezvous=os.environ["RENDEZVOUS"], rank=0, world_size=1, timeout_s=60, device=device
    )
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
        rank=0,
        world_size=1,
        micro_batch=1,
        max_norm=1.0,
    )
    # Nothing may stay resident, or nothing would be released.
    engine = Zero(ZeroOptions(options={"stage3_param_persistence_threshold": 0})).build(context)
    ids = torch.arange(8)[None]
    batch = batch_of(ids)
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
    backend.close()
    result["float16"] = refusal_of("float16")
    # What DeepSpeed trains in is the processor's affair: some have instructions for float16.
    accelerator = get_accelerator()
    result["float16 served"] = bool(accelerator.is_fp16_supported())
    for name, answer in (("elsewhere", False), ("there", True)):
        with mock.patch.object(accelerator, "is_fp16_supported", return_value=answer):
            result[f"float16 {name}"] = refusal_of("float16")
    output.write_text(json.dumps(result))


def get_accelerator() -> Any:
    from deepspeed.accelerator import get_accelerator as get

    return get()


def refusal_of(dtype: str) -> str | None:
    try:
        refuse_unserved_type(dtype)
    except UnsupportedError as error:
        return str(error)
    return None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
