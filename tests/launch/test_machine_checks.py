"""What `doctor` sees on any machine: each limit and file, sound and not."""

from __future__ import annotations

import importlib.metadata
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from anygauge.interface import Check, LaunchProfile, Node, Outcome, RdmaDevice
from anygauge.launch import machine_checks
from tests.helpers.fake_files import write_tree
from tests.helpers.sample_machines import BRIDGE, ETH0, LO, VIRTUAL, machine

RDMA = RdmaDevice(name="mlx5_0", driver="mlx5_core", link_layer="InfiniBand")
CARDS = LaunchProfile(visibility_variable="VISIBLE")


EXTRAS = [
    *("pluggy>=1", "pluggy>=99; extra == 'mine'"),
    *("no-such-package; extra == 'mine'", "pytest>=99; extra == 'other'"),
]
NARROWED = ", tested with >=99 for the mine backend (docs/stacks.md)"


@pytest.mark.parametrize(
    ("wanted", "backend", "outcome", "said"),
    [
        (["pluggy>=1"], "", Outcome.PASS, "pluggy 1."),
        (["pluggy>=99"], "", Outcome.FAIL, "tested with >=99"),
        (["no-such-package>=1"], "", Outcome.FAIL, "no-such-package is missing"),
        (["no-such-package; extra == 'dev'"], "", Outcome.PASS, ""),
        (EXTRAS, "theirs", Outcome.PASS, ""),
        (EXTRAS, "mine", Outcome.FAIL, NARROWED),
    ],
)
def test_packages_are_held_against_what_was_tested(
    wanted: list[str], backend: str, outcome: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    check = machine_checks.packages(backend=backend)
    assert check.outcome == outcome and said in check.seen
    assert "pytest" not in check.seen
    if said == NARROWED:
        assert "no-such-package" not in check.seen, "what only the extra has may be missing"
        assert "pip install --upgrade 'anygauge[mine]'" in check.remedy


@pytest.mark.parametrize(
    ("column", "changed", "said"),
    [
        (2, {}, ""),
        (3, {}, ""),
        (2, {"transformers": "4.55.4"}, "transformers 4.55.4, tested with"),
        (3, {"transformers": "5.23.0"}, ""),
        (3, {"accelerate": "1.9.0"}, "accelerate 1.9.0, tested with"),
    ],
)
def test_each_set_of_the_page_on_versions_passes_and_a_mixture_does_not(
    column: int, changed: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "stacks.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    sets = {row[1].strip(): row[column].strip() for row in rows if len(row) == 5}
    tested = {name: sets[name] for name in ("transformers", "accelerate")}
    versions = {**tested, **changed}
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda n: versions.get(n) or real(n))
    check = machine_checks.packages(backend="hpu")
    assert check.outcome == (Outcome.FAIL if said else Outcome.PASS), check.seen
    assert said in check.seen


def test_the_installed_packages_are_those_that_were_tested() -> None:
    check = machine_checks.packages()
    assert check.outcome == Outcome.PASS, check.seen
    unread = machine_checks.packages("no-such-distribution")
    assert unread.outcome == Outcome.SKIP and unread.remedy


def test_hidden_devices() -> None:
    assert machine_checks.visibility(LaunchProfile(), {"VISIBLE": " "}).outcome == Outcome.PASS
    assert machine_checks.visibility(CARDS, {}).outcome == Outcome.PASS
    assert machine_checks.visibility(CARDS, {"VISIBLE": "0,1"}).outcome == Outcome.PASS
    assert machine_checks.visibility(CARDS, {"VISIBLE": " "}).outcome == Outcome.FAIL


UNLIMITED = resource.RLIM_INFINITY
LOCKED, OPEN = machine_checks.locked_memory, lambda node: machine_checks.open_files()


@pytest.mark.parametrize(
    ("check", "limit", "devices", "outcome"),
    [
        (LOCKED, 8 * 2**20, (), Outcome.PASS),
        (LOCKED, 8 * 2**20, (RDMA,), Outcome.WARN),
        (LOCKED, UNLIMITED, (RDMA,), Outcome.PASS),
        (OPEN, 1024, (), Outcome.WARN),
        (OPEN, 4096, (), Outcome.PASS),
        (OPEN, UNLIMITED, (), Outcome.PASS),
    ],
)
def test_limits_of_processes(
    check: Callable[[Node], Check],
    limit: int,
    devices: tuple[RdmaDevice, ...],
    outcome: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, 1_048_576))
    found = check(machine(rdma_devices=devices))
    assert found.outcome == outcome and bool(found.remedy) is (outcome == Outcome.WARN)
    assert check is LOCKED or outcome == Outcome.PASS or "1048576" in found.remedy


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_checks.shared_memory(tmp_path).outcome == Outcome.WARN
    (tmp_path / "dev/shm").mkdir(parents=True)
    small = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    check = machine_checks.shared_memory(tmp_path)
    assert (check.outcome, "64 MiB" in check.seen) == (Outcome.WARN, True)


@pytest.mark.parametrize(
    ("nodes", "value", "outcome"),
    [(1, "1", Outcome.PASS), (2, "0", Outcome.PASS), (2, "1", Outcome.WARN), (2, "", Outcome.PASS)],
)
def test_numa_balancing(tmp_path: Path, nodes: int, value: str, outcome: str) -> None:
    files = {f"sys/devices/system/node/node{n}/cpulist": "0" for n in range(nodes)}
    files["proc/sys/kernel/numa_balancing"] = value
    assert machine_checks.numa_balancing(write_tree(tmp_path, files)).outcome == outcome


def test_networks() -> None:
    assert "eth0" in machine_checks.interfaces(machine(interfaces=(LO, ETH0, BRIDGE))).seen
    unsure = machine_checks.interfaces(machine(interfaces=(LO, BRIDGE, VIRTUAL)))
    assert unsure.outcome == Outcome.WARN and "anygauge env" in unsure.remedy
    assert machine_checks.interfaces(machine(interfaces=(LO,))).outcome == Outcome.PASS
    assert "InfiniBand" in machine_checks.rdma_devices(machine(rdma_devices=(RDMA,))).seen


def test_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    check = machine_checks.write_speed(tmp_path, size=2 * 2**20)
    assert "MiB/s" in check.seen and not list(tmp_path.iterdir())
    missing = machine_checks.write_speed(tmp_path / "nowhere")
    assert missing.outcome == Outcome.FAIL and "--output" in missing.remedy


def test_a_hub_that_does_not_answer_is_a_failed_line() -> None:
    check = machine_checks.hub_access("http://127.0.0.1:9", timeout_s=2)
    assert check.outcome == Outcome.FAIL and "127.0.0.1:9" in check.seen


def test_the_gravest_outcome_counts() -> None:
    def worst(*outcomes: str) -> str:
        return machine_checks.worst([Check(name="one", outcome=each, seen="") for each in outcomes])

    assert worst() == Outcome.PASS
    assert worst("skip", "pass") == Outcome.SKIP
    assert worst("warn", "pass", "skip") == Outcome.WARN
    assert worst("warn", "fail", "pass") == Outcome.FAIL
