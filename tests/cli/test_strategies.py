"""``anygauge strategies`` says what each needs, and what a backend cannot do, with its reason."""

from __future__ import annotations

import json

import pytest

from anygauge.strategies import anygauge_provide_strategies
from tests.helpers.runs import called


def test_every_strategy_is_listed_with_what_it_needs() -> None:
    listed = json.loads(called(["strategies", "--backend", "cpu", "--json"]).stdout)
    found = {one["name"]: one for one in listed["strategies"]}
    assert listed["backend"] == "cpu"
    assert {spec.name for spec in anygauge_provide_strategies()} <= found.keys()
    assert [name for name, one in found.items() if one["default"]] == ["auto"]
    assert found["single"]["ranks"] == "1" and not found["single"]["needs"]
    shared = {"tp", "sequence_parallel", "cp", "cp_method", "pp", "schedule"}
    assert shared <= {*found["ddp"]["fields"]}
    assert shared | {"dp_replicate"} <= {*found["fsdp"]["fields"]}
    assert (
        found["zero"]["packages"].keys() == {"deepspeed"} and found["zero"]["packages"]["deepspeed"]
    )
    assert not any(one["refused"] for one in found.values())


def test_what_a_backend_cannot_do_is_told_with_its_reason() -> None:
    pytest.importorskip("anygauge_lazy", reason="needs `make plugins`")
    shown = called(["strategies", "--backend", "lazy"]).stdout
    assert "single\n    One process, one device, plain torch.\n    ranks: 1\n    lazy: yes" in shown
    assert (
        "lazy: no. backend 'lazy' lacks 'collectives', needed because DDP sums gradients" in shown
    )
    assert "torch has no process group for lazy tensors" in shown
