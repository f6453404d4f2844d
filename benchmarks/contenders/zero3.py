"""DeepSpeed settings: as documentation recommends, and as a careful user writes. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.plan import ContenderPlan

PREFETCH = 500_000_000
DEFAULT_LIVE = 1_000_000_000
"""Of reuse distance and live parameters; two layers of a model measured here are far smaller."""
DEFAULT_PERSISTENCE = 100_000


def documented() -> dict[str, Any]:
    """The ZeRO-3 file of transformers' documentation, with `auto` values.

    Without its optimizer section, which asks for an operator that DeepSpeed compiles: torch's
    AdamW, the Trainer's own default, is taken in its place.
    """
    return {
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 2000,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }


def by_hand(plan: ContenderPlan) -> dict[str, Any]:
    """What ``anygauge train --dry-run`` shows for the same model; a test compares the two.

    Differences in speed to this contender are then of loops and data, not of settings. Only
    accumulation is DeepSpeed's setting here, and done by anygauge itself there.
    """
    sizes = json.loads((Path(plan.model) / "config.json").read_text(encoding="utf-8"))
    largest_factor = plan.lora_rank * max(sizes["hidden_size"], sizes["intermediate_size"])
    return {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": plan.max_norm,
        "steps_per_print": 2**31 - 1,
        "zero_allow_untested_optimizer": True,
        **({"bf16": {"enabled": True}} if plan.dtype == "bfloat16" else {}),
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": PREFETCH,
            "memory_efficient_linear": not plan.checkpointing,
            "stage3_param_persistence_threshold": max(DEFAULT_PERSISTENCE, largest_factor),
            "stage3_max_reuse_distance": DEFAULT_LIVE,
            "stage3_max_live_parameters": DEFAULT_LIVE,
        },
    }
