"""Cores for ranks: equal shares, none where they do not suffice, bound from the first moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from anygauge.agent.affinity import bound, cores_of_ranks
from anygauge.interface import Job, LaunchProfile, Node
from anygauge_hpu.backend import HpuBackend
from tests.helpers.jobs import make_job

# Two packages of four cores with two threads each, as `inspect_node` orders them.
SERVER = Node(cores=(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15), physical_cores=8)


def job(ranks: int, **fields: Any) -> Job:
    return make_job(
        name="t", run_directory="/r", run_file="/r/run.yaml", backend="x", strategy="zero",
        devices=ranks, rendezvous="file:///x", **fields,
    )  # fmt: skip


def test_a_gaudi_server_gives_each_rank_whole_cores_of_one_package() -> None:
    shares = cores_of_ranks(job(4), HpuBackend.launch, SERVER)
    assert shares == {0: (0, 8, 1, 9), 1: (2, 10, 3, 11), 2: (4, 12, 5, 13), 3: (6, 14, 7, 15)}


@pytest.mark.parametrize(
    ("ranks", "asked", "profile", "count"),
    [
        (4, "auto", "none", 0),
        (4, "cores", "none", 4),
        (4, "none", "cores", 0),
        (1, "auto", "cores", 0),  # a single rank may use every core
        (9, "auto", "cores", 0),  # more ranks than cores
    ],
)
def test_who_is_bound(ranks: int, asked: str, profile: str, count: int) -> None:
    found = cores_of_ranks(job(ranks, binding=asked), LaunchProfile(binding=profile), SERVER)
    assert len(found) == count


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="binding shows only with two cores or more",
)
def test_what_is_started_is_bound_and_its_starter_is_not() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    show = "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"
    with bound((core,)):
        child = subprocess.Popen([sys.executable, "-c", show], stdout=subprocess.PIPE, text=True)
    assert os.sched_getaffinity(0) == before
    out, _ = child.communicate(timeout=60)
    assert json.loads(out) == [core]
