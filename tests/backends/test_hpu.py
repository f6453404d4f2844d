"""Gaudi on paper: what the backend finds in fake trees, sets, refuses and names."""

from __future__ import annotations

import ast
import os
import re
import sys
import tomllib
import types
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from packaging.requirements import Requirement

from anygauge.interface import (
    Outcome,
    Phase,
    RdmaDevice,
    RunFileError,
    Setting,
    UnsupportedError,
    installed_version,
)
from anygauge.launch.rank_environment import inspect_node
from anygauge.registry import Registry
from anygauge.training.build_strategy import check_backend
from anygauge_hpu.backend import LAZY_ONLY, HpuBackend
from anygauge_hpu.diagnostics import RELEASES, checks, release_of
from anygauge_hpu.environment import RULES, Mode, choose_mode
from anygauge_hpu.probe import PLUGIN, is_fork, probe
from tests.helpers.fake_files import write_tree
from tests.helpers.plans_from_options import backend_with
from tests.helpers.sample_machines import BRIDGE, ETH0, ETH1, LO, by_name, job, machine

LAZY = {"mode": "lazy"}
GAUDI = {
    "sys/bus/pci/devices/0000:33:00.0/vendor": "0x1da3\n",
    "sys/class/accel/accel0/device/vendor": "0x1da3\n",
    "dev/accel/accel0": "",
}
OTHER = {
    "sys/bus/pci/devices/0000:34:00.0/vendor": "0x8086\n",
    "sys/class/accel/accel1/device/vendor": "0x8086\n",
    "dev/accel/accel1": "",
}
DRIVER = {"sys/module/habanalabs/version": "1.20.0-bd4de22\n"}
SOURCES = Path(__file__).parents[2] / "backends/anygauge_hpu"


# -- finding it ------------------------------------------------------------------------------


BUS = {name: text for name, text in GAUDI.items() if name.startswith("sys/bus")}


@pytest.mark.parametrize(
    ("files", "count", "said"),
    [
        (GAUDI | DRIVER, 1, "1.20.0-bd4de22 .*1.20.0.543"),
        (OTHER | DRIVER, None, "0x1da3"),
        (OTHER | GAUDI, 1, ""),
        (BUS, 1, "--runtime=habana"),
    ],
    ids=["complete", "another vendor's card", "both", "cards without device files"],
)
def test_what_a_machine_shows(
    files: dict[str, str], count: int | None, said: str, tmp_path: Path
) -> None:
    found = probe(write_tree(tmp_path, files), software="1.20.0.543")
    assert (found.has_hardware, found.device_count) == (count is not None, count)
    assert found.available is (count == 1 and "sys/module/habanalabs/version" in files)
    shown = (found.driver.detail, found.software.detail, found.reason, *found.notes)
    assert re.search(said, " ".join(shown)), shown


def test_without_anything_each_step_says_what_was_looked_for(tmp_path: Path) -> None:
    found = probe(tmp_path)
    assert not found.available
    for finding, place in (
        (found.devices, "0x1da3"),
        (found.driver, "/sys/module/habanalabs/version"),
        (found.software, PLUGIN),
    ):
        assert any(place in looked for looked in finding.looked_at)
    assert "container image" in found.software.detail


# -- modes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "mode"),
    [
        *(("1.19.0.561", Mode.LAZY), ("1.20.0", Mode.LAZY)),
        *(("1.21.0.555", Mode.COMPILE), ("1.24.1", Mode.COMPILE), (None, Mode.COMPILE)),
    ],
)
def test_the_mode_follows_the_run_file_or_the_release(version: str | None, mode: Mode) -> None:
    libraries = {PLUGIN: version} if version else {}
    found, why = choose_mode(None, libraries)
    assert found is mode and (version or "not installed") in why
    assert choose_mode("eager", libraries)[0] is Mode.EAGER


@pytest.mark.parametrize(("mode", "value"), [("lazy", "1"), ("compile", "0"), ("eager", "0")])
def test_what_follows_the_mode(mode: str, value: str) -> None:
    backend = backend_with("hpu", {"mode": mode})
    settings = by_name(backend.environment(job(backend_options={"mode": mode}), machine(), None))
    assert settings["PT_HPU_LAZY_MODE"].value == value
    graph, lazy = backend.graph, mode == "lazy"
    assert (graph.accumulates, graph.limit) == (lazy, None)
    assert ("reentrant form alone" in graph.reentrant_only) is lazy
    compiler = (graph.compiler.backend, graph.compiler.regions) if graph.compiler else None
    assert compiler == (("hpu_backend", "layer") if mode == "compile" else None)
    # Intel's DeepSpeed waits up to release 1.15.1; anygauge takes releases from 1.20 on.
    assert not graph.sync_on_release
    assert backend_with("hpu", {"mode": mode, "sync_on_release": True}).graph.sync_on_release
    for phase in Phase if not lazy else ():
        graph.mark_step(phase)  # the software is not installed here: a call would raise


@pytest.mark.parametrize("name", LAZY_ONLY)
@pytest.mark.parametrize("mode", ["compile", "eager"])
def test_what_cuts_a_graph_is_refused_where_there_is_none(mode: str, name: str) -> None:
    options = {"mode": mode, name: 10 if name == "graph_limit" else True}
    said = f"{name}: it acts on accumulated graphs, and {mode} mode accumulates none"
    with pytest.raises(RunFileError, match=said):
        backend_with("hpu", options)


# -- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "fast"}, r"mode: 'fast': input should be 'lazy', 'compile' or 'eager'"),
        ({"graph_limits": 3}, r"has no such option; did you mean 'graph_limit'. it has: mode"),
        (LAZY | {"graph_limit": 0}, r"graph_limit: 0: input should be greater than or equal to 1"),
        (LAZY | {"graph_limit": True}, r"graph_limit: True: input should be a valid integer"),
        (LAZY | {"graph_limit_sync": True}, r"there is no limit to act on"),
        ({"recipe_cache": "cache"}, r"recipe_cache: 'cache': an absolute path"),
        ({"recipe_cache": "/a,b"}, r"without commas"),
        ({"recipe_cache_mb": 5}, r"there is no cache"),
        ({"softmax": "bfloat16"}, r"fused attention has a softmax of its own"),
        ({"optimum_habana": True, "attention": "fused"}, r"bring their own attention"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RunFileError, match=said):
        backend_with("hpu", options)


@pytest.mark.parametrize(
    ("options", "attention", "softmax", "norm"),
    [
        ({}, "gaudi_fused", "gaudi_fp32", "gaudi_fused"),
        ({"rms_norm": "reference"}, "gaudi_softmax_bf16", "gaudi_fp32", "reference"),
        ({"softmax": "float32"}, "gaudi_softmax_fp32", "gaudi_fp32", "gaudi_fused"),
        ({"softmax": "bfloat16"}, "gaudi_softmax_bf16", "gaudi_bf16", "gaudi_fused"),
    ],
)
def test_kernels_follow_the_options(
    options: dict[str, Any], attention: str, softmax: str, norm: str
) -> None:
    update = dict.fromkeys(("adamw", "clip_grad_norm"), "gaudi_fused")
    chosen = {"attention": attention, "softmax": softmax, "rms_norm": norm, "rope": "gaudi_fused"}
    apart = {"attention": "softmax"} if options else {}
    assert backend_with("hpu", {**apart, **options}).kernels == {**chosen, **update}
    assert backend_with("hpu", {"optimum_habana": True}).kernels == update


def test_fsdp_is_refused_in_lazy_mode_alone() -> None:
    fsdp = Registry.load().find_strategy("fsdp").spec
    with pytest.raises(UnsupportedError, match=r"'fsdp2'.*backend_options\.mode: compile"):
        check_backend(fsdp, backend_with("hpu", {"mode": "lazy"}))
    for mode in ("compile", "eager"):
        check_backend(fsdp, backend_with("hpu", {"mode": mode}))
    for other in ("single", "ddp", "zero"):
        check_backend(
            Registry.load().find_strategy(other).spec, backend_with("hpu", {"mode": "lazy"})
        )


def test_adapted_models_are_refused_with_packed_rows() -> None:
    backend = backend_with("hpu", {"optimum_habana": True})
    with pytest.raises(UnsupportedError, match=r"data\.packing: false"):
        backend.adapt_models(packing=True)
    HpuBackend().adapt_models(packing=True)


# -- environment -----------------------------------------------------------------------------


def test_graph_settings_in_lazy_mode() -> None:
    options = LAZY | {
        "graph_limit": 10,
        "graph_limit_sync": True,
        "recipe_cache": "/cache",
        "recipe_cache_mb": 2048,
    }
    the_job = job(devices=8, backend_options=options)
    found = by_name(backend_with("hpu", options).environment(the_job, machine(64), 3))
    assert {name: s.value for name, s in found.items()} == {
        "PT_HPU_LAZY_MODE": "1",
        "PT_HPU_MAX_COMPOUND_OP_SIZE": "10",
        "PT_HPU_MAX_COMPOUND_OP_SYNC": "1",
        "PT_HPU_LAZY_ACC_PAR_MODE": "0",
        "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES": "0",
        "PT_HPU_RECIPE_CACHE_CONFIG": "/cache,false,2048",
        "GLOO_SOCKET_IFNAME": "lo",
        "HLS_MODULE_ID": "3",
        "OMP_NUM_THREADS": "8",
    }


@pytest.mark.parametrize(("strategy", "known"), [("ddp", False), ("zero", True), ("auto", True)])
def test_what_deepspeed_sets_is_set_where_it_may_be_used(strategy: str, known: bool) -> None:
    """The ranks of `auto` may decide for it, when variables are read already."""
    found = backend_with("hpu", LAZY).environment(replace(job(), strategy=strategy), machine(64), 0)
    assert ("PT_HPU_LAZY_ACC_PAR_MODE" in by_name(found)) is known


CONTAINER = {
    **{f"dev/accel/accel{number}": "" for number in range(4)},
    # A container sees every card of the machine here, whichever were handed to it.
    **{
        f"sys/class/accel/accel{number}/device/module_id": f"{module}\n"
        for number, module in enumerate((6, 2, 7, 3, 0, 1, 4, 5))
    },
}
"""Four of eight cards; the kernel numbers them in another order than their modules."""


TWICE = {"sys/class/accel/accel0/device/module_id": "3\n"}
SILENT = dict.fromkeys((name for name in CONTAINER if name.endswith("module_id")), "\n")


def modules(root: Path, visible: str | None, ranks: int, devices: int = 8) -> list[Setting]:
    """The settings of the module of the first ranks of a machine."""
    environ = {} if visible is None else {"HABANA_VISIBLE_MODULES": visible}
    node = inspect_node(HpuBackend(), environ, root=root)
    of_ranks = (HpuBackend().environment(job(devices=devices), node, r) for r in range(ranks))
    return [by_name(settings)["HLS_MODULE_ID"] for settings in of_ranks]


@pytest.mark.parametrize(
    ("tree", "visible", "found", "why"),
    [
        ({}, "4,5,6,7", "4567", ""),
        (CONTAINER, None, "2367", "the modules here: 2,3,6,7"),
        (CONTAINER, "7,2", "72", ""),
        (CONTAINER | TWICE, None, "0123", "nor the driver says more"),
        (CONTAINER | SILENT, None, "0123", "nor the driver says more"),
    ],
    ids=["visible", "here", "both", "one module twice", "a driver that does not say"],
)
def test_a_rank_takes_a_module_that_is_visible_and_here(
    tree: dict[str, str], visible: str | None, found: str, why: str, tmp_path: Path
) -> None:
    settings = modules(write_tree(tmp_path, tree), visible, len(found), len(found))
    assert [setting.value for setting in settings] == list(found)
    assert why in settings[0].reason


@pytest.mark.parametrize(
    ("tree", "visible", "said"),
    [
        ({}, "4,5,6,7", "allows 4 cards, but local rank 4"),
        (CONTAINER, None, r"has device files of 4 Gaudi cards \(modules 2,3,6,7"),
        (CONTAINER, "7,0", "names module 0, but .* has modules 2,3,6,7"),
    ],
)
def test_a_module_that_is_not_there_is_refused(
    tree: dict[str, str], visible: str | None, said: str, tmp_path: Path
) -> None:
    with pytest.raises(RunFileError, match=said):
        modules(write_tree(tmp_path, tree), visible, 5)


def test_the_run_files_modules_count_and_the_doctor_compares_them(tmp_path: Path) -> None:
    in_run_file = job(devices=2, environment={"HABANA_VISIBLE_MODULES": "1,0"})
    found = by_name(HpuBackend().environment(in_run_file, machine(), 0))
    assert found["HLS_MODULE_ID"].value == "1"
    root, name = write_tree(tmp_path, CONTAINER), "visible modules"
    assert outcomes(root, {"HABANA_VISIBLE_MODULES": "2,3"})[name] != Outcome.FAIL
    assert outcomes(root, {"HABANA_VISIBLE_MODULES": "2,0"})[name] == Outcome.FAIL


def test_a_loop_of_ones_own_takes_the_same_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_tree(tmp_path, CONTAINER)
    node = inspect_node(HpuBackend(), {}, root=root)
    monkeypatch.setattr("anygauge_hpu.placement.file_texts", lambda patterns: node.texts)
    for rank, module in ((1, "3"), (2, "6")):
        with mock.patch.dict(os.environ):
            for name in ("HLS_MODULE_ID", "HABANA_VISIBLE_MODULES"):
                os.environ.pop(name, None)
            HpuBackend().placement._set_variables(rank)
            assert os.environ["HLS_MODULE_ID"] == module


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("auto", {}),
        ("gaudi_nic", {"HCCL_OVER_OFI": "0"}),
        ("host_nic", {"HCCL_OVER_OFI": "1"}),
        ("host_nic_direct", {"HCCL_OVER_OFI": "1", "HCCL_GAUDI_DIRECT": "1"}),
    ],
)
def test_the_network_between_machines(way: str, expected: dict[str, str]) -> None:
    node = machine(interfaces=(LO, ETH0, ETH1, BRIDGE))
    found = by_name(HpuBackend().environment(job(nodes=2, fabric=way), node, None))
    hccl = {name: s.value for name, s in found.items() if name.startswith("HCCL_")}
    assert hccl == expected | {"HCCL_SOCKET_IFNAME": "eth0"}
    alone = by_name(HpuBackend().environment(job(fabric=way), node, None))
    assert not [name for name in alone if name.startswith("HCCL_")]


def test_efa_gets_what_intel_asks_for() -> None:
    efa = RdmaDevice(name="rdmap0", driver="efa", link_layer="Unspecified")
    found = by_name(HpuBackend().environment(job(nodes=2), machine(rdma_devices=(efa,)), None))
    assert found["RDMAV_FORK_SAFE"].value == found["FI_EFA_USE_DEVICE_RDMA"].value == "1"


@pytest.mark.parametrize(
    ("mode", "environ", "said"),
    [
        ("lazy", {"PT_HPU_LAZY_MODE": "0"}, r"this run is in lazy mode"),
        ("compile", {"PT_HPU_LAZY_MODE": "1"}, r"set backend_options\.mode: lazy"),
        ("lazy", {"HCCL_GAUDI_DIRECT": "1"}, r"makes Gaudi's library terminate the process"),
        ("lazy", {"HCCL_PEER_DIRECT": "true", "HCCL_OVER_OFI": "0"}, r"unset HCCL_PEER_DIRECT"),
    ],
)
def test_contradictions_are_refused_before_a_rank_starts(
    mode: str, environ: dict[str, str], said: str
) -> None:
    with pytest.raises(RunFileError, match=said):
        backend_with("hpu", {"mode": mode}).check_environment(environ)


def test_what_goes_together_is_not_refused() -> None:
    backend_with("hpu", LAZY).check_environment({"PT_HPU_LAZY_MODE": "1"})
    backend_with("hpu", {"mode": "eager"}).check_environment(
        {"PT_HPU_LAZY_MODE": "0", "HCCL_GAUDI_DIRECT": "1", "HCCL_OVER_OFI": "1"}
    )


# -- names that exist ------------------------------------------------------------------------

REFERENCE = os.environ.get("ANYGAUGE_GAUDI_REFERENCE")
"""Folder with the names of the published sources: gaudi_api.txt and gaudi_env.tsv."""
OWN_OR_COMMON = {"GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "FI_EFA_USE_DEVICE_RDMA"}
"""Variables that are not Gaudi's: each rule cites where they are documented."""


@pytest.mark.skipif(not REFERENCE, reason="ANYGAUGE_GAUDI_REFERENCE names no folder")
def test_every_variable_is_in_the_published_sources() -> None:
    assert REFERENCE
    lines = (Path(REFERENCE) / "gaudi_env.tsv").read_text(encoding="utf-8").splitlines()
    known = {line.split("\t")[0] for line in lines} | OWN_OR_COMMON
    assert {rule.name for rule in RULES} <= known


@pytest.mark.skipif(not REFERENCE, reason="ANYGAUGE_GAUDI_REFERENCE names no folder")
def test_every_name_of_the_library_is_in_the_published_sources() -> None:
    assert REFERENCE
    text = (Path(REFERENCE) / "gaudi_api.txt").read_text(encoding="utf-8")
    for module, name in library_names():
        assert re.search(rf"^{re.escape(module)}[\w.]*: .*\b{re.escape(name)}\b", text, re.M), (
            module,
            name,
        )


def library_names() -> list[tuple[str, str]]:
    """(module, name) of everything that the backend imports from Gaudi's software, and of what it
    calls on the device's module."""
    found = []
    for path in sorted(SOURCES.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("habana_"):
                found += [(node.module or "", alias.name) for alias in node.names]
    placement = (SOURCES / "placement.py").read_text(encoding="utf-8")
    calls = re.findall(r"(?:module|_module\(\))\.(\w+)\(", placement)
    return found + [("habana_frameworks.torch.hpu", name) for name in calls]


def test_the_walk_finds_the_names() -> None:
    names = {name for _, name in library_names()}
    assert {"mark_step", "FusedSDPA", "FusedRMSNorm", "metric_global", "memory_stats"} <= names


# -- diagnostics -----------------------------------------------------------------------------


def outcomes(root: Path, environ: dict[str, str], **versions: str) -> dict[str, str]:
    known = {name.replace("_", "-"): version for name, version in versions.items()}
    return {c.name: c.outcome for c in checks(root, environ=environ, versions=known)}


def test_a_sound_machine_passes(tmp_path: Path) -> None:
    root = write_tree(tmp_path, GAUDI | DRIVER)
    found = outcomes(
        root,
        {"GC_KERNEL_PATH": str(tmp_path)},
        habana_torch_plugin="1.20.0.543",
        torch="2.6.0+git1a2b3c",
        deepspeed="0.16.1+hpu.synapse.v1.20.0",
    )
    assert set(found.values()) == {Outcome.PASS}, found


@pytest.mark.parametrize(
    ("environ", "versions", "name", "outcome"),
    [
        ({}, {"torch": "2.7.1+git0"}, "release", Outcome.FAIL),
        ({}, {"habana_torch_plugin": "9.9.0"}, "release", Outcome.WARN),
        ({}, {"habana_torch_plugin": "1.24.0", "torch": "2.9.0"}, "release", Outcome.FAIL),
        ({}, {"habana_torch_plugin": "1.24.0", "torch": "2.10.0a0+git1"}, "release", Outcome.PASS),
        ({}, {"habana_torch_plugin": "1.24.1.482", "torch": "2.11.0a0"}, "release", Outcome.PASS),
        ({}, {"habana_torch_plugin": "1.24.1.482", "torch": "2.10.0"}, "release", Outcome.FAIL),
        # No patch that is not known yet is refused for its torch.
        ({}, {"habana_torch_plugin": "1.24.2.9", "torch": "2.12.0"}, "release", Outcome.WARN),
        ({}, {"habana_torch_plugin": "1.21.0"}, "driver release", Outcome.WARN),
        ({}, {"deepspeed": "0.19.8"}, "deepspeed", Outcome.WARN),
        ({}, {"deepspeed": "0.16.1+1a2b3c"}, "deepspeed", Outcome.WARN),
        ({}, {"deepspeed": "0.16.1+hpu.synapse.v1.21.0"}, "deepspeed", Outcome.WARN),
        ({}, {"deepspeed": "0.16.1+hpu.synapse.v1.20.0"}, "deepspeed", Outcome.PASS),
        ({}, {}, "deepspeed", Outcome.WARN),
        ({"PT_HPU_LAZY_MODE": "1"}, {"torch": "2.6.0"}, "mode", Outcome.FAIL),
        ({"PT_HPU_LAZY_MODE": "0"}, {}, "mode", Outcome.WARN),
        ({"HABANA_VISIBLE_MODULES": "0;1"}, {}, "visible modules", Outcome.FAIL),
        ({"HABANA_VISIBLE_MODULES": "1,1"}, {}, "visible modules", Outcome.FAIL),
        ({"HABANA_VISIBLE_MODULES": "0,1"}, {}, "visible modules", Outcome.WARN),
        ({"GC_KERNEL_PATH": "/nowhere.so"}, {}, "kernel library", Outcome.FAIL),
        ({}, {}, "kernel library", Outcome.WARN),
    ],
)
def test_each_fault_has_its_line(
    tmp_path: Path, environ: dict[str, str], versions: dict[str, str], name: str, outcome: str
) -> None:
    root = write_tree(tmp_path, GAUDI | DRIVER)
    sound = {"habana_torch_plugin": "1.20.0.543", "torch": "2.6.0+git1a2b3c"}
    assert outcomes(root, environ, **sound | versions)[name] == outcome


def test_what_cannot_be_looked_at_is_not_passed(tmp_path: Path) -> None:
    found = outcomes(tmp_path, {})
    for name in ("release", "driver release", "deepspeed", "kernel library"):
        assert found[name] == Outcome.SKIP
    without_driver = outcomes(tmp_path, {}, habana_torch_plugin="1.20.0.543", torch="2.6.0+git1")
    assert without_driver["driver release"] == Outcome.SKIP


def test_every_check_that_does_not_pass_says_what_to_do(tmp_path: Path) -> None:
    for check in checks(tmp_path, environ={"PT_HPU_LAZY_MODE": "1"}, versions={}):
        assert check.seen
        assert check.remedy or check.outcome == Outcome.PASS


def test_what_is_installed_is_one_of_the_two_sets_of_extras() -> None:
    """All other tests here run with it: transformers 5, or those that go with optimum-habana."""
    project = tomllib.loads((SOURCES.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    fits = [
        all(one.specifier.contains(installed_version(one.name) or "0") for one in wanted)
        for wanted in (map(Requirement, extras[extra]) for extra in ("hpu", "hpu-lazy"))
    ]
    assert sorted(fits) == [False, True], fits


def test_releases_are_found_by_version() -> None:
    release = release_of("1.23.0.695")
    assert release is not None and release.versions["torch"] == "2.9.0"
    found = {version: release_of(version) for version in ("1.24.0.1007", "1.24.1", "1.24.10.3")}
    # Three numbers before two; of those that only share two, the newest.
    assert [r and r.name for r in found.values()] == ["1.24.0", "1.24.1", "1.24.1"]
    assert release_of("2.0") is None and release_of(None) is None
    assert all(release.source for release in RELEASES)
    assert is_fork("2.6.0+hpu_1.20.0-543.git4952fce") and is_fork("2.10.0a0+gitc1e5ed4")
    assert is_fork("2.6.0+git1a2b") and not is_fork("2.6.0") and not is_fork("2.6.0+cpu")


class _Metric:
    def __init__(self, **stats: Any) -> None:
        self._stats = stats

    def stats(self) -> list[tuple[str, Any]]:
        return list(self._stats.items())


def test_counters_are_the_librarys_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {
        "graph_compilation": _Metric(TotalNumber=7, TotalTime=2_500_000, AvgTime=357_142),
        "cpu_fallback": _Metric(TotalNumber=2, FallbackOps={"aten::nonzero": 2}),
    }
    for name in ("", ".torch", ".torch.hpu", ".torch.hpu.metrics"):
        monkeypatch.setitem(
            sys.modules, f"habana_frameworks{name}", types.ModuleType(f"habana_frameworks{name}")
        )
    sys.modules["habana_frameworks.torch.hpu.metrics"].metric_global = metrics.get  # type: ignore[attr-defined]
    graph = backend_with("hpu", LAZY).graph
    assert graph.counters() == {"compiled": 7, "compile_s": 2.5, "fallbacks": 2}
    # Only there where the user has asked the library to count.
    metrics["recipe_cache"] = _Metric(TotalHit=40, TotalMiss=7)
    assert graph.counters()["reused"] == 40
    metrics.clear()
    assert graph.counters() == {}
