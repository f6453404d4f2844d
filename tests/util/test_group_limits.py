"""One limit for all process groups: two real processes on gloo, one of which is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed
import torch.distributed.distributed_c10d as c10d

from anygauge.interface import Collectives
from anygauge.util.limits import limit_groups, release_groups
from tests.helpers.child_processes import printed
from tests.util.meet_processes import HANGS_S, run_roles


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this build of torch has no gloo",
)
def test_groups_of_other_libraries_take_the_limit_and_patience_suspends_it(tmp_path: Path) -> None:
    at = (tmp_path / "rendezvous").as_uri()
    (failed,) = run_roles("0", "1", at=at, folder=tmp_path, awaited=1)
    assert set(failed) == {"before", "after"}, failed


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
    with alone.patient_timeout(then=1.0):
        assert alone.set_timeout(5.0) == ()


ALONE = """
import sys
from pathlib import Path
from tests.util.meet_processes import opened

def threads():
    tasks = Path("/proc/self/task").iterdir()
    return sum("gloo" in (task / "comm").read_text() for task in tasks)

alone = opened(sys.argv[1], 0, world=1)
inside = threads()
import torch.distributed.nn.functional  # as torch's optimizers do it
alone.close()
print(inside > 0, threads())
"""


def test_no_thread_of_a_group_outlives_it(tmp_path: Path) -> None:
    """One that gives a tensor back while the interpreter ends aborts the process."""
    told = printed(ALONE, (tmp_path / "meet").as_uri(), timeout_s=HANGS_S)
    assert told == ["True 0"]
