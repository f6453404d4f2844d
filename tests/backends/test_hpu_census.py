"""The census of the stand-in for Gaudi: what is a new graph, what ends one, what is counted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.backends.test_hpu_standin import on_standin
from tests.gaudi_census import parts
from tests.helpers.gaudi import calls, needs_cards
from tests.standins.gaudi_operators import TABLE, read

SCRIPT = """
import json, os, torch
os.environ.pop("RANK", None)
import habana_frameworks.torch.hpu as hpu
import habana_standin
from habana_frameworks.torch.core import mark_step
hpu.init()
census = habana_standin.census()
found = {}

def graphs(name, work):
    mark_step()
    before = census.new, census.reused
    work()
    mark_step()
    found[name] = [census.new - before[0], census.reused - before[1]]

x, y = torch.ones(8, 4, device="hpu"), torch.ones(6, 4, device="hpu")
graphs("first", lambda: (x + x) * 2.0)
graphs("again", lambda: (x + x) * 2.0)
graphs("another number", lambda: (x + x) * 3.0)
graphs("another shape", lambda: (y + y) * 2.0)
graphs("another type", lambda: (x.int() + x.int()) * 2)
graphs("rows 0 to 4", lambda: x[:4] + 1)
graphs("rows 4 to 8", lambda: x[4:] + 1)
graphs("rows 0 to 4 again", lambda: x[:4] + 1)
graphs("a product more", lambda: torch.add(x, x, alpha=2))
graphs("of the same product", lambda: torch.add(x, x, alpha=3))
graphs("another dimension", lambda: (x.sum(0), x.sum(1)))
graphs("the number is asked for", lambda: (x.sum() + float(x.mean()),))
graphs("memory of another", lambda: [(x * 5).exp() for _ in range(3)])
graphs("memory of another, again", lambda: [(x * 5).exp() for _ in range(3)])
found["item"] = dict(census.copies)
x.cpu()
found["copy"] = dict(census.copies)
x.to("hpu")
found["no copy"] = dict(census.copies)
before = dict(census.fallbacks)
torch._fused_adamw_(*([torch.ones(2, device="hpu")] for _ in range(4)), [],
    [torch.ones((), device="hpu")], lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8,
    amsgrad=False, maximize=False)
found["fused"] = dict(census.fallbacks)
torch._softmax(torch.ones(2, 2, dtype=torch.float32, device="hpu"), -1, False)
found["served type"] = dict(census.fallbacks)
torch.mm(torch.ones(2, 2, dtype=torch.int32, device="hpu"),
         torch.ones(2, 2, dtype=torch.int32, device="hpu"))
found["unserved type"] = dict(census.fallbacks)
found["float mask"] = dict(census.unproven)
torch.ones(4, 4, device="hpu").tril()
torch.ones(4, 4, dtype=torch.bool, device="hpu").tril()
found["bool mask"] = dict(census.unproven)
import torch.distributed as dist
dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
z = x + 1
dist.all_reduce(z)
z += 1
mark_step()
print(json.dumps(found))
"""


def run(tmp_path: Path, **variables: str) -> tuple[dict[str, Any], list[list[Any]]]:
    """The script's findings, and the record."""
    lines = on_standin(SCRIPT, tmp_path, **variables)
    return json.loads(lines[-1]), calls(tmp_path / "record", 0)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[list[Any]]]:
    return run(tmp_path_factory.mktemp("census"))


@needs_cards
def test_a_graph_is_new_by_what_the_bridge_hashes(ran: tuple[dict[str, Any], Any]) -> None:
    found = ran[0]
    same, new = [0, 1], [1, 0]
    assert found["first"] == new and found["again"] == same
    assert found["another number"] == same, "it is a tensor of the card, not part of the graph"
    assert found["another shape"] == found["another type"] == new
    assert found["rows 0 to 4"] == new and found["rows 0 to 4 again"] == same
    assert found["rows 4 to 8"] == new, "a slice's start is part of its node"
    assert found["a product more"] == new and found["of the same product"] == same
    assert found["another dimension"] == new
    assert found["memory of another, again"] == same


@needs_cards
def test_what_the_host_asks_for_ends_a_graph(ran: tuple[dict[str, Any], Any]) -> None:
    found, record = ran
    assert sum(found["the number is asked for"]) == 2
    assert found["item"] == {"other": 1}
    assert found["copy"] == found["no copy"] == {"other": 2}
    assert [c[2] for c in record if c[0] == "host_copy"][:2] == ["item", "copy"]


@needs_cards
def test_what_the_lists_do_not_serve_is_a_fallback(ran: tuple[dict[str, Any], Any]) -> None:
    found = ran[0]
    assert found["fused"] == found["served type"] == {"_fused_adamw_": 1}
    assert found["unserved type"] == {"_fused_adamw_": 1, "mm": 1}
    assert found["float mask"] == {} and found["bool mask"] == {"tril": 1}


@needs_cards
def test_a_collective_ends_a_graph(ran: tuple[dict[str, Any], Any]) -> None:
    reasons = [call[3] for call in ran[1] if call[0] == "graph"]
    assert reasons.count("collective") == 1 and reasons[-2:] == ["collective", "mark_step"]


@needs_cards
def test_a_limit_ends_a_graph(tmp_path: Path) -> None:
    _, record = run(tmp_path, PT_HPU_MAX_COMPOUND_OP_SIZE="2")
    graphs = [call[1:4] for call in record if call[0] == "graph"]
    assert max(operations for operations, _, _ in graphs) == 2
    assert "limit" in {reason for _, _, reason in graphs}


def test_parts_of_a_record() -> None:
    graph: list[Any] = ["graph", 3, "new", "limit", False]
    copy: list[Any] = ["host_copy", "anygauge", "copy", "a.py:1"]
    phase = {name: ["phase", name] for name in ("forward", "backward", "update")}
    step = [graph, phase["forward"], graph, phase["backward"], graph, phase["update"]]
    evaluation = [graph, phase["forward"], graph, phase["forward"], copy, ["evaluation", "ends"]]
    rows: list[Any] = ["rows", 4, 96]
    found = parts([rows, rows, *step, ["rows", 4, 64], *step, *evaluation, rows, *step, copy])
    assert [part.name for part in found] == ["step 1", "step 2", "evaluation 1", "step 3", "end"]
    assert [part.widths for part in found] == [{96}, {64}, set(), {96}, set()]
    assert [part.new for part in found] == [3, 3, 2, 3, 0]
    assert [part.copies["anygauge"] for part in found] == [0, 0, 1, 0, 1]


def test_the_table_of_operators_is_that_of_the_checkout() -> None:
    source = os.environ.get("ANYGAUGE_GAUDI_SOURCE")
    if source is None:
        pytest.skip("ANYGAUGE_GAUDI_SOURCE names no checkout of gaudi-pytorch-bridge")
    assert TABLE.read_text(encoding="utf-8") == read(Path(source))
