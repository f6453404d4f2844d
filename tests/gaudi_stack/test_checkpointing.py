"""Recomputation with a DeepSpeed of the Gaudi stack: why it is reentrant there.

Run as a script with a file and a form, it is one rank of ZeRO-3 + LoRA, gathered by module.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from torch.utils.checkpoint import CheckpointError

from anygauge.config.schema import AdapterSection
from anygauge.kernels.loss import model_loss
from anygauge.registry import Registry
from anygauge.strategies.zero import deepspeed_versions
from anygauge.strategies.zero.engine import Zero
from anygauge.strategies.zero.spec import ZeroOptions
from tests.helpers.build import batch_of, build_context, model_factory, open_rank
from tests.helpers.run_ranks import run_ranks
from tests.helpers.runs import TINY

pytestmark = pytest.mark.skipif(
    Version(metadata.version("deepspeed")) >= Version("0.19.6"),
    reason="this DeepSpeed keeps the weights of non-reentrant regions",
)


@pytest.mark.parametrize("form", ["reentrant", "not"])
def test_only_reentrant_recomputation_trains(tmp_path: Path, form: str) -> None:
    output = tmp_path / "found.json"
    run_ranks(__name__, [str(output), form], world=2, folder=tmp_path)
    found = json.loads(output.read_text(encoding="utf-8"))
    if form == "reentrant":
        assert found["raised"] is None
        first, second = found["losses"]
        assert second < first
    else:
        assert found == {"losses": [], "raised": "CheckpointError"}


def main(output: Path, reentrant: bool) -> None:
    """Writes the loss of two steps, or the name of what torch raised."""
    if not reentrant:
        deepspeed_versions.NON_REENTRANT_SINCE = (0,)
    backend = Registry.load().create_backend("cpu")
    rank, _ = open_rank(backend)
    factory = model_factory(
        TINY, AdapterSection(r=4), attention="eager", gradient_checkpointing=True
    )
    options = ZeroOptions(options={"stage3_param_persistence_threshold": 0}, gather="module")
    engine = Zero(options).build(build_context(factory=factory, backend=backend, micro_batch=2))
    batch = batch_of(torch.arange(24).reshape(2, 12) + 24 * rank)
    losses, raised = [], None
    try:
        for _ in range(2):
            losses += [float(each) for each in engine.run_step([batch], model_loss, 44)]
            engine.update(1e-2, 1.0)
    except CheckpointError as error:
        raised = type(error).__name__
    if rank == 0:
        output.write_text(json.dumps({"losses": losses, "raised": raised}))
    if raised is None:
        backend.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "reentrant")
    # What DeepSpeed's interrupted step left waiting is not waited for.
    sys.stdout.flush()
    os._exit(0)
