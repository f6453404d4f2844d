"""Each operation means the same on every rank: two real processes on gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this build of torch has no gloo",
)

RANK = Path(__file__).with_name("collectives_rank.py")
REPOSITORY = RANK.parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    rendezvous = (tmp_path_factory.mktemp("ranks") / "rendezvous").as_uri()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), rendezvous, str(rank), "2"],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


# Rank 0 has [1, 0], rank 1 has [2, 10].
@pytest.mark.parametrize(
    ("operation", "result"),
    [
        ("sum", [3.0, 10.0]),
        ("mean", [1.5, 5.0]),
        ("max", [2.0, 10.0]),
        ("broadcast", [2.0, 10.0]),
        ("gaps", [[1.5, 10.0], [3.0, 20.0]]),
        ("all_gather", [[1.0, 0.0], [2.0, 10.0]]),
        ("objects", [{"rank": 0, "host": "h0"}, {"rank": 1, "host": "h1"}]),
    ],
)
def test_every_rank_has_the_result(
    ranks: list[dict[str, Any]], operation: str, result: object
) -> None:
    assert [seen[operation] for seen in ranks] == [result, result]


def test_reductions_are_in_place(ranks: list[dict[str, Any]]) -> None:
    assert all(seen["in_place"] for seen in ranks)


def test_numbers_are_summed_in_double_precision(ranks: list[dict[str, Any]]) -> None:
    assert [seen["host_sum"] for seen in ranks] == [[2.0**24 + 1, 1.0]] * 2


def test_an_unknown_operation_is_refused_before_anyone_waits(ranks: list[dict[str, Any]]) -> None:
    assert all("'product' is none of" in seen["refused"] for seen in ranks)


def test_a_process_alone_needs_no_group(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["alone"] == [[2.5], ["me"]]


def test_closing_leaves_the_group(ranks: list[dict[str, Any]]) -> None:
    assert all(seen["closed"] for seen in ranks)
