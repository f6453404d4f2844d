"""The optimizer of `zero` on a disk: where it lies, and that a run trains and resumes with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anygauge.interface import Backend, Engine, NotAvailableError, Precision, RunFileError, Share
from anygauge.kernels.loss import model_loss
from anygauge.strategies.zero.deepspeed_config import as_config, zero_settings
from anygauge.strategies.zero.deepspeed_runtime import folder_on_disk
from anygauge.strategies.zero.spec import ZeroOptions
from anygauge_cpu.backend import CpuBackend
from tests.helpers.build import a_workload, rank_of_world
from tests.helpers.run_ranks import on_ranks
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


def resumed(backend: Backend, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Two steps, two more, and these again in a new engine, with what the first two came to."""
    CONFIG.update(WIDE)
    options = {"stage": 3, "offload": "optimizer", **options}
    case = ParityCase(strategy="zero", options=options, lora=False)
    rank, _ = rank_of_world()

    def steps(engine: Engine, share: Share, first: int) -> list[float]:
        found = []
        for step in (first, first + 1):
            batches = list(micro_batches(case, step, share, backend.placement.device))
            found += map(float, engine.run_step(batches, model_loss, num_loss_tokens(case, step)))
            found.append(float(engine.update(1e-2, 1.0).grad_norm))
        return found

    engine, _, share = built(case, backend, rank, 2)
    found: dict[str, Any] = {"first": steps(engine, share, 0)}
    dist.barrier()
    found["files"] = sorted(file.stat().st_size for file in Path(folder).rglob("*.swp"))
    whole = [{(name, key): tensor for name, key, tensor in engine.export_state()}]
    dist.broadcast_object_list(whole, src=0)
    state = MadeUp(whole[0], engine.counters())
    found["on"] = steps(engine, share, 2)
    engine.close()
    engine, _, _ = built(case, backend, rank, 2)
    engine.import_state(state)
    again = {(name, key): tensor for name, key, tensor in engine.export_state()}
    found["same"] = rank > 0 or all(torch.equal(again[key], whole[0][key]) for key in whole[0])
    found["resumed"] = steps(engine, share, 2)
    engine.close()
    dist.barrier()
    return {**found, "updates": state.counters.updates, "left": len(list(Path(folder).iterdir()))}


@pytest.mark.slow
def test_it_trains_and_resumes_as_in_the_hosts_memory(tmp_path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        pytest.skip("DeepSpeed's async_io cannot be built without libaio-dev")
    folder = str(tmp_path)
    host, on_disk = (
        on_ranks(resumed, folder, options, world=2, timeout_s=900)[0]
        for options in ({}, {"nvme": folder})
    )
    assert host.pop("files") == []
    sizes = on_disk.pop("files")
    assert len(sizes) == 2 * 3 and min(sizes) > 2**20, "masters and two moments of each rank"
    assert on_disk == host, "to the last digit"
    assert host["same"] and host["left"] == 0 and host["updates"] == 2
