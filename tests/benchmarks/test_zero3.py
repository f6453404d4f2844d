"""The settings of the loop written by hand are anygauge's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.schema import PrecisionSection, resolve_precision
from anygauge.interface import Activations
from anygauge.strategies.zero.deepspeed_config import ModelSizes, as_config, zero_settings
from anygauge.strategies.zero.spec import ZeroOptions
from anygauge_cpu.backend import CpuBackend
from benchmarks.contender_plan import Dtype
from benchmarks.contenders.loops import zero3_by_hand
from tests.benchmarks.test_measure import plan
from tests.helpers.build import a_workload


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("intermediate", [1376, 20_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_settings_by_hand_are_those_of_a_dry_run(
    tmp_path: Path, dtype: Dtype, intermediate: int, checkpointing: bool
) -> None:
    given = plan(
        tmp_path, model=str(tmp_path), dtype=dtype, accumulation=3, checkpointing=checkpointing
    )
    (tmp_path / "config.json").write_text(
        json.dumps({"hidden_size": 512, "intermediate_size": intermediate})
    )
    backend = CpuBackend()
    factor = given.lora_rank * intermediate
    precision = resolve_precision(PrecisionSection(param_dtype=dtype), backend.support)
    ours: dict[str, Any] = as_config(
        zero_settings(
            ZeroOptions(gather="layer"),
            a_workload(
                backend,
                precision,
                micro_batch=given.micro_batch,
                max_norm=given.max_norm,
                activations=Activations(every=int(given.checkpointing)),
            ),
            ModelSizes(trained=10**6, largest_factor=factor, largest_block=3_000_000),
        )
    )
    # Memory alone; whoever writes the loop by hand leaves DeepSpeed's default.
    assert ours["zero_optimization"].pop("reduce_bucket_size") == 10**6
    assert {**zero3_by_hand(given), "gradient_accumulation_steps": 1} == ours
