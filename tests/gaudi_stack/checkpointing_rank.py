"""One rank of ZeRO-3 + LoRA, gathered by module: ``checkpointing_rank.py OUTPUT reentrant|not``.

Writes the loss of two steps, or the name of what torch raised.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.checkpoint import CheckpointError

from anygauge.config.schema import AdapterSection, ModelSection
from anygauge.kernels.loss import model_loss
from anygauge.models.factory import CausalModelFactory
from anygauge.registry import Registry
from anygauge.strategies.zero import deepspeed_versions
from anygauge.strategies.zero.engine import Zero
from anygauge.strategies.zero.options import ZeroOptions
from tests.helpers.build import batch_of, build_context, open_rank
from tests.helpers.runs import TINY


def main(output: Path, reentrant: bool) -> None:
    if not reentrant:
        deepspeed_versions.NON_REENTRANT_SINCE = (0,)
    backend = Registry.load().create_backend("cpu")
    rank, world = open_rank(backend)
    engine = Zero(
        ZeroOptions(options={"stage3_param_persistence_threshold": 0}, gather="module")
    ).build(
        build_context(
            factory=CausalModelFactory(
                ModelSection(config=TINY, tokenizer="none"),
                AdapterSection(r=4),
                attention="eager",
                dtype=torch.float32,
                seed=0,
                gradient_checkpointing=True,
            ),
            backend=backend,
            rank=rank,
            world_size=world,
            micro_batch=2,
            max_norm=1.0,
        )
    )
    ids = torch.arange(24).reshape(2, 12) + 24 * rank
    batch = batch_of(ids)
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
