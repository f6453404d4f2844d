"""Arithmetic of what a step computes and sends."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from anygauge.planning.memory import RunMemory
from anygauge.planning.work import Traffic, Work
from tests.planning.standins import memory


def gathered(
    count: float, operation: str = "all_gather", group: tuple[int, ...] = (0, 1, 2, 3)
) -> Traffic:
    return Traffic(operation=operation, group=group, waited=False, times=2, bytes=count)


def work(layers: int, send: float = 0.0) -> Work:
    """Of so many layers, and of what there is once."""
    traffic = [gathered(100.0 * layers)]
    if send:
        traffic.append(gathered(send, "send", (0, 1)))
    return Work(
        flops={"bfloat16": 10.0 * layers + 5, "float32": 1.0},
        matrix_bytes=3.0 * layers,
        other_bytes=4.0 * layers,
        copied_bytes=0.0,
        host_bytes=1.0,
        operations=20.0 * layers + 7,
        traffic=tuple(traffic),
    )


def test_more_layers_are_more_of_what_one_adds() -> None:
    found = work(3).further(work(2), 4)
    assert found == replace(work(7), traffic=(replace(gathered(700.0), times=2),))


def test_what_is_missing_on_one_side_is_none() -> None:
    assert work(1, send=8).plus(work(1)).given == {"all_gather": 200, "send": 8}
    assert work(1).plus(Work.none()) == work(1)
    assert work(1).plus(work(1)).host_bytes == 2


@pytest.mark.parametrize(
    ("operation", "wire"),
    [("all_gather", 75), ("reduce_scatter", 75), ("all_reduce", 150), ("send", 100)],
)
def test_bytes_on_the_wire_are_a_rings(operation: str, wire: float) -> None:
    assert gathered(100, operation).wire == wire


def test_a_group_leaves_its_machine_where_its_ranks_do() -> None:
    assert not gathered(1).spans(4)
    assert gathered(1).spans(2)
    assert not gathered(1, group=(2, 3)).spans(2)


def test_json_keeps_all_of_a_run() -> None:
    found = replace(memory(1000, host=5), work=work(2, send=1))
    assert RunMemory.of_record(json.loads(json.dumps(found.record()))) == found
