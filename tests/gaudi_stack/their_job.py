"""What optimum-habana makes of the 8-card recipe; run as a script, with the stand-in in its path.

their_job.py config OUTPUT     its ZeRO-3 configuration, filled in for the job
their_job.py launch OUTPUT     its 8 processes, each of which writes OUTPUT.RANK
their_job.py rank OUTPUT       one of these processes
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CONFIGURATION: dict[str, Any] = {
    "steps_per_print": 64,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "contiguous_gradients": False,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "timers": {"throughput": {"enabled": True, "synchronized": False}},
}
"""Its examples/language-modeling/llama2_ds_zero3_config.json; a comma is missing in it there."""

ARGUMENTS = SimpleNamespace(
    world_size=8,
    per_device_train_batch_size=10,
    gradient_accumulation_steps=1,
    max_grad_norm=1.0,
    learning_rate=0.0018,
    adam_beta1=0.9,
    adam_beta2=0.999,
    adam_epsilon=1e-6,
    weight_decay=0.0,
    save_on_each_node=False,
    get_warmup_steps=lambda steps: steps // 33,
)
"""As its README's command for 8 cards gives them to the trainer."""


def config(output: Path) -> None:
    from optimum.habana.transformers.integrations.deepspeed import GaudiTrainerDeepSpeedConfig

    filled = GaudiTrainerDeepSpeedConfig(CONFIGURATION)
    filled.trainer_config_process(ARGUMENTS)
    filled.trainer_config_finalize(ARGUMENTS, None, 100)  # refuses what contradicts the arguments
    output.write_text(json.dumps(filled.config), encoding="utf-8")


def launch(output: Path) -> None:
    from optimum.habana.distributed import DistributedRunner

    command = f"{Path(__file__).resolve()} rank {output}"
    runner = DistributedRunner(command_list=[command], world_size=8, use_deepspeed=True)
    sys.exit(runner.run() or 0)


def rank(output: Path) -> None:
    found = {"argv": sys.argv[1:], "environment": dict(os.environ)}
    Path(f"{output}.{os.environ['RANK']}").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    {"config": config, "launch": launch, "rank": rank}[sys.argv[1]](Path(sys.argv[2]))
