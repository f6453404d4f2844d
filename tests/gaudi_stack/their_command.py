"""optimum-habana's command for the 8-card recipe: its README's, with the defaults of its script.

`ANYGAUGE_OPTIMUM_HABANA` names a checkout of huggingface/optimum-habana that a test compares this
with; the installed package has no examples.
"""

from __future__ import annotations

import ast
import shlex
from pathlib import Path
from typing import Any

EXAMPLES = "examples/language-modeling"
VARIABLES = {"PT_HPU_LAZY_MODE": "1", "PT_HPU_MAX_COMPOUND_OP_SIZE": "10"}
OPTIONS: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Llama-2-70b-hf",
    "deepspeed": "llama2_ds_zero3_config.json",
    "dataset_name": "tatsu-lab/alpaca",
    "bf16": True,
    "output_dir": "./lora_out",
    "num_train_epochs": 2,
    "max_seq_len": 2048,
    "per_device_train_batch_size": 10,
    "per_device_eval_batch_size": 1,
    "gradient_checkpointing": True,
    "eval_strategy": "epoch",
    "eval_delay": 2,
    "save_strategy": "no",
    "learning_rate": 0.0018,
    "warmup_ratio": 0.03,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "dataset_concatenation": True,
    "attn_softmax_bf16": True,
    "do_train": True,
    "do_eval": True,
    "use_habana": True,
    "use_lazy_mode": True,
    "pipelining_fwd_bwd": True,
    "throughput_warmup_steps": 3,
    "lora_rank": 4,
    "lora_target_modules": ["q_proj", "v_proj", "k_proj", "o_proj"],
    "validation_split_percentage": 4,
    "attn_implementation": "gaudi_fused_sdpa",
    "flash_attention_causal_mask": True,
    "fp8": True,
}
DEFAULTS = {"lora_alpha": 16, "lora_dropout": 0.05, "train_on_inputs": True}
"""Of its script's own arguments, which the command does not give."""


def read_command(checkout: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Variables and options of the README's command."""
    text = (checkout / EXAMPLES / "README.md").read_text(encoding="utf-8")
    _, _, after = text.partition("finetuning of Llama2-70B with DeepSpeed ZeRO-3 optimization")
    block = after.partition("```bash\n")[2].partition("```")[0]
    words = shlex.split(block.replace("\\\n", " "))
    script = words.index("run_lora_clm.py")
    variables = dict(word.split("=", 1) for word in words[:script] if "=" in word)
    found: dict[str, list[Any]] = {}
    name = ""
    for word in words[script + 1 :]:
        if word.startswith("--"):
            name = word.removeprefix("--")
            found[name] = []
        else:
            found[name].append(_value(word))
    return variables, {
        name: True if not given else given[0] if len(given) == 1 else given
        for name, given in found.items()
    }


def read_defaults(source: Path) -> dict[str, Any]:
    """The fields of all dataclasses of a source that have a literal default."""
    found = {}
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value = node.value
            given = value.keywords if isinstance(value, ast.Call) else []
            value = next((k.value for k in given if k.arg == "default"), None if given else value)
            if isinstance(value, ast.Constant):
                found[node.target.id] = value.value
    return found


def _value(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word
