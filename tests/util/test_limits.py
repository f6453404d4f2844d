"""One limit for all process groups: two real processes on gloo, one of which is stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.distributed.distributed_c10d as c10d

from anygauge.interface import Collectives
from anygauge.util.limits import limit_groups, release_groups
from tests.helpers.processes import end

RANK = Path(__file__).with_name("limits_rank.py")
REPOSITORY = RANK.parents[2]
HANGS_S = 120
"""Torch's own default is 1800."""


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this build of torch has no gloo",
)
def test_groups_of_other_libraries_take_the_limit_and_patience_suspends_it(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), (tmp_path / "rendezvous").as_uri(), str(rank)],
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        out, err = ranks[0].communicate(timeout=HANGS_S)
    finally:
        end(*ranks)
    assert ranks[0].returncode == 0, err
    seen = json.loads(out.splitlines()[-1])
    assert set(seen) == {"came through", "before", "after"}


def test_torch_has_its_own_defaults_again() -> None:
    names = [name for name in vars(c10d) if name.startswith("default_pg_")]
    before = {name: getattr(c10d, name) for name in names}
    assert limit_groups(7.0) == ()
    assert c10d.default_pg_timeout.total_seconds() == 7.0
    release_groups()
    assert {name: getattr(c10d, name) for name in names} == before


def test_a_library_that_takes_no_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        def name(self) -> str:
            return "its-name"

    class Refusing(Library):
        def set_timeout(self, limit: object) -> None:
            raise RuntimeError("not supported")

    class Group:
        def __init__(self, library: Library) -> None:
            self._device_types = ("its-device",)
            self._get_backend = lambda device: library

    for library in (Library(), Refusing()):
        monkeypatch.setattr(c10d, "_pg_map", {Group(library): None})
        try:
            assert limit_groups(7.0) == ("its-name",)
        finally:
            release_groups()


def test_a_process_alone_is_patient_with_nobody() -> None:
    alone = Collectives("cpu")
    with alone.patient(then=1.0):
        assert alone.limit(5.0) == ()


ALONE = """
import sys
from pathlib import Path

import torch

from anygauge.interface import Collectives

def threads():
    tasks = Path("/proc/self/task").iterdir()
    return sum("gloo" in (task / "comm").read_text() for task in tasks)

alone = Collectives("cpu")
alone.open(
    rendezvous=sys.argv[1], rank=0, world_size=1, timeout_s=60.0, device=torch.device("cpu")
)
inside = threads()
import torch.distributed.nn.functional  # as torch's optimizers do it
alone.close()
print(inside > 0, threads())
"""


def test_no_thread_of_a_group_outlives_it(tmp_path: Path) -> None:
    """One that gives a tensor back while the interpreter ends aborts the process."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, (tmp_path / "meet").as_uri()],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
    )
    assert (done.stdout, done.returncode) == ("True 0\n", 0), done.stderr
