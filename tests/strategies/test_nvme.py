"""The optimizer of `zero` on a disk: where it lies, and that a run trains and resumes with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from anygauge.interface import Backend, Engine, NotAvailableError, Precision, RunFileError, Share
from anygauge.kernels.loss import model_loss
from anygauge.strategies.zero.deepspeed_config import as_config, zero_settings
from anygauge.strategies.zero.deepspeed_runtime import folder_on_disk
from anygauge.strategies.zero.spec import ZeroOptions
from anygauge_cpu.backend import CpuBackend
from tests.helpers.build import a_workload, rank_of_world
from tests.helpers.ranks import on_ranks
from tests.strategies.parity_rank import CONFIG, ParityCase, built, micro_batches, num_loss_tokens
from tests.strategies.test_state import MadeUp


def test_each_rank_has_a_folder_of_its_own_and_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.ops import op_builder

    def load(self: Any, verbose: bool) -> None:
        if broken:
            raise RuntimeError("Unable to JIT load the async_io op\nand more")

    monkeypatch.setattr(op_builder, "AsyncIOBuilder", type("Builder", (), {"load": load}))
    broken = False
    folders = [folder_on_disk(str(tmp_path), 1000) for _ in range(2)]
    assert len({each.name for each in folders}) == 2 == len(list(tmp_path.iterdir()))
    for each in folders:
        each.cleanup()
    with pytest.raises(RunFileError, match=r"strategy\.nvme: .*No such file.*a local disk"):
        folder_on_disk(str(tmp_path / "nothing"), 1000)
    broken = True
    with pytest.raises(NotAvailableError, match=r"Unable to JIT load the async_io op\. It needs l"):
        folder_on_disk(str(tmp_path), 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    with pytest.raises(RunFileError, match=r"1\.00 GiB free, but each rank writes 1\.50 GiB"):
        folder_on_disk(str(tmp_path), 3 * 2**29)
    assert not list(tmp_path.iterdir())


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
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        pytest.skip("DeepSpeed's async_io cannot be built without libaio-dev")
    found, _ = on_ranks(in_memory_and_on_a_disk, str(tmp_path), world=2, timeout_s=900)
    host, on_disk = found["host"], found["disk"]
    assert host.pop("files") == []
    sizes = on_disk.pop("files")
    assert len(sizes) == 2 * 3 and min(sizes) > 2**20, "masters and two moments of each rank"
    assert on_disk == host, "to the last digit"
    assert host["same"] and host["left"] == [] and host["updates"] == 2
