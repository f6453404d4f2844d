"""Hugging Face's TrainingArguments and TRL's SFTConfig; other tools have the former's keys too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from anygauge.cli.imports.draft import OFF, Draft, given
from anygauge.cli.imports.engine_files import put_engine

OPTIMIZERS = {
    "adamw": "adamw_torch adamw_torch_fused adamw_hf adamw adamw_apex_fused adamw_torch_npu_fused "
    "paged_adamw paged_adamw_32bit",
    "adamw_8bit": "adamw_bnb_8bit adamw_8bit paged_adamw_8bit adamw_torch_8bit adamw_torch_4bit",
    "lion": "lion lion_32bit",
    "muon": "muon",
    "sgd": "sgd",
}
"""Ours -> their names."""
PATIENCE = {"Axolotl": "early_stopping_patience", "LLaMA-Factory": "early_stopping_steps"}
"""Tool -> its key for the evaluations without a lower loss after which a run ends."""
WSD = "warmup_stable_decay"
WSD_SETTINGS = {"num_decay_steps": "num_decay_steps", "decay_type": "decay_type"}
WSD_SETTINGS |= {"min_lr_ratio": "final_ratio"}
"""Its settings there -> fields of ours."""
BY_STEPS = "with train.eval_every: evaluations are counted in steps"


def read_trainer(draft: Draft) -> None:
    """TrainingArguments, or TRL's arguments with model and data set."""
    trl = draft.tool == "TRL"
    adapter: dict[str, Any] = {}
    put_engine(draft)
    put_training(draft, "bfloat16" if trl else "float32")
    adapted = bool(draft.take("use_peft", trl and any("lora_" in key for key in draft.keys)))
    if trl and draft.keys.get("loss_type") in ("sigmoid", ["sigmoid"]):
        draft.usual("train.optimizer.lr", 1e-6)
        draft.forget("f_alpha_div|discopop_tau|ref_model_(mixup|sync_st)")
        put_objective(draft, "dpo", given("loss_type", draft.take("loss_type")), adapted, "beta")
    if draft.take("load_in_4bit"):
        draft.put("model.quantize.type", "nf4", "load_in_4bit: true")
        double = bool(draft.take("use_bnb_nested_quant"))
        draft.put("model.quantize.double_quantization", double, "use_bnb_nested_quant")
    elif draft.take("load_in_8bit"):
        draft.put("model.quantize.type", "int8", "load_in_8bit: true")
    if not adapted:
        draft.forget("lora_|use_rs|use_dora")
    else:
        adapter = {"r": 16, "alpha": 32, "dropout": 0.05, "targets": ["q_proj", "v_proj"]}
        if not draft.keys.get("lora_target_modules"):
            draft.change(
                "lora_target_modules: peft chooses by architecture, mostly q_proj and v_proj"
            )
    packs, strategy = draft.take("packing", False), draft.take("packing_strategy", "bfd")
    if packs:
        form = "concatenate" if strategy == "wrapped" else True
        draft.put("data.packing", form, f"packing: true, packing_strategy: {strategy}")
        if strategy != "bfd":
            draft.change(f"packing_strategy: {strategy} cuts rows; here packs hold whole rows")
    answers, completion = draft.take("assistant_only_loss"), draft.take("completion_only_loss")
    if answers or completion is not None:
        loss = "answer" if answers or completion else "all"
        draft.put("data.loss_on", loss, "assistant_only_loss, completion_only_loss")
    draft.apply(*(("trainer", "trl") if trl else ("trl", "trainer")))
    draft.usual("train.gradient_checkpointing", trl)
    for name, value in adapter.items():
        draft.usual(f"adapter.{name}", value)
    if not trl:
        draft.change("data: TrainingArguments say nothing of rows; what is not set is our default")
        return
    draft.usual("data.max_length", 1024)
    draft.put("data.train.template", "{prompt}", "TRL joins prompt and completion as they are")
    draft.needed["data.loss_on"] = (
        "TRL goes by the columns: `answer` for prompt and completion, `all` for messages or text"
    )


def put_objective(draft: Draft, name: str, key: str, adapted: bool, *betas: str) -> None:
    """The loss of pairs, before the keys of adapter and rows are read. `betas` are keys of its
    factor, the last that is given counts."""
    draft.put("objective", name, key)
    draft.put("data.loss_on", "answer", key)
    draft.forget("train_on_(inputs|prompt)$|mask_history$")
    for theirs in betas:
        draft.note("objective_options.beta", draft.number(theirs), theirs)
    if adapted:
        dropout = given("lora_dropout", draft.take("lora_dropout", "default"))
        draft.put("adapter.dropout", 0.0, f"{dropout}, which is off there for pairs")
    if name == "dpo" and not adapted:
        draft.needed["adapter.r"] = "the reference of dpo is the model without its adapter"
    if name == "dpo" and (start := draft.take("lora_model_dir")):
        draft.block("lora_model_dir", start, "merge it: the reference is the base alone")


def put_training(draft: Draft, precision: str) -> None:
    """What all tools on Trainer share."""
    put_batch(draft, "per_device_train_batch_size", 8)
    put_optimizer(draft, "optim", "adamw_torch")
    put_schedule(draft, "lr_scheduler_type", "linear")
    put_precision(draft, precision)
    put_evaluation(draft)
    put_folder(draft)
    asked, project = draft.items("report_to"), draft.take("project")
    if known := [name for name in asked if name in ("wandb", "tensorboard", "mlflow")]:
        draft.put("trackers", known, given("report_to", asked))
    for name in {*asked} - {*known, "none"}:
        draft.skip("report_to", name, "logging")
    if "wandb" in known:
        draft.note("tracker_options.wandb.project", project, "project")


def put_batch(draft: Draft, key: str, usual: int) -> None:
    """Sequences of a step: theirs of one device, times accumulation, times devices."""
    micro, steps = draft.number(key, usual), draft.number("gradient_accumulation_steps", 1)
    if not (isinstance(micro, int) and isinstance(steps, int) and micro > 0 and steps > 0):
        raise draft.error(f"{key}, gradient_accumulation_steps", [micro, steps], "counts from 1")
    ranks = draft.nodes * (draft.devices or 1) // draft.sharing
    draft.note("train.micro_batch_size", micro, key)
    origin = f"{micro} x gradient_accumulation_steps {steps} x {ranks} device{'s' * (ranks > 1)}"
    draft.put("train.global_batch_size", micro * steps * ranks, origin)
    if draft.devices is None:
        draft.change(
            "train.global_batch_size is for 1 device, since the file does not say how many there "
            "were: import with --devices N if there were N"
        )
    elif draft.devices > 1:
        draft.put("launch.devices", draft.devices, "devices of a machine")
    if draft.nodes > 1:
        draft.put("launch.nodes", draft.nodes, "machines")


def put_optimizer(draft: Draft, key: str, usual: str) -> None:
    """The optimizer with its moments."""
    name = draft.take(key, usual)
    betas = [draft.number("adam_beta1", 0.9), draft.number("adam_beta2", 0.999)]
    eps = draft.number("adam_epsilon")
    ours = next((ours for ours, names in OPTIMIZERS.items() if name in names.split()), None)
    if ours is None:
        draft.block(key, name, f"train.optimizer.name: {', '.join(OPTIMIZERS)}")
        return
    draft.put("train.optimizer.name", ours, f"{key}: {name}")
    if name.startswith("paged"):
        if draft.at("strategy.name") in ("fsdp", "zero"):
            paging = f"the paging of {name}, which sharded state cannot have"
            draft.meaningless.setdefault("speed", []).append(paging)
        else:
            draft.put("train.optimizer.paged", True, f"{key}: {name}")
    if name == "muon":
        draft.change(f"{key}: {name} is torch's; if yours scales lr in another way, change it")
    if name in ("adamw_torch_8bit", "adamw_torch_4bit"):
        draft.change(f"{key}: {name} is torchao's; here the 8-bit AdamW of bitsandbytes")
    if ours == "sgd":
        draft.put("train.optimizer.momentum", 0.0, f"{key}: sgd has none")
    elif betas != [0.9, 0.999] or ours == "lion":
        draft.put("train.optimizer.betas", betas, "adam_beta1, adam_beta2")
    if ours.startswith(("adamw", "muon")):
        draft.note("train.optimizer.eps", eps, "adam_epsilon")


def put_schedule(draft: Draft, key: str, usual: str) -> None:
    """The schedule and its warm-up, of which `constant` has none there."""
    name, settings = str(draft.take(key, usual)), draft.mapping("lr_scheduler_kwargs")
    steps, ratio = draft.number("warmup_steps"), draft.number("warmup_ratio")
    if steps is not None and 0 < steps < 1:
        steps, ratio = None, steps
    ours = "constant" if name == "constant_with_warmup" else name
    if name == "cosine_with_min_lr" and (least := settings.pop("min_lr_rate", None)) is not None:
        draft.put("train.schedule.final_ratio", least, f"lr_scheduler_kwargs: min_lr_rate: {least}")
        ours = "cosine"
    for theirs, field in WSD_SETTINGS.items() if name == WSD else ():
        draft.put(f"train.schedule.{field}", settings.pop(theirs, None), "lr_scheduler_kwargs")
    if ours not in ("constant", "linear", "cosine", WSD) or settings:
        draft.block(key, [name, settings], f"train.schedule.name: constant, linear, cosine, {WSD}")
        return
    draft.put("train.schedule.name", ours, f"{key}: {name}")
    if steps and name != "constant":
        draft.put("train.schedule.warmup_steps", int(steps), f"warmup_steps: {steps}")
    elif ratio and name != "constant":
        draft.note("train.schedule.warmup_ratio", ratio, "warmup_ratio")


def put_precision(draft: Draft, usual: str) -> None:
    """Types of numbers."""
    named = {key: draft.take(key) for key in ("bf16", "fp16", "pure_bf16", "fp8")}
    bf16, half, pure, fp8 = named.values()
    types = [draft.take(key) for key in ("dtype", "torch_dtype", "bnb_4bit_compute_dtype")]
    if fp8:
        found = "bfloat16"
    elif half and half not in OFF:
        found = "float16"
    elif bf16 == "auto":
        found = "auto"
    elif pure or (bf16 and bf16 not in OFF):
        found = "bfloat16"
    elif bf16 is None and half is None:
        found = next((name for name in types[:2] if name in ("bfloat16", "float16")), usual)
    else:
        found = "float32"
    origin = ", ".join(f"{k}: {value}".lower() for k, value in named.items() if value is not None)
    draft.put("precision.param_dtype", found, origin or "neither bf16 nor fp16")
    if pure:
        draft.change("pure_bf16: trained weights keep a float32 copy here")
    if fp8:
        draft.put("precision.fp8", True, "fp8: true")
        draft.change("fp8: the backend's own scales, where a backend has products in FP8")


def put_evaluation(draft: Draft) -> None:
    """When it evaluates and saves; and which weights are the result, where that decides it."""
    often = draft.take("eval_strategy", draft.take("evaluation_strategy", "no"))
    every, save, steps = (draft.take(key) for key in ("eval_steps", "save_strategy", "save_steps"))
    if isinstance(every, int) and (often == "steps" or draft.tool == "Axolotl"):
        draft.note("train.eval_every", every, "eval_steps")
    elif often not in OFF or every is not None:
        draft.skip("eval_strategy", f"{often}, eval_steps: {every}; here at the end", "logging")
    if save in ("no", False):
        draft.put("checkpoint.every", 0, "save_strategy: no")
    elif save == "best" and draft.at("train.eval_every"):
        draft.put("checkpoint.keep_best", 1, "save_strategy: best")
    elif save == "best":
        draft.block("save_strategy", save, f"checkpoint.keep_best, {BY_STEPS}")
    elif save in ("steps", None) and isinstance(steps, int):
        draft.note("checkpoint.every", steps, "save_steps")
    _put_choice(draft, steps)
    if resume := draft.take("resume_from_checkpoint"):
        chosen, origin = draft.path(resume), given("resume_from_checkpoint", resume)
        draft.put("checkpoint.resume", "auto" if resume is True else chosen, origin)


def _put_choice(draft: Draft, save_steps: Any) -> None:
    """Early stopping, and the best checkpoint as the result; both by the evaluation loss."""
    every, key = draft.at("train.eval_every"), PATIENCE.get(draft.tool, "")
    patience, best = draft.number(key), draft.take("load_best_model_at_end", False)
    if draft.keys.get("metric_for_best_model") in ("loss", "eval_loss"):
        draft.take("metric_for_best_model")
    if patience and every:
        draft.note("train.early_stopping.patience", patience, key)
    elif patience:
        draft.block(key, patience, f"train.early_stopping, {BY_STEPS}")
    origin = "load_best_model_at_end: true"
    # Axolotl ends early with the best one, if each checkpoint comes with an evaluation.
    if draft.tool == "Axolotl" and patience and every:
        together = isinstance(save_steps, int) and save_steps % every == 0
        best, origin = together, f"as Axolotl does with {key}"
    if best and every:
        draft.put("checkpoint.result", "best", origin)
        if save_steps != every:
            draft.change("checkpoint.result: the best evaluation's weights; there, the best of "
                         "those evaluations that have a checkpoint")  # fmt: skip
    elif best:
        draft.block("load_best_model_at_end", best, f"checkpoint.result: best, {BY_STEPS}")


def put_folder(draft: Draft) -> None:
    """The name of the run and its folder: `output_dir` is both in one."""
    folder, name = draft.take("output_dir"), draft.take("run_name")
    if isinstance(folder, str) and (path := Path(folder)).name:
        own = re.sub(r"^[^A-Za-z0-9]+|[^A-Za-z0-9._-]", "", path.name) or "run"
        draft.put("name", own, f"output_dir: {folder}")
        draft.put("output", str(path.parent), f"output_dir: {folder}")
    if name is not None:
        draft.skip("run_name", name, "naming")


def put_share(draft: Draft, key: str) -> None:
    """The share of rows to evaluate on; a count of rows is not offered."""
    share: Any = draft.number(key, 0)
    if share >= 1:
        draft.block(key, share, "data.eval_fraction: a share of the rows")
    elif share:
        draft.note("data.eval_fraction", share, key)
