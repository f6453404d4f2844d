"""``anygauge import``: what each tool's file becomes, and what is refused of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jinja2 import Environment

from anygauge.cli.imports.draft import CONVERSIONS, load_table
from anygauge.config.describe import sections
from anygauge.config.load import load_run_file
from anygauge.registry import installed_plugins
from anygauge.training.build_strategy import check_objective
from tests.gaudi_stack.their_command import OPTIONS, VARIABLES
from tests.helpers.runs import called

EXAMPLES = Path(__file__).parents[2] / "examples"
TABLES = {
    "axolotl": ("axolotl",),
    "trl": ("trainer", "trl"),
    "llamafactory": ("trainer", "llamafactory"),
    "habana": ("trainer", "habana"),
    "engines": ("engines",),
}

AXOLOTL: dict[str, Any] = {
    "base_model": "NousResearch/Meta-Llama-3-8B-Instruct",
    "tokenizer_type": "AutoTokenizer",
    "strict": False,
    "load_in_4bit": True,
    "adapter": "qlora",
    "lora_model_dir": None,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
    "chat_template": "llama3",
    "datasets": [
        {
            "path": "owner/chats",
            "type": "chat_template",
            "split": "train[:20%]",
            "field_messages": "conversation",
            "message_property_mappings": {"role": "from", "content": "value"},
            "roles": {"user": ["human", "user"], "assistant": ["gpt"]},
        }
    ],
    "val_set_size": 0.05,
    "output_dir": "./outputs/qlora-out",
    "sequence_len": 4096,
    "sample_packing": True,
    "eval_sample_packing": False,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 3,
    "optimizer": "paged_adamw_32bit",
    "lr_scheduler": "cosine",
    "learning_rate": "2e-4",
    "bf16": "auto",
    "tf32": False,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "attn_implementation": "flash_attention_2",
    "warmup_ratio": 0.1,
    "evals_per_epoch": 4,
    "saves_per_epoch": 1,
    "weight_decay": 0.0,
    "plugins": ["axolotl.integrations.liger.LigerPlugin"],
    "liger_rope": True,
    "wandb_project": "mine",
    "hub_model_id": "me/mine",
    "use_otel_metrics": True,
    "special_tokens": {"pad_token": "<|end_of_text|>"},
}
LLAMAFACTORY: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen3-4B-Instruct-2507",
    "quantization_bit": 4,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "all",
    "deepspeed": "ds.json",
    "dataset": "identity,tools",
    "template": "qwen3_nothink",
    "cutoff_len": 1024,
    "max_samples": 1000,
    "preprocessing_num_workers": 16,
    "output_dir": "saves/sft",
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1.0e-4,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "val_size": 0.1,
    "eval_strategy": "steps",
    "eval_steps": 500,
}
DATA_SETS: dict[str, Any] = {
    "identity": {"file_name": "identity.json"},
    "tools": {
        "hf_hub_url": "owner/tools",
        "formatting": "sharegpt",
        "columns": {"messages": "turns", "tools": "tools"},
    },
}
DATA_SETS["pairs"] = {**DATA_SETS["tools"], "ranking": True, "columns": {"chosen": "better"}}
DEEPSPEED = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "stage3_prefetch_bucket_size": "auto",
    },
}
TRL: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B",
    "dataset_name": "owner/capybara",
    "learning_rate": 2.0e-4,
    "num_train_epochs": 1,
    "packing": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "assistant_only_loss": True,
    "use_peft": True,
    "lora_r": 32,
    "lora_target_modules": ["q_proj", "v_proj"],
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 0.1,
    "report_to": ["wandb"],
    "push_to_hub": True,
}
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 16,
    "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True},
}


def write(folder: Path, name: str, values: Any) -> Path:
    """A file of another tool."""
    path = folder / name
    is_json = path.suffix == ".json"
    path.write_text(json.dumps(values) if is_json else yaml.safe_dump(values, sort_keys=False))
    return path


def imported(*arguments: Any) -> dict[str, Any]:
    """What an import prints, as flat fields of the run file that it gives a value."""
    done = called(["import", *arguments])
    assert done.returncode == 0, done.stderr
    return dict(flat(yaml.safe_load(done.stdout)))


def flat(values: Any, above: str = "") -> Any:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


# -- what files become -------------------------------------------------------------------------


def test_axolotl(tmp_path: Path) -> None:
    found = imported(write(tmp_path, "a.yaml", AXOLOTL))
    assert found == {
        "name": "qlora-out",
        "output": "outputs",
        "model.name": "NousResearch/Meta-Llama-3-8B-Instruct",
        "model.quantize.type": "nf4",
        "model.quantize.double_quantization": True,
        "adapter.r": 32,
        "adapter.alpha": 16,
        "adapter.dropout": 0.05,
        "adapter.targets": "all-linear",
        "data.train.path": "owner/chats",
        "data.train.split": "train[:20%]",
        "data.train.format": "sharegpt",
        "data.train.conversations": "conversation",
        "data.eval_fraction": 0.05,
        "data.chat_template": "llama3",
        "data.max_length": 4096,
        "data.too_long": "drop",
        "data.loss_on": "answer",
        "data.packing": True,
        "train.epochs": 3,
        "train.global_batch_size": 8,
        "train.micro_batch_size": 2,
        "train.optimizer.paged": True,
        "train.optimizer.name": "adamw",
        "train.optimizer.lr": 2e-4,
        "train.optimizer.weight_decay": 0.0,
        "train.schedule.name": "cosine",
        "train.schedule.warmup_ratio": 0.1,
        "train.gradient_checkpointing": True,
        "train.seed": 42,
        "precision.param_dtype": "auto",
        "trackers": ["wandb"],
        "tracker_options.wandb.project": "mine",
    }


def test_every_key_is_named_with_what_became_of_it(tmp_path: Path) -> None:
    text = called(["import", write(tmp_path, "a.yaml", AXOLOTL)]).stdout
    head, _, fields = text.partition("\n\n")
    blank = (None, "", [], {})
    keys = {*AXOLOTL, *AXOLOTL["datasets"][0]} - {"datasets", "bnb_config_kwargs"}
    assert [key for key in keys if AXOLOTL.get(key, 1) not in blank and key not in text] == []
    assert "optimizer: paged_adamw_32bit" in fields
    for reason, key in (
        ("Speed", "liger_rope"),
        ("Speed", "LigerPlugin"),
        ("Logging", "evals_per_epoch"),
        ("Names", "strict"),
        ("Upload", "hub_model_id"),
        ("Telemetry", "use_otel_metrics"),
    ):
        assert re.search(rf"# {reason}[^#]*(\n#   [^#]*)*{key}", head), (reason, key)
    assert "for 1 device" in " ".join(head.replace("#", "").split())


def test_llamafactory(tmp_path: Path) -> None:
    write(tmp_path, "ds.json", DEEPSPEED)
    (tmp_path / "data").mkdir()
    write(tmp_path, "data/dataset_info.json", DATA_SETS)
    target = tmp_path / "run.yaml"
    file = write(tmp_path, "l.yaml", LLAMAFACTORY)
    done = called(["import", file, "--output", target, "--devices", "2"])
    assert done.returncode == 0, done.stderr
    run = load_run_file(target)
    first, second = run.data.train_sources
    assert (first.path, first.format, first.limit) == (
        str(tmp_path / "data/identity.json"), "alpaca_chat", 1000)  # fmt: skip
    expected = ("owner/tools", "sharegpt", "turns")
    assert (second.path, second.format, second.conversations) == expected
    assert run.model.quantize is not None
    assert run.adapter is not None
    assert (run.adapter.r, run.adapter.alpha, run.adapter.targets) == (8, 16, "all-linear")
    strategy: Any = run.strategy
    assert (strategy.name, strategy.stage, strategy.offload) == ("zero", 3, "optimizer")
    assert (run.train.global_batch_size, run.train.micro_batch_size) == (16, 1)
    assert (run.train.epochs, run.train.max_grad_norm, run.launch.devices) == (3, 0.5, 2)
    assert (run.train.eval_every, run.checkpoint.every, run.data.eval_fraction) == (500, 500, 0.1)
    assert (run.data.max_length, run.data.loss_on, run.data.chat_template) == (1024, "answer", None)


def test_files_beside_may_be_given(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    beside = [
        write(tmp_path, "other/ds.json", DEEPSPEED),
        write(tmp_path, "other/sets.json", DATA_SETS),
    ]
    file = write(tmp_path, "l.yaml", LLAMAFACTORY)
    lost = called(["import", file])
    assert lost.returncode == 2
    assert "names ds.json" in lost.stderr
    assert imported(file, *beside)["strategy.stage"] == 3


def test_trl_with_accelerates_fsdp(tmp_path: Path) -> None:
    found = imported(write(tmp_path, "t.yaml", TRL), write(tmp_path, "f.yaml", ACCELERATE))
    expected = {
        "data.train.template": "{prompt}",
        "data.max_length": 1024,
        "data.loss_on": "answer",
        "data.packing": True,
        "adapter.r": 32,
        "adapter.alpha": 32,
        "adapter.targets": ["q_proj", "v_proj"],
        "adapter.dropout": 0.05,
        "train.schedule.name": "constant",
        "train.schedule.warmup_ratio": 0.1,
        "train.gradient_checkpointing": True,
        "train.global_batch_size": 256,
        "launch.devices": 8,
        "launch.nodes": 2,
        "strategy.name": "fsdp",
        "strategy.offload": "both",
        "precision.param_dtype": "bfloat16",
    }
    assert expected.items() <= found.items()


def test_trainer_arguments_name_neither_model_nor_rows(tmp_path: Path) -> None:
    values = {"output_dir": "out", "optim": "adamw_bnb_8bit", "max_steps": -1, "fp16": True,
              "num_train_epochs": 2.0, "deepspeed": DEEPSPEED}  # fmt: skip
    file = write(tmp_path, "args.json", values)
    done = called(["import", file])
    assert done.returncode == 2
    assert "--set model.name=" in done.stderr
    assert "--set data.train.path=" in done.stderr
    found = imported(file, "--set", "model.name=m/n", "--set", "data.train.path=rows.jsonl")
    expected = {
        "model.name": "m/n",
        "data.train.path": "./rows.jsonl",
        "train.epochs": 2.0,
        "train.micro_batch_size": 8,
        "train.optimizer.lr": 5e-5,
        "train.optimizer.name": "adamw_8bit",
        "train.schedule.name": "linear",
        "precision.param_dtype": "float16",
    }
    assert expected.items() <= found.items()
    assert "train.steps" not in found


@pytest.mark.parametrize(
    ("name", "engine", "expected"),
    [
        ("muon", {}, {"train.optimizer.name": "muon"}),
        ("paged_adamw", {}, {"train.optimizer.name": "adamw", "train.optimizer.paged": True}),
        (
            "paged_adamw_8bit",
            {},
            {"train.optimizer.name": "adamw_8bit", "train.optimizer.paged": True},
        ),
        ("paged_adamw_8bit", {"deepspeed": DEEPSPEED}, {"train.optimizer.name": "adamw_8bit"}),
    ],
)
def test_optimizers(
    name: str, engine: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    file = write(tmp_path, "args.json", {"output_dir": "out", "optim": name, **engine})
    found = imported(file, "--set", "model.name=m/n", "--set", "data.train.path=rows.jsonl")
    fields = ("train.optimizer.name", "train.optimizer.paged")
    assert {field: found[field] for field in fields if field in found} == expected


def command(options: dict[str, Any]) -> str:
    """The published command, as a shell script."""
    words = [f"{name}={value}" for name, value in VARIABLES.items()]
    words += ["python3 ../gaudi_spawn.py --use_deepspeed --world_size 8 run_lora_clm.py"]
    for name, value in options.items():
        shown = " ".join(f'"{one}"' for one in value) if isinstance(value, list) else value
        words.append(f"--{name} {'' if value is True and name != 'bf16' else shown}".strip())
    return "#!/bin/bash\n" + " \\\n  ".join(words) + "\n"


def test_the_published_gaudi_command_is_the_example_but_for_marked_lines(tmp_path: Path) -> None:
    zero = {"stage": 3, "overlap_comm": False, "contiguous_gradients": False}
    zero |= {"stage3_gather_16bit_weights_on_model_save": True}
    whole = {"train_batch_size": "auto", "bf16": {"enabled": True}, "gradient_clipping": 1.0}
    write(tmp_path, "llama2_ds_zero3_config.json", {**whole, "zero_optimization": zero})
    file, target = tmp_path / "command.sh", tmp_path / "run.yaml"
    file.write_text(command(OPTIONS))
    done = called(["import", file, "--output", target])
    assert done.returncode == 0, done.stderr
    example = EXAMPLES / "llama2-70b-lora-gaudi2.yaml"
    ours, theirs = (dict(flat(load_run_file(path).model_dump())) for path in (target, example))
    marked = set(re.findall(r"^ *(\w+): .*# .*differs:", example.read_text(), re.M))
    differ = {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}
    named = {name.rpartition(".")[2] for name in differ}
    lines = {"name", "output", "recipe_cache", "sync_on_release", "attention", "softmax", "fp8"}
    assert named == lines
    assert named <= marked
    head = target.read_text().partition("\n\n")[0]
    for name in marked - {"eval_fraction"}:
        assert re.search(rf"\b{name}\b", head), name


@pytest.mark.parametrize(
    ("base", "values", "fields", "said"),
    [
        (
            AXOLOTL,
            {"optimizer": "adamw_torch_4bit"},
            {"train.optimizer.name": "adamw_8bit"},
            "adamw_torch_4bit is torchao's",
        ),
        (AXOLOTL, {"swanlab_new_key": 3}, {}, "swanlab_new_key: 3"),
        (AXOLOTL, {"eta_min": 0.1}, {}, "eta_min: 0.1: Axolotl does not read this key"),
        (
            LLAMAFACTORY,
            {"model_name_or_path": "Qwen/Qwen3-VL-4B-Instruct", "template": "qwen3_vl"},
            {"data.chat_template": None},
            "begins answers with an empty <think>",
        ),
    ],
)
def test_what_comes_near_says_how_it_differs(
    tmp_path: Path, base: dict[str, Any], values: dict[str, Any], fields: Any, said: str
) -> None:
    beside = [write(tmp_path, "sets.json", DATA_SETS), write(tmp_path, "ds.json", DEEPSPEED)]
    file = write(tmp_path, "a.yaml", {**base, **values})
    done = called(["import", file, *(beside if base is LLAMAFACTORY else [])])
    assert done.returncode == 0, done.stderr
    head, _, text = done.stdout.partition("\n\n")
    assert said in " ".join(head.replace("#", "").split())
    found = dict(flat(yaml.safe_load(text)))
    assert {name: found.get(name) for name in fields} == fields


def test_a_template_leaves_the_system_out_where_axolotl_drops_it(tmp_path: Path) -> None:
    source = {**AXOLOTL["datasets"][0], "drop_system_message": True}
    values = {**AXOLOTL, "chat_template": "gemma", "datasets": [source]}
    template = Environment().from_string(
        imported(write(tmp_path, "a.yaml", values))["data.chat_template"]
    )
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert template.render(messages=turns) == template.render(messages=turns[1:])
    own = {**values, "chat_template": "tokenizer_default"}
    refused = called(["import", write(tmp_path, "a.yaml", own)])
    assert "drop_system_message: true: instead: data.chat_template" in refused.stderr


BEST = {"checkpoint.result": "best"}
EARLY = {"train.early_stopping.patience": 3}
BY_STEPS = {"eval_strategy": "steps", "eval_steps": 10, "save_steps": 20}


@pytest.mark.parametrize(
    ("base", "values", "fields", "said"),
    [
        (
            AXOLOTL,
            {**BY_STEPS, "early_stopping_patience": 3},
            EARLY | BEST,
            "checkpoint.result: the best",
        ),
        (AXOLOTL, {**BY_STEPS, "early_stopping_patience": 3, "save_steps": 15}, EARLY, ""),
        (AXOLOTL, {"early_stopping_patience": 3}, None, "train.early_stopping, with train.eval"),
        (LLAMAFACTORY, {"early_stopping_steps": 3}, EARLY, ""),
        (
            LLAMAFACTORY,
            {**BY_STEPS, "load_best_model_at_end": True},
            BEST,
            "checkpoint.result: the best",
        ),
        (
            LLAMAFACTORY,
            {**BY_STEPS, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"},
            BEST,
            "",
        ),
        (
            LLAMAFACTORY,
            {**BY_STEPS, "load_best_model_at_end": True, "metric_for_best_model": "accuracy"},
            None,
            "goes by the evaluation loss",
        ),
        (
            LLAMAFACTORY,
            {"eval_strategy": "epoch", "eval_steps": None, "load_best_model_at_end": True},
            None,
            "checkpoint.result: best, with train.eval_every",
        ),
        (LLAMAFACTORY, {"save_strategy": "best"}, {"checkpoint.keep_best": 1}, ""),
        (LLAMAFACTORY, {"full_determinism": True}, {"train.deterministic": True}, ""),
        (
            LLAMAFACTORY,
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 20, "min_lr_ratio": 0.1},
            },
            {
                "train.schedule.name": "warmup_stable_decay",
                "train.schedule.num_decay_steps": 20,
                "train.schedule.final_ratio": 0.1,
            },
            "",
        ),
    ],
)
def test_when_a_run_ends_and_what_its_result_is(
    tmp_path: Path,
    base: dict[str, Any],
    values: dict[str, Any],
    fields: dict[str, Any] | None,
    said: str,
) -> None:
    beside = [write(tmp_path, "sets.json", DATA_SETS), write(tmp_path, "ds.json", DEEPSPEED)]
    file = write(tmp_path, "a.yaml", {**base, **values})
    done = called(["import", file, *(beside if base is LLAMAFACTORY else [])])
    if fields is None:
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    found = dict(flat(yaml.safe_load(done.stdout)))
    assert fields.items() <= found.items()
    assert {"checkpoint.result", "train.early_stopping.patience"} & found.keys() <= fields.keys()


def pairs_of(source: dict[str, Any]) -> dict[str, Any]:
    """Keys of Axolotl's that make a run one of pairs."""
    return {"rl": "dpo", "sample_packing": None, "datasets": [{"path": "a/b", **source}]}


PAIRS = pairs_of({"type": "chat_template"})


@pytest.mark.parametrize(
    ("base", "values", "objective", "beta", "source"),
    [
        (
            AXOLOTL,
            {**pairs_of({"type": "chat_template.default", "field_chosen": "yes"}), "rl_beta": 0.2},
            "dpo",
            0.2,
            {"format": "preference", "prompt": "messages", "chosen": "yes"},
        ),
        (
            AXOLOTL,
            {**pairs_of({"type": "chat_template.argilla"}), "rl": "orpo", "orpo_alpha": 0.3},
            "orpo",
            0.3,
            {"format": "preference"},
        ),
        (
            AXOLOTL,
            pairs_of({"type": {"field_prompt": "q", "prompt_format": "Q: {prompt} A:"}}),
            "dpo",
            None,
            {"format": "preference", "prompt": "q", "template": "Q: {prompt} A:"},
        ),
        (
            LLAMAFACTORY,
            {"stage": "dpo", "pref_loss": "orpo", "pref_beta": 0.4, "dataset": "pairs"},
            "orpo",
            0.4,
            {"format": "preference", "prompt": "conversations", "chosen": "better"},
        ),
        (
            TRL,
            {"loss_type": ["sigmoid"], "beta": 0.5, "packing": None, "discopop_tau": 0.05},
            "dpo",
            0.5,
            {"template": "{prompt}"},
        ),
    ],
)
def test_preferences(
    tmp_path: Path,
    base: dict[str, Any],
    values: dict[str, Any],
    objective: str,
    beta: float | None,
    source: dict[str, Any],
) -> None:
    beside = [write(tmp_path, "sets.json", DATA_SETS), write(tmp_path, "ds.json", DEEPSPEED)]
    file, target = write(tmp_path, "a.yaml", {**base, **values}), tmp_path / "run.yaml"
    more = beside if base is LLAMAFACTORY else []
    done = called(["import", file, *more, "--output", target])
    assert done.returncode == 0, done.stderr
    run = yaml.safe_load(target.read_text())
    assert (run["objective"], run.get("objective_options", {}).get("beta")) == (objective, beta)
    assert source.items() <= run["data"]["train"].items()
    assert (run["adapter"]["dropout"], run["data"]["loss_on"]) == (0.0, "answer")
    check_objective(load_run_file(target), installed_plugins())


def test_the_reference_of_dpo_needs_an_adapter(tmp_path: Path) -> None:
    values = {**AXOLOTL, **PAIRS, "adapter": None}
    file = write(tmp_path, "a.yaml", {**values, "load_in_4bit": False})
    done = called(["import", file])
    assert (done.returncode, done.stdout) == (2, "")
    assert "--set adapter.r=...: the reference of dpo is the model without" in done.stderr
    assert imported(file, "--set", "adapter.r=8")["adapter.r"] == 8


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rl": "kto"}, "rl: kto: instead: TRL"),
        ({"lora_model_dir": "./old", **PAIRS}, "merge it: the reference is the base alone"),
        ({"datasets": [{"path": "a/b", "type": "chatml.ultra"}], "rl": "dpo"}, "template.argilla"),
        ({"qat": {"group_size": 32}}, "qat: {group_size: 32}: instead"),
        ({"optimizer": "came_pytorch"}, "came_pytorch: instead: train.optimizer.name: adamw"),
        ({"lr_scheduler": "rex"}, "train.schedule.name: constant, linear, cosine, warmup"),
        ({"sequence_lenn": 12}, "sequence_lenn: 12: instead: no key of Axolotl's that is known"),
        ({"base_model": "x/Llama-GPTQ"}, "the model that it was made from"),
        ({"chat_template": "aya"}, "templates/aya.jinja"),
        ({"datasets": [{"path": "a/b", "type": "oasst"}]}, "datasets[0].type: oasst: instead"),
        ({"val_set_size": 100}, "data.eval_fraction: a share of the rows"),
        ({"adapter": "llama-adapter"}, "adapter: llama-adapter: instead: adapter: LoRA"),
        ({"special_tokens": {"bos_token": "<x>"}}, "special_tokens.bos_token: <x>: instead"),
    ],
)
def test_what_changes_the_result_is_not_dropped(
    tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    file = write(tmp_path, "a.yaml", {**AXOLOTL, **values})
    done = called(["import", file])
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    dropped = called(["import", file, "--allow-dropped"])
    assert dropped.returncode == 0, dropped.stderr
    left_out = dropped.stdout.partition("LEFT OUT")[2].partition("# What may")[0]
    assert next(iter(values)) in left_out


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.json", json.dumps(DEEPSPEED), "looks like DeepSpeed's configuration: give it after"),
        ("x.yaml", "distributed_type: FSDP", "looks like Accelerate's configuration"),
        ("x.yaml", "model: q\nmodel_class: llm\ntrain_dataset: d", "version 1 of LLaMA-Factory"),
        ("x.yaml", "model: {}\ndata: {}\ntrain: {}", "a run file of anygauge already"),
        ("x.json", '{"peft_type": "LORA", "r": 8}', "adapter_config.json"),
        ("x.yaml", "a: 1\nb: 2", "looks like none of the files that import reads (its keys: a, b)"),
        ("x.sh", "torchrun train.py --lr 1", "looks like a command for train.py"),
        ("x.sh", "python run_lora_clm.py 'open", "is not a shell command"),
        ("x.yaml", "base_model: [", "not valid YAML"),
        ("x.yaml", "base_model: a\nmicro_batch_size: many", "micro_batch_size: got many, expected"),
        ("x.yaml", "base_model: a\nmicro_batch_size: -1", "counts from 1"),
        ("x.yaml", "base_model: a\nlearning_rate: x", "learning_rate: got x, expected"),
        ("x.yaml", "base_model: a\ndatasets: [rows]", "datasets[0]: got rows, expected a mapping"),
        ("x.yaml", "base_model: a\ndatasets: 3", "datasets: got 3, expected a list"),
        ("x.yaml", "base_model: a\nfsdp: 3", "fsdp: got 3, expected options as text or list"),
        ("x.yaml", "base_model: a\ndatasets: []", "--set data.train.path=...: the file names no"),
        ("x.yaml", "dataset_name: a/b\nmodel_name_or_path: c", "--set data.loss_on=...: TRL"),
        ("y.yaml", None, "no such file"),
    ],
)  # fmt: skip
def test_other_files_are_known_for_what_they_are(
    tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    done = called(["import", tmp_path / name])
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_what_no_run_file_can_say_names_the_foreign_key(tmp_path: Path) -> None:
    file = write(tmp_path, "a.yaml", {**AXOLOTL, "lora_r": -1})
    done = called(["import", file])
    assert done.returncode == 2
    assert f"{file} (lora_r: -1): adapter.r: got -1" in done.stderr


def test_an_output_is_never_written_over(tmp_path: Path) -> None:
    target = tmp_path / "run.yaml"
    target.write_text("mine")
    done = called(["import", write(tmp_path, "a.yaml", AXOLOTL), "--output", target])
    assert done.returncode == 2
    assert "exists already" in done.stderr
    assert target.read_text() == "mine"


# -- tables ------------------------------------------------------------------------------------


def fields_of_a_run() -> set[str]:
    return {".".join((*path, name)) for path, one in sections() for name in one.model_fields}


@pytest.mark.parametrize("names", TABLES.values(), ids=TABLES)
def test_a_key_has_one_rule_whose_field_there_is(names: tuple[str, ...]) -> None:
    table = load_table(*names)
    parts = [set(table[part]) for part in ("ours", "nothing", "not_offered")]
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert set(table["harmless"]) <= parts[2]
    assert set(table["usual"]) <= fields_of_a_run()
    fields = fields_of_a_run()
    for rule in table["ours"].values():
        path, _, conversion = rule.partition(": ")
        assert path in fields or path.startswith(("backend_options.", "strategy.options.")), path
        assert conversion in {*CONVERSIONS, "true", "auto", "pissa", "concatenate"}
    assert set(table["nothing"].values()) <= {"speed", "logging", "naming", "upload", "telemetry"}


# -- a dry run without the model ---------------------------------------------------------------


def test_a_dry_run_without_the_model_looks_at_neither_model_nor_rows(tmp_path: Path) -> None:
    target = tmp_path / "run.yaml"
    values = {**AXOLOTL, "base_model": "./no-such-model", "wandb_project": None}
    values["datasets"] = [{"path": "./no-such.jsonl", "type": "alpaca"}]
    called(["import", write(tmp_path, "a.yaml", values), "--output", target])
    unpaged = ["--set", "train.optimizer.paged=false"]  # which this backend cannot be
    arguments = ["train", target, "--dry-run", "--backend", "cpu", *unpaged]
    done = called([*arguments, "--no-model"], prepare_with=None)
    assert done.returncode == 0, done.stderr
    assert "neither the model nor the rows were looked at" in done.stdout
    assert "8 packs a step" in done.stdout
    looked = called(arguments)
    assert looked.returncode == 2
    assert "no-such.jsonl" in looked.stderr


def test_no_model_is_for_a_dry_run(tmp_path: Path) -> None:
    done = called(["train", tmp_path / "run.yaml", "--no-model"])
    assert done.returncode == 2
    assert "add --dry-run" in done.stderr
