"""The optimizer of `zero` on a disk: what is refused before ranks start, and that it trains."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from anygauge.interface import (
    AnygaugeError,
    Backend,
    Engine,
    NotAvailableError,
    Precision,
    RunFileError,
    Share,
    StrategyRun,
    UnsupportedError,
)
from anygauge.kernels.loss import model_loss
from anygauge.strategies.zero import deepspeed_versions, nvme
from anygauge.strategies.zero.deepspeed_config import as_config, zero_settings
from anygauge.strategies.zero.nvme import (
    folder_of_rank,
    installed_operators,
    load_operator,
    operator_lacks,
)
from anygauge.strategies.zero.options import ZeroOptions
from anygauge.strategies.zero.spec import ZERO
from anygauge_cpu.backend import CpuBackend
from tests.helpers.build import a_workload, rank_of_world
from tests.helpers.ranks import on_ranks
from tests.strategies.parity_rank import CONFIG, ParityCase, built, micro_batches, num_loss_tokens
from tests.strategies.test_state import MadeUp


@pytest.fixture(autouse=True)
def a_version_that_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_versions.metadata, "version", lambda name: "0.19.8")


@pytest.fixture
def operator_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "operator_lacks", lambda environment: "")


def check(
    folder: Path | str, *, optimizer: str = "adamw", here: bool = True, **fields: Any
) -> None:
    options = ZeroOptions(nvme=str(folder), **{"offload": "optimizer", **fields})
    ZERO.check(StrategyRun(options=options, world_size=2, optimizer=optimizer, ranks_run_here=here))


@pytest.mark.parametrize(
    ("fields", "kind", "told"),
    [
        ({"offload": "none"}, RunFileError, r"offload is none\. Set strategy\.offload: optimizer"),
        ({"offload": "both"}, UnsupportedError, r"the weights on the disk too.*without a mes"),
        (
            {"offload": "parameters"},
            UnsupportedError,
            r"the weights on the disk.*offload: optimizer",
        ),
        ({"stage": 2}, UnsupportedError, r"stage 2 leaves .* host's memory\. Set strategy\.stage"),
        ({"optimizer": "adamw_8bit"}, UnsupportedError, r"only 32-bit state.*adamw, lion or sgd"),
    ],
)
@pytest.mark.usefixtures("operator_here")
def test_options_that_do_not_go_together(
    fields: dict[str, Any], kind: type[AnygaugeError], told: str, tmp_path: Path
) -> None:
    check(tmp_path)
    with pytest.raises(kind, match=told):
        check(tmp_path, **fields)


@pytest.mark.usefixtures("operator_here")
def test_a_version_that_was_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_versions.metadata, "version", lambda name: "0.16.9")
    with pytest.raises(
        UnsupportedError, match=r"tested with DeepSpeed 0\.19\.8, not with 0\.16\.9"
    ):
        check(tmp_path)
    check(tmp_path, here=False)


@pytest.mark.usefixtures("operator_here")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", r"'disk' is relative; give an absolute path"),
        ("nothing", "nothing does not exist on this machine; create it"),
        ("file", "file is not a folder"),
        ("closed", "cannot be written to; change its permissions"),
    ],
)
def test_the_folder_is_looked_at_where_ranks_run(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(RunFileError, match=said):
        check(tmp_path / name if name else "disk")
    check(tmp_path / (name or "nothing"), here=False)


def test_a_missing_operator_is_told_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme, "operator_lacks", lambda environment: "ninja is")
    with pytest.raises(
        NotAvailableError, match=r"not built here.*ninja is missing to build it\. Install liba"
    ):
        check(tmp_path)
    check(tmp_path, here=False)


def test_what_building_the_operator_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "installed_operators", dict)
    tools = {"c++", "cc", "ninja"}
    monkeypatch.setattr(shutil, "which", lambda name: name if name in tools else None)

    def lacks(compiles: bool, environment: Mapping[str, str] | None = None) -> str:
        def run(command: list[str], **_: Any) -> Any:
            commands.append(command)
            return SimpleNamespace(returncode=int(not compiles))

        commands: list[list[str]] = []
        monkeypatch.setattr(nvme.subprocess, "run", run)
        found = operator_lacks(environment or {})
        used.extend(commands)
        return found

    used: list[list[str]] = []
    assert lacks(True) == ""
    assert lacks(False) == "libaio with its headers is"
    assert "-laio" in used[0]
    lacks(True, {"CFLAGS": "-I/opt/include", "LDFLAGS": "-L/opt/lib"})
    assert {"-I/opt/include", "-L/opt/lib"} <= set(used[-1]), "where DeepSpeed looks, too"
    tools.remove("ninja")
    assert lacks(False) == "libaio with its headers and ninja are"
    assert lacks(True, {"CXX": "nobody"}) == "a C++ compiler and ninja are"
    monkeypatch.setattr(nvme, "installed_operators", lambda: {"async_io": True})
    assert lacks(False) == "", "it was built ahead"


def test_operators_are_read_from_deepspeeds_own_record() -> None:
    from deepspeed.git_version_info import installed_ops

    assert installed_operators() == installed_ops


def test_an_operator_that_does_not_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.ops import op_builder

    def load(self: Any, verbose: bool) -> None:
        raise RuntimeError("Unable to JIT load the async_io op\nand more")

    monkeypatch.setattr(op_builder, "AsyncIOBuilder", type("Builder", (), {"load": load}))
    with pytest.raises(NotAvailableError, match=r"Unable to JIT load the async_io op\. Leave"):
        load_operator()


def test_each_rank_has_a_folder_of_its_own_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (folder_of_rank(str(tmp_path), 1000) for _ in range(2))
    assert len({first.name, second.name}) == 2 == len(list(tmp_path.iterdir()))
    first.cleanup()
    second.cleanup()
    assert not list(tmp_path.iterdir())
    free = SimpleNamespace(free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(RunFileError, match=r"1\.00 GiB free, but each rank writes 1\.50 GiB"):
        folder_of_rank(str(tmp_path), 3 * 2**29)


def test_deepspeed_is_told_where() -> None:
    options = ZeroOptions(offload="optimizer", nvme="/fast")
    workload = a_workload(CpuBackend(), Precision(param_dtype="float32", reduce_dtype="float32"))
    config = as_config(zero_settings(options, workload, None))
    wanted = {"device": "nvme", "pin_memory": False, "nvme_path": "/fast"}
    assert config["zero_optimization"]["offload_optimizer"] == wanted
    assert config["zero_force_ds_cpu_optimizer"] is False


WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Each rank has megabytes of masters: of less than one, DeepSpeed leaves all in memory."""


def steps(
    case: ParityCase, engine: Engine, share: Share, first: int, backend: Backend
) -> list[float]:
    """Losses of this rank and norms of two steps."""
    found = []
    for step in (first, first + 1):
        batches = list(micro_batches(case, step, share, backend.placement.device))
        result = engine.run_step(batches, model_loss, num_loss_tokens(case, step))
        norm = engine.update(1e-2, 1.0).grad_norm
        found += [*map(float, result), float(norm)]
    return found


def resumed(case: ParityCase, folder: Path, backend: Backend) -> dict[str, Any]:
    """Train, export, import into a new engine, and train on."""
    rank, _ = rank_of_world()
    engine, _, share = built(case, backend, rank, 2)
    found: dict[str, Any] = {"first": steps(case, engine, share, 0, backend)}
    dist.barrier()
    found["files"] = sorted(file.stat().st_size for file in folder.rglob("*.swp"))
    exported = {(name, key): tensor for name, key, tensor in engine.export_state()}
    whole = [exported]
    dist.broadcast_object_list(whole, src=0)
    counters = engine.counters()
    found["on"] = steps(case, engine, share, 2, backend)
    trained = engine.export_trained()
    engine.close()
    engine, _, _ = built(case, backend, rank, 2)
    engine.import_state(MadeUp(whole[0], counters))
    again = {(name, key): tensor for name, key, tensor in engine.export_state()}
    found["resumed"] = steps(case, engine, share, 2, backend)
    engine.close()
    dist.barrier()
    found["left"] = [str(file) for file in folder.iterdir()]
    found["updates"] = counters.updates
    if rank == 0:
        assert again.keys() == exported.keys()
        found["same"] = all(bool((again[key] == exported[key]).all()) for key in exported)
        found["state"] = {" ".join(key): float(t.double().norm()) for key, t in exported.items()}
        found["trained"] = {name: float(t.double().norm()) for name, t in trained.items()}
    return found


def in_memory_and_on_a_disk(backend: Backend, folder: str) -> dict[str, Any]:
    """What ZeRO-3 comes to with its optimizer in the host's memory, and in a folder."""
    CONFIG.update(WIDE)
    found = {}
    for name, where in {"host": {}, "disk": {"nvme": folder}}.items():
        options = {"stage": 3, "offload": "optimizer", **where}
        case = ParityCase(strategy="zero", options=options, lora=False)
        found[name] = resumed(case, Path(folder), backend)
    return found


@pytest.mark.slow
def test_it_trains_and_resumes_as_in_the_hosts_memory(tmp_path: Path) -> None:
    missing = operator_lacks(os.environ)
    if missing:
        pytest.skip(f"to build DeepSpeed's async_io, {missing} missing")
    found, _ = on_ranks(in_memory_and_on_a_disk, str(tmp_path), world=2, timeout_s=900)
    host, on_disk = found["host"], found["disk"]
    assert host.pop("files") == []
    sizes = on_disk.pop("files")
    assert len(sizes) == 2 * 3 and min(sizes) > 2**20, "masters and two moments of each rank"
    assert on_disk == host, "to the last digit"
    assert host["same"] and host["left"] == [] and host["updates"] == 2
