"""What a step of the 8-card recipe does, beside optimum-habana's: its kernels, marks and numbers.

docs/gaudi-measured.md has a row for each part; every other option of optimum-habana's command is
equal.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import anygauge_hpu
from anygauge.config.load import load_run_file
from anygauge.config.schema import RunFile
from anygauge.interface import Phase
from anygauge.strategies.zero.spec import ZeroOptions
from anygauge_hpu.gaudi_fp8 import ENGINE
from anygauge_hpu.gaudi_fp8 import RECIPE as FP8_RECIPE
from tests.gaudi_stack import needs_optimum_habana
from tests.gaudi_stack.test_recipe import RECIPE, ROOT, TOOLS, documented, told
from tests.gaudi_stack.their_command import (
    DEFAULTS,
    EXAMPLES,
    OPTIONS,
    VARIABLES,
    read_command,
    read_defaults,
)
from tests.gaudi_stack.their_job import CONFIGURATION
from tests.helpers.plans_from_options import backend_with

pytestmark = needs_optimum_habana

CHECKOUT = os.environ.get("ANYGAUGE_OPTIMUM_HABANA")
INTELS_DEEPSPEED = os.environ.get("ANYGAUGE_GAUDI_DEEPSPEED")
"""A checkout of the DeepSpeed that optimum-habana uses; its recomputation ends graphs, that of the
package index does not."""

IN_THE_TABLES = {
    "attn_implementation": "attention",
    "fp8": "FP8 products",
    "dataset_concatenation": "packed rows",
    "per_device_eval_batch_size": "evaluation batch",
    "pipelining_fwd_bwd": "mark after forward",
}
"""Options of their command -> the row of "What a step does" that compares them."""
NOT_COMPARED = {
    "deepspeed": "the tables of DeepSpeed's configuration",
    "output_dir": "a folder",
    "save_strategy": "when to write, not what is trained",
    "logging_steps": "when to write, not what is trained",
    "do_train": "what the script is to do",
    "do_eval": "what the script is to do",
    "use_habana": "what the script is to do",
    "flash_attention_causal_mask": "of their attention, which the run file does not have",
}


def test_a_step_does_what_the_table_says() -> None:
    run = load_run_file(RECIPE)
    assert isinstance(run.strategy, ZeroOptions)
    found = {**_kernels(run), **_marks(run), **_data(run)}
    shown = {name: (told(one), told(other)) for name, (one, other) in found.items()}
    assert shown == documented("What a step does")
    assert set(IN_THE_TABLES.values()) <= set(found)


def test_what_is_in_no_table_is_equal() -> None:
    run = load_run_file(RECIPE)
    assert run.adapter is not None and not isinstance(run.data.train, list)
    optimizer = run.train.optimizer
    beta1, beta2 = optimizer.betas or (0.9, 0.999)
    ours = {
        "model_name_or_path": run.model.name,
        "dataset_name": run.data.train.path,
        "bf16": run.precision.param_dtype == "bfloat16",
        "num_train_epochs": run.train.epochs,
        "max_seq_len": run.data.max_length,
        "per_device_train_batch_size": run.train.micro_batch_size,
        "gradient_checkpointing": run.train.gradient_checkpointing,
        # Both evaluate once, at the end: they from the second of two epochs on.
        "eval_strategy": "epoch" if run.train.eval_every == 0 else "steps",
        "eval_delay": run.train.epochs,
        "learning_rate": optimizer.lr,
        "warmup_ratio": run.train.schedule.warmup_ratio,
        "lr_scheduler_type": run.train.schedule.name,
        "attn_softmax_bf16": run.backend_options["softmax"] == "bfloat16",
        "use_lazy_mode": run.backend_options["mode"] == "lazy",
        "throughput_warmup_steps": run.train.throughput_warmup_steps,
        "lora_rank": run.adapter.r,
        "lora_target_modules": sorted(run.adapter.targets),
        "validation_split_percentage": 100 * run.data.eval_fraction,
        # What their command leaves at a default.
        "lora_alpha": run.adapter.alpha,
        "lora_dropout": run.adapter.dropout,
        "train_on_inputs": run.data.loss_on == "all",
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "gradient_accumulation_steps": run.train.global_batch_size
        // (run.train.micro_batch_size * run.launch.devices),
    }
    from transformers import TrainingArguments

    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    other = defaults | read_defaults(_package() / "training_args.py") | DEFAULTS | OPTIONS
    other["lora_target_modules"] = sorted(OPTIONS["lora_target_modules"])
    assert ours == {name: other[name] for name in ours}
    assert set(OPTIONS) == (set(ours) & set(OPTIONS)) | set(IN_THE_TABLES) | set(NOT_COMPARED)
    assert TOOLS == VARIABLES and run.backend_options["graph_limit"] == 10
    clipped = run.train.max_grad_norm, CONFIGURATION["gradient_clipping"]
    assert clipped[0] == clipped[1]


def test_fp8_is_asked_for_as_by_them() -> None:
    accelerate = _package().parent / "accelerate/utils"
    assert read_defaults(accelerate / "dataclasses.py") == FP8_RECIPE
    theirs = (accelerate / "transformer_engine.py").read_text(encoding="utf-8")
    ours = (Path(anygauge_hpu.__file__).parent / "gaudi_fp8.py").read_text(encoding="utf-8")
    assert f"import {ENGINE} as te" in theirs
    for source, engine in ((theirs, "te"), (ours, "engine")):
        layers, contexts, recipes, regions = (
            _calls(source, f"{engine}.{name}")
            for name in (
                *("Linear", "fp8_autocast", "recipe.DelayedScaling"),
                "distributed.activation_checkpointing",
            )
        )
        both = ["bias", "minimize_memory", "params_dtype", "skip_weight_param_allocation"]
        assert layers and {tuple(sorted(call)) for call in layers} == {tuple(both)}
        assert recipes == [[None]] and regions == [[]]
        assert contexts == ([["enabled", "fp8_recipe"]] if engine == "te" else [])
    assert "functools.partial(engine.fp8_autocast, enabled=True, fp8_recipe=recipe)" in ours
    # Around forward, and around a backward that computes layers again; none in an evaluation.
    trainer = _text("trainer.py")
    assert "if self.accelerator.fp8_enabled and self.model.training:" in trainer
    assert "if self.accelerator.fp8_enabled and self.args.gradient_checkpointing:" in trainer


def _calls(source: str, function: str) -> list[list[str | None]]:
    """The named arguments of each call of a function; None: by a mapping."""
    return [
        [each.arg for each in node.keywords]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function
    ]


def test_their_command_is_that_of_the_checkout() -> None:
    if not CHECKOUT:
        pytest.skip("ANYGAUGE_OPTIMUM_HABANA names no checkout of huggingface/optimum-habana")
    examples = Path(CHECKOUT) / EXAMPLES
    assert read_command(Path(CHECKOUT)) == (VARIABLES, OPTIONS)
    defaults = read_defaults(examples / "run_lora_clm.py")
    assert {name: defaults[name] for name in DEFAULTS} == DEFAULTS
    text = (examples / "llama2_ds_zero3_config.json").read_text(encoding="utf-8")
    literal = text.replace("true", "True").replace("false", "False")
    assert ast.literal_eval(literal) == CONFIGURATION


def _package() -> Path:
    found = importlib.util.find_spec("optimum.habana")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "transformers"


def _text(name: str) -> str:
    return (_package() / name).read_text(encoding="utf-8")


def _of_deepspeed(name: str, after: str, before: str) -> str:
    """A part of Intel's DeepSpeed; "" without a checkout of it."""
    if not INTELS_DEEPSPEED:
        return ""
    text = (Path(INTELS_DEEPSPEED) / "deepspeed/runtime" / name).read_text(encoding="utf-8")
    found = text.partition(after)[2].partition(before)[0]
    assert found, (name, after)
    return found


def _kernels(run: RunFile) -> dict[str, tuple[Any, Any]]:
    backend = backend_with("hpu", run.backend_options)
    assert backend.kernels["rope"] == backend.kernels["rms_norm"] == "gaudi_fused"
    assert backend.kernels["adamw"] == "gaudi_fused"
    ours = Path(anygauge_hpu.__file__)
    kernels = ours.with_name("gaudi_kernels.py").read_text(encoding="utf-8")
    trainer, llama = _text("trainer.py"), _text("models/llama/modeling_llama.py")
    models = _text("models/modeling_all_models.py")
    library = "habana_frameworks.torch.hpex"
    return {
        "attention": (run.backend_options["attention"], OPTIONS["attn_implementation"]),
        "rope": (
            imported(kernels, f"{library}.kernels", "Rotary"),
            imported(models, f"{library}.kernels", "Rotary"),
        ),
        "norm": (
            imported(kernels, f"{library}.normalization", "FusedRMS"),
            "FusedRMSNorm" if f'"{library}.normalization"' in llama else "",
        ),
        "optimizer kernel": (
            imported(kernels, f"{library}.optimizers", "Fused"),
            imported(trainer, f"{library}.optimizers", "Fused"),
        ),
        "FP8 products": (run.precision.fp8, OPTIONS["fp8"]),
    }


def _marks(run: RunFile) -> dict[str, tuple[Any, Any]]:
    """Recomputation, gathering, and where the graph ends."""
    ours = _phases(run.backend_options)
    trainer, llama = _text("trainer.py"), _text("models/llama/modeling_llama.py")
    mark = r"if {0}args\.use_lazy_mode{1}:\s+self\.htcore\.mark_step\(\)"

    def theirs(before: str, whose: str = "", more: str = "") -> bool:
        return re.search(before + r"\s+" + mark.format(whose, more), trainer) is not None

    # Of the model's forward, up to the loop over its layers.
    before_layers = llama.partition("in enumerate(self.layers")[0].rpartition("def forward(")[2]
    assert before_layers
    assert "torch.utils.checkpoint.checkpoint = hpu_deepspeed_checkpointing" in trainer
    reentrant = "if use_reentrant is None:\n                        use_reentrant = True" in trainer
    recomputing = _of_deepspeed(
        "activation_checkpointing/checkpointing.py",
        "    def backward(ctx, *grads):",
        "torch.autograd.backward(",
    )
    freeing = _of_deepspeed("zero/partition_parameters.py", "def free_param(", "\n\n\n")
    defaults = read_defaults(_package() / "training_args.py")
    assert isinstance(run.strategy, ZeroOptions)
    split = theirs(r"loss\.mean\(\)[^\n]*", r"self\.", r" and self\.args\.pipelining_fwd_bwd")
    return {
        "recomputation": (
            "reentrant" if run.strategy.reentrant else "non-reentrant",
            "reentrant" if reentrant else "non-reentrant",
        ),
        "gathered unit": (
            # Never flat on a device that accumulates a graph.
            "layer" if run.strategy.gather == "auto" else run.strategy.gather,
            "layer" if defaults["use_zero3_leaf_promotion"] else "module",
        ),
        "mark before the first layer": (
            any(
                "mark_step" in path.read_text(encoding="utf-8")
                for path in (ROOT / "anygauge/models").glob("*.py")
            ),
            "htcore.mark_step()" in before_layers,
        ),
        "mark after forward": (Phase.FORWARD in ours, split and OPTIONS["pipelining_fwd_bwd"]),
        "mark before a layer is computed again": (
            Phase.RECOMPUTE in ours,
            not recomputing or "htorch.core.mark_step()" in recomputing,
        ),
        "mark after backward": (
            Phase.BACKWARD in ours,
            theirs(r"self\.floating_point_ops\(inputs\)\)"),
        ),
        "mark after update": (
            Phase.UPDATE in ours,
            theirs(r"self\._zero_model_grad\(model\)\n(?:\s+self\.state\.[^\n]*\n)+"),
        ),
        "mark around a chunk of the loss": (
            Phase.CHUNK in ours,
            "logits = self.lm_head(" not in llama,
        ),
        "wait before a weight is freed": (
            run.backend_options["sync_on_release"],
            "synchronize()" in freeing,
        ),
    }


def _phases(options: Mapping[str, Any]) -> set[Phase]:
    """Where the backend ends the graph, of the places that strategies and the loss offer it."""
    core = mock.MagicMock()
    found = set()
    names = dict.fromkeys(("habana_frameworks", "habana_frameworks.torch"), mock.MagicMock())
    with mock.patch.dict(sys.modules, {**names, "habana_frameworks.torch.core": core}):
        graph = backend_with("hpu", options).graph
        for phase in Phase:
            core.mark_step.reset_mock()
            graph.mark_step(phase)
            if core.mark_step.called:
                found.add(phase)
    return found


def _data(run: RunFile) -> dict[str, tuple[Any, Any]]:
    return {
        "packed rows": (
            "isolated" if run.data.packing else "padded",
            "concatenated" if OPTIONS["dataset_concatenation"] else "padded",
        ),
        "evaluation batch": (run.train.micro_batch_size, OPTIONS["per_device_eval_batch_size"]),
    }


def imported(source: str, module: str, begins: str) -> str:
    """The name that a source imports from a module of Gaudi's library."""
    (name,) = {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module == module
        for alias in node.names
        if alias.name.startswith(begins)
    }
    return name
