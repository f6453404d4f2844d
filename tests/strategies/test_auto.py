"""`auto` is one of the others, and says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anygauge.interface import Backend, Precision, Share
from anygauge.strategies.auto import chosen
from tests.helpers.build import a_workload
from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import run_file

PRECISION = Precision(param_dtype="bfloat16", reduce_dtype="float32")
GIB = 2**30


class Meta(Backend):
    name = "meta"
    device_type = "meta"


def model(frozen: int, trained: int) -> nn.Module:
    parts = [nn.Parameter(torch.empty(frozen, device="meta"), requires_grad=False)]
    parts += [nn.Parameter(torch.empty(trained, device="meta"))]
    return nn.ParameterList(parts)


@pytest.mark.parametrize(
    ("ranks", "memory", "name", "why"),
    [
        (1, None, "single", "one rank"),
        (2, None, "zero, stage 3", "do not report how much memory"),
        # 2 bytes of 2**30 and 16 of 2**20 are 2.02 GiB.
        (2, 5 * GIB, "ddp", "2.02 GiB of the 5.0 GiB that each rank has, less than half"),
        (2, 4 * GIB, "zero, stage 3", "2.02 GiB of the 4.0 GiB that each rank has, more than half"),
    ],
)
def test_what_fits_twice_is_held_by_every_rank(
    ranks: int, memory: int | None, name: str, why: str
) -> None:
    skeleton = model(2**30, 2**20)
    workload = a_workload(
        Meta(), PRECISION, skeleton=skeleton, world_size=ranks, share=Share(0, ranks)
    )
    strategy, reason = chosen(workload, memory)
    assert strategy.description == name and why in reason


def test_a_run_says_what_it_became_and_keeps_it(tmp_path: Path) -> None:
    file = run_file(tmp_path, strategy={"name": "auto"}, train={"steps": 2}, launch={"devices": 2})
    (run,) = finished([RunPart(file=str(file))])
    report: dict[str, Any] = json.loads((run.folder / "report.json").read_text())
    assert report["choices"]["strategy"].startswith("ddp (auto: weights and optimizer take 0.00")
    assert "strategy: ddp (auto: " in run.out
