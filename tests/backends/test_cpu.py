"""The CPU backend: what it finds, asks for, and does in a process of its own."""

from __future__ import annotations

import json
import os
import re
import textwrap
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from anygauge.config.schema import PrecisionSection, resolve_precision
from anygauge.interface import Level, Scope, UnsupportedError
from anygauge_cpu.backend import CpuBackend
from anygauge_cpu.placement import hardware_dtypes
from anygauge_cpu.probe import memory_limit, probe, resident_bytes
from tests.helpers.child_processes import printed
from tests.helpers.fake_files import write_tree
from tests.helpers.plans_from_options import backend_with
from tests.helpers.sample_machines import (
    BRIDGE,
    DOWN,
    ETH0,
    ETH1,
    LO,
    VIRTUAL,
    by_name,
    job,
    machine,
)


def in_process(code: str, **environment: str) -> Any:
    """Run code in a fresh interpreter; it prints one line of JSON."""
    with mock.patch.dict(os.environ):
        os.environ.pop("ANYGAUGE_CPU_CORES", None)
        lines = printed(textwrap.dedent(code), environment={"OMP_NUM_THREADS": "1", **environment})
    return json.loads(lines[-1])


# -- finding it ------------------------------------------------------------------------------


def test_processors_are_no_hardware_that_auto_must_respect() -> None:
    found = probe()
    assert found.available
    assert not found.has_hardware
    assert found.devices.presence == "not needed"


# -- environment -----------------------------------------------------------------------------


def test_cores_are_shared_out_without_overlap() -> None:
    node = machine(cores=7, threads_per_core=2)
    ranks = [by_name(CpuBackend().environment(job(devices=3), node, rank)) for rank in range(3)]
    shares = [r["ANYGAUGE_CPU_CORES"].value for r in ranks]
    assert shares == ["0,1,2,3", "4,5,6,7", "8,9,10,11"]
    assert {r["OMP_NUM_THREADS"].value for r in ranks} == {"2"}
    assert {r["ANYGAUGE_CPU_CORES"].scope for r in ranks} == {Scope.RANK}


@pytest.mark.parametrize(
    ("options", "ranks", "cores", "threads", "why"),
    [
        ({}, 1, 8, "8", ""),
        ({}, 4, 2, "1", "4 ranks share 2 physical cores"),
        ({"bind_cores": False}, 2, 8, "4", "switched off"),
    ],
    ids=["a single rank", "more ranks than cores", "switched off"],
)
def test_who_is_not_bound(
    options: dict[str, Any], ranks: int, cores: int, threads: str, why: str
) -> None:
    node = machine(cores=cores, threads_per_core=2)
    found = by_name(backend_with("cpu", options).environment(job(devices=ranks), node, ranks - 1))
    assert "ANYGAUGE_CPU_CORES" not in found
    assert found["OMP_NUM_THREADS"].value == threads and why in found["OMP_NUM_THREADS"].reason


@pytest.mark.parametrize(
    ("nodes", "interfaces", "chosen"),
    [
        (1, (ETH0, LO), "lo"),
        (1, (ETH0,), None),
        (2, (LO, DOWN, ETH0), "eth0"),
        (2, (LO, BRIDGE, ETH1), "eth1"),
        (2, (LO, VIRTUAL), "veth0"),
        (2, (LO, BRIDGE, VIRTUAL), None),
        (2, (LO,), None),
    ],
)
def test_gloo_interface(nodes: int, interfaces: tuple[Any, ...], chosen: str | None) -> None:
    node = machine(interfaces=interfaces)
    found = by_name(CpuBackend().environment(job(nodes=nodes), node))
    assert (found["GLOO_SOCKET_IFNAME"].value if found else None) == chosen


# -- options, capabilities and engines -------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lower_types_work_and_auto_leaves_them_alone(dtype: str) -> None:
    assert CpuBackend().support(dtype).level is Level.PARTIAL
    assert resolve_precision(PrecisionSection(), CpuBackend().support).param_dtype == "float32"


@pytest.mark.parametrize(
    ("cpuinfo", "bfloat16"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx2\nmodel name\t: bf16 dreams\n", False),
    ],
)
def test_dtypes_follow_the_processor(tmp_path: Path, cpuinfo: str, bfloat16: bool) -> None:
    found = hardware_dtypes(write_tree(tmp_path, {"proc/cpuinfo": cpuinfo}))
    assert found == ({"float32", "bfloat16"} if bfloat16 else {"float32"})


def test_diagnostics_of_this_machine() -> None:
    found = {check.name: check for check in CpuBackend().diagnostics()}
    assert found["torch"].outcome == "pass"
    assert "GiB in use of" in found["memory"].seen


# -- memory files ----------------------------------------------------------------------------


MACHINE = {"proc/meminfo": "MemTotal:  8000 kB\n"}
GROUPS = {
    "proc/self/cgroup": "0::/a/b\n",
    "sys/fs/cgroup/a/memory.max": "4096000\n",
    "sys/fs/cgroup/a/b/memory.max": "max\n",
}
VERSION_1 = {
    "proc/self/cgroup": "4:cpu,memory:/docker/abc\n2:pids:/x\n",
    # In a container the listed path is the host's: the limit lies at the mount.
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "1024000\n",
}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        (MACHINE | GROUPS, 4096000),
        (MACHINE | VERSION_1, 1024000),
        (MACHINE, 8000 * 1024),
        ({}, None),
    ],
    ids=["groups", "groups of version 1", "a machine", "nothing"],
)
def test_memory_limit_is_the_least_of_machine_and_groups(
    files: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    assert memory_limit(write_tree(tmp_path, files)) == limit


def test_memory_that_cannot_be_read_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="VmRSS"):
        resident_bytes(tmp_path)


def test_a_refused_reset_is_told_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anygauge_cpu.placement.CLEAR_REFS", tmp_path / "no/clear_refs")
    placement = CpuBackend().placement
    placement.reset_peak()
    assert re.search("peak since its start .*clear_refs: No such file", placement.memory().kind)


# -- a real process --------------------------------------------------------------------------


BIND = """
    import json, os, threading, torch
    from pathlib import Path
    from anygauge_cpu.backend import CpuBackend
    stop = threading.Event()
    threading.Thread(target=stop.wait, daemon=True).start()
    masks = lambda: sorted({
        tuple(sorted(os.sched_getaffinity(int(t.name)))) for t in Path("/proc/self/task").iterdir()
    })
    backend = CpuBackend()
    before = torch.get_num_threads()
    backend.open(0)
    bound, threads = masks(), torch.get_num_threads()
    backend.close()
    print(json.dumps([bound, threads, masks(), torch.get_num_threads() == before]))
"""


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="binding shows only with two cores or more"
)
@pytest.mark.parametrize(("omp", "threads"), [("", 1), ("2", 2)])
def test_all_threads_are_bound_and_set_free(omp: str, threads: int) -> None:
    """The number of threads is the number of cores, unless the user set another one."""
    allowed = sorted(os.sched_getaffinity(0))
    core = allowed[-1]
    seen = in_process(BIND, ANYGAUGE_CPU_CORES=str(core), OMP_NUM_THREADS=omp)
    assert seen == [[[core]], threads, [allowed], True]


def test_cores_that_do_not_exist_are_refused_in_words() -> None:
    seen = in_process(
        """
        import json
        from anygauge.interface import NotAvailableError
        from anygauge_cpu.backend import CpuBackend
        try:
            CpuBackend().open(0)
        except NotAvailableError as error:
            print(json.dumps(str(error)))
        """,
        ANYGAUGE_CPU_CORES="9999",
    )
    assert "ANYGAUGE_CPU_CORES=9999" in seen
    assert "bind_cores" in seen


def test_exhausted_memory_is_recognized() -> None:
    placement = CpuBackend().placement
    assert placement.is_out_of_memory(MemoryError())
    assert placement.is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not placement.is_out_of_memory(RuntimeError("shapes do not match"))
