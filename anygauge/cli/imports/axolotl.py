"""Axolotl's YAML: what its table (`tables/axolotl.toml`) cannot say."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anygauge.cli.imports import trainer
from anygauge.cli.imports.draft import BLANK, Draft, Leaf, as_list, given, targets
from anygauge.cli.imports.engine_files import put_engine
from anygauge.config.document import MOST_BYTES
from anygauge.config.paths import NAMED_TEMPLATES
from anygauge.data.template import FOLDER
from anygauge.util.files import read_bounded

TEMPLATES = {"chatml": "chatml", "llama3": "llama3", "gemma": "gemma", "qwen3": "qwen3"}
TEMPLATES |= {"mistral_v1": "mistral"}
"""Its chat templates -> ours, to the letter."""
DROPS_SYSTEM = "{%- if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}"
FAMILIES = {
    "gemma3": "gemma-3-.*-it",
    "gemma3n": "gemma-3n-.*-it",
    "gemma4": "gemma-4-.*-it",
    "qwen_25": "qwen2[.]5-",
    "qwen3_5": "qwen3[.]5-",
    "falcon_h1": "falcon-h1-.*-instruct",
    "phi_3": "phi-3.*-instruct",
    "phi_35": "phi-3[.]5-.*-instruct",
    "phi_4": "phi-4",
    "deepseek_v3": "deepseek-(v3|r1)",
}
"""Its other templates -> models whose own tokenizer has the template that it is a copy of."""
ENDS = (
    ("llama-?2|llama-(7|13|30|65)b|open_llama|codellama|mistral|mixtral", "<s>", "</s>"),
    ("falcon-7b|mpt-|redpajama-incite|pythia|gpt-neox", "<|endoftext|>", "<|endoftext|>"),
    ("yi-", "<|startoftext|>", ""),
    ("llama-3.*instruct", "<|begin_of_text|>", "<|eot_id|>"),
    ("llama-3", "<|begin_of_text|>", "<|end_of_text|>"),
)
"""Models -> the start and end tokens that their tokenizers have."""
QUANTIZED = re.compile("gptq|awq|aqlm|bnb-|-nvfp4|prequantized|-4bit|-int[48]", re.IGNORECASE)
"""Names of models that are stored quantized in ways that do not train here."""
DEGREES = {"dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard"}
DEGREES |= {"tensor_parallel_size": "tp", "context_parallel_size": "cp"}
SPEED_PLUGINS = ("CutCrossEntropyPlugin", "LigerPlugin", "KernelsPlugin", "ExpertParallelPlugin")
ROLES = {"user": {"user", "human"}, "assistant": {"assistant", "gpt"}}
ROLES |= {"system": {"system"}, "tool": {"tool", "observation"}}
CHATS = {"dpo": ["chat_template.default", "chat_template.argilla_chat", "chat_template"]}
CHATS |= {"orpo": ["chat_template.argilla"]}
"""Objective -> types of data sets of pairs."""
SOURCE = {"name": "subset", "split": "split", "revision": "revision"}
SOURCE |= {f"field_{name}": name for name in ("tools", "system", "prompt", "chosen", "rejected")}
"""Keys of a data set -> fields of a source."""
SOURCE_IDLE = {"field_thinking", "template_thinking_key", "ds_type", "trust_remote_code"}
SOURCE_IDLE |= {"preprocess_shards"}
"""Keys of a data set that change no row: keys of a turn are kept, a file's suffix says its type."""


def read_axolotl(draft: Draft) -> None:
    """Read Axolotl's keys."""
    name = draft.note("model.name", draft.take("base_model"), "base_model")
    if QUANTIZED.search(str(name)):
        draft.block("base_model", name, "the model that it was made from, with model.quantize")
    put_engine(draft)
    _put_ranks(draft)
    _put_objective(draft)
    whole = draft.number("batch_size")
    if whole and not draft.keys.get("gradient_accumulation_steps"):
        micro = draft.keys.get("micro_batch_size") or 1
        draft.keys["gradient_accumulation_steps"] = max(1, int(whole // micro))
    trainer.put_batch(draft, "micro_batch_size", 1)
    trainer.put_optimizer(draft, "optimizer", "adamw_torch_fused")
    if draft.keys.get("warmup_steps") is None and draft.keys.get("warmup_ratio") is None:
        draft.keys["warmup_ratio"] = 0.03
        draft.change("warm-up: Axolotl's default is 3% of the steps, but at most 100 steps")
    trainer.put_schedule(draft, "lr_scheduler", "cosine")
    for ours, theirs in (("bf16", "bfloat16"), ("fp16", "float16")):
        if draft.take(theirs) and not draft.keys.get(ours):
            draft.keys[ours] = True
    trainer.put_precision(draft, "float32")
    trainer.put_evaluation(draft)
    trainer.put_folder(draft)
    _put_adapter(draft)
    _put_data(draft)
    _put_vocabulary(draft)
    _put_rest(draft)
    draft.apply("axolotl")


def _put_ranks(draft: Draft) -> None:
    """Degrees in which a model is spread, and the ranks that they make."""
    ranks = 1
    for key, field in DEGREES.items():
        size = draft.number(key, 1)
        if field == "cp" and size > 1 and draft.at("strategy.tp"):
            text = "tp and cp do not go together here; it takes fewer devices"
            draft.change(f"{key}: {size}: {text}")
        elif size > 1:
            draft.put("strategy.name", "fsdp", given(key, size))
            draft.note(f"strategy.{field}", size, key)
            ranks *= size
            # Ranks that share their rows count once in a batch.
            draft.sharing *= 1 if field.startswith("dp_") else size
    workers = draft.number("ray_num_workers", ranks)
    if draft.devices is None and workers > 1:
        draft.devices = workers // draft.nodes


def _put_objective(draft: Draft) -> None:
    """DPO or ORPO; any other `rl` is left for the table."""
    if (name := draft.keys.get("rl")) in CHATS:
        draft.keys |= {f"trl.{key}": value for key, value in draft.mapping("trl").items()}
        betas = ("orpo_alpha", "dpo_beta", "rl_beta", "trl.beta")
        adapted = bool(draft.keys.get("adapter"))
        trainer.put_objective(draft, draft.take("rl"), given("rl", name), adapted, *betas)
    if name == "orpo":
        draft.change("orpo: TRL's token loss counts the prompt as well; here the chosen answer")


def _put_adapter(draft: Draft) -> None:
    kind, four, eight = map(draft.take, ("adapter", "load_in_4bit", "load_in_8bit"))
    settings = draft.mapping("bnb_config_kwargs")
    linear, names = draft.take("lora_target_linear"), draft.take("lora_target_modules")
    draft.take("lora_fan_in_fan_out")  # which peft finds out by itself
    if not kind:
        draft.forget("lora_(?!.*kernel)|peft|loraplus")
        return
    if kind not in ("lora", "qlora"):
        draft.block("adapter", kind, "adapter: LoRA")
        return
    if four or (kind == "qlora" and four is None and not eight):
        draft.put("model.quantize.type", "nf4", "load_in_4bit: true")
        double = settings.pop("bnb_4bit_use_double_quant", True)
        draft.put("model.quantize.double_quantization", double, "bnb_4bit_use_double_quant")
    elif eight:
        draft.put("model.quantize.type", "int8", "load_in_8bit: true")
    if settings:
        draft.block("bnb_config_kwargs", settings, "model.quantize")
    if draft.keys.get("lora_model_dir"):
        draft.forget("(lora_r|lora_alpha|peft_use_rslora|peft_use_dora)$")
    elif linear or names or draft.keys.get("lora_target_parameters"):
        layers = targets(names or [])
        if linear:
            layers = "all-linear" if not names else ["all-linear", *as_list(names)]
        draft.put("adapter.targets", layers, "lora_target_linear, lora_target_modules")
    if unfrozen := draft.take("unfrozen_parameters"):
        draft.change(f"{given('unfrozen_parameters', unfrozen)}: beside an adapter, no weight "
                     "there has such a name; here the base is frozen and its factors are trained; "
                     "adapter.modules_to_save trains whole modules as well")  # fmt: skip


def _put_vocabulary(draft: Draft) -> None:
    """Tokens that are added, and special ones with other names than the tokenizer's."""
    special = draft.mapping("special_tokens")
    if isinstance(draft.keys.get("tokens"), dict):
        special = draft.mapping("tokens") | special
    if tokens := draft.items("tokens"):
        draft.note("model.new_tokens", tokens, "tokens")
    model = str(draft.at("model.name")).lower()
    own = next((ends for family, *ends in ENDS if re.search(family, model)), ["", ""])
    sources = draft.at("data.train") or []
    sources = [sources] if isinstance(sources, dict) else sources
    formats = {one.get("template", one["format"]).value for one in sources}
    for kind, token in special.items():
        key = f"special_tokens.{kind}"
        if kind in ("pad_token", "unk_token") or token == {"bos_token": own[0]}.get(kind, own[1]):
            draft.skip(key, token, "naming")
        elif kind == "eos_token" and formats <= {"messages", "sharegpt", "preference"}:
            draft.change(f"{key}: {token}: here the chat template ends a turn")
        elif kind == "eos_token":
            draft.put("model.eos_token", token, f"{key}: {token}")
            if own[1] and "<|im_" in token:  # these families lack it, and Axolotl adds it
                draft.put("model.new_special_tokens", [token], f"{key}: {token}")
        else:
            draft.block(key, token, "model.tokenizer: a folder of its files with this token")
    # As the model's own files say it, and its chat template.
    draft.forget("(tokenizer_type|tokenizer_use_fast|eot_tokens|loss_watchdog_patience)$")


def _put_data(draft: Draft) -> None:
    streamed, jinja = draft.take("pretraining_dataset", []), draft.take("chat_template_jinja")
    sources = {"train": draft.items("datasets"), "eval": draft.items("test_datasets")}
    named, inputs = draft.take("chat_template"), draft.take("train_on_inputs", False)
    for one in streamed if isinstance(streamed, list) else [streamed]:
        whole = {"path": one} if isinstance(one, str) else dict(one)
        text = {"field": whole.pop("text_column", "text")}
        sources["train"] = [*sources["train"], {**text, **whole, "type": "completion"}]
        draft.keys |= {"streaming": True, "sample_packing": draft.keys.get("sample_packing", True)}
        draft.take("pretrain_multipack_attn")
    templates: list[tuple[Any, bool]] = []
    for place, ones in sources.items():
        named_ones = [(f"datasets[{at}]", one) for at, one in enumerate(ones)]
        draft.put_sources(place, [_source(draft, *each, templates) for each in named_ones])
    chosen = {(str(one or named or (jinja and "jinja")), drops) for one, drops in templates}
    if len(chosen) > 1:
        names = sorted({name for name, _ in chosen})
        draft.block("datasets: chat_template", names, "data.chat_template: one for all")
    elif chosen:
        name, drops = chosen.pop()
        _put_template(draft, jinja if name == "jinja" else name if name != "None" else None)
        if drops:
            _drop_system(draft)
    draft.put("data.loss_on", "all" if inputs else "answer", given("train_on_inputs", inputs))
    trainer.put_share(draft, "val_set_size")
    long = draft.take("excess_length_strategy", "drop")
    if long not in ("drop", "truncate"):
        draft.block("excess_length_strategy", long, "data.too_long: drop, and `anygauge data`")
        long = "drop"
    draft.put("data.too_long", long, f"excess_length: {long}")


def _put_template(draft: Draft, name: Any) -> None:
    """A chat template: ours, Axolotl's file where it is on this machine, or the tokenizer's own."""
    model, key = str(draft.at("model.name")).lower(), given("chat_template", name)
    if name in (None, "tokenizer_default") or name in TEMPLATES:
        draft.put("data.chat_template", TEMPLATES.get(name), key)
    elif "{" in name or name.endswith(".jinja"):
        draft.put("data.chat_template", name, key)
    elif (file := _template_file(draft, name)) is not None:
        draft.put("data.chat_template", os.path.relpath(file), key)
    elif name in FAMILIES and re.search(FAMILIES[name], model):
        draft.change(f"{key} is Axolotl's copy; here the tokenizer's own is used")
    else:
        where = f"Axolotl's chat_templates/templates/{name}.jinja"
        draft.block("chat_template", name, f"data.chat_template: {where}; import finds it where "
                    "Axolotl is installed, or in a tree above this file")  # fmt: skip


def _drop_system(draft: Draft) -> None:
    """Have the chat template leave a first turn of the system out, which some refuse."""
    chosen, origin = str(draft.at("data.chat_template") or ""), "drop_system_message: true"
    file = FOLDER / f"{chosen}.jinja" if chosen in NAMED_TEMPLATES else draft.home / chosen
    if "{" in chosen or file.is_file():
        text = chosen if "{" in chosen else read_bounded(file, MOST_BYTES).decode()
        draft.put("data.chat_template", DROPS_SYSTEM + text, origin)
        draft.change("data.chat_template leaves a first system turn out, for `generate` too")
    else:
        draft.block("datasets: drop_system_message", True, "data.chat_template: a file, without it")


def _template_file(draft: Draft, name: str) -> Path | None:
    spec, place = find_spec("axolotl"), f"axolotl/utils/chat_templates/templates/{name}.jinja"
    homes = [Path(one).parent for one in (spec and spec.submodule_search_locations) or ()]
    homes += [folder / "src" for folder in draft.file.absolute().parents]
    return next((home / place for home in homes if (home / place).is_file()), None)


def _source(draft: Draft, place: str, one: Any, templates: list[Any]) -> dict[str, Leaf]:
    """One entry of `datasets` as a source."""
    if not isinstance(one, dict) or not isinstance(one.get("path"), str):
        raise draft.error(place, one, "a mapping with a 'path'")
    left = {k: value for k, value in one.items() if value not in BLANK and k not in SOURCE_IDLE}
    name, files = left.pop("path"), as_list(left.pop("data_files", []))
    kind = left.pop("type", "completion" if "field" in left else None)
    if isinstance(kind, dict) and draft.at("objective"):
        left |= {k: v for k, v in kind.items() if v not in BLANK}
        kind = None
    if len(files) > 1:
        draft.block(f"{place}.data_files", files, "one source for each file")
    path = f"hf://datasets/{name}/{files[0]}" if files else draft.path(name)
    found = {"path": Leaf(path, given("path", name))}
    for key in SOURCE.keys() & left.keys():
        found[SOURCE[key]] = Leaf(left[key], given(key, left.pop(key)))
    origin, pairs = given("type", kind), CHATS.get(draft.at("objective"))
    if pairs and kind is None:
        found |= _pairs(draft, left, "rows of texts", place)
    elif kind in (pairs or ("chat_template", "chat_template.default")):
        own, named = left.pop("chat_template_jinja", None), left.pop("chat_template", None)
        templates.append((own or named, bool(left.pop("drop_system_message", False))))
        found |= (_pairs if pairs else _turns)(draft, left, origin, place)
    elif not pairs and kind in ("completion", "pretrain"):
        found |= {"format": Leaf("text", origin), "text": Leaf(left.pop("field", "text"), "field")}
    elif not pairs and kind in ("alpaca", None):
        found["format"] = Leaf("alpaca" if kind else "tokens", origin)
    else:
        found["format"] = Leaf("auto", origin)
        usable = pairs or ["alpaca, chat_template or completion"]
        draft.block(f"{place}.type", kind, ", ".join(usable))
    for key, value in left.items():
        if value is not False:
            draft.block(f"{place}.{key}", value, "a source: docs/run-file.md#datatrain")
    return found


def _pairs(draft: Draft, left: dict[str, Any], origin: str, place: str) -> dict[str, Leaf]:
    """The format of pairs: of turns, where a type is named, or of texts."""
    found, column = {"format": Leaf("preference", origin)}, left.get("field_messages", "messages")
    _turns(draft, left, origin, place)  # which checks roles and the keys of a turn
    if "chat_template" in origin:
        if "argilla" not in origin:
            found["prompt"] = Leaf(column, given("field_messages", column))
        draft.change("pairs: a prompt and answers of text are turns there, and go through "
                     "data.train.template here; TRL adds the tokenizer's start and end to what the "
                     "chat template wrote, here the template writes both")  # fmt: skip
    elif "{system}" not in str(left.get("prompt_format")):
        found["template"] = Leaf(left.pop("prompt_format", "{prompt}"), "prompt_format")
    return found


def _turns(draft: Draft, left: dict[str, Any], origin: str, place: str) -> dict[str, Leaf]:
    """The format and the column of chats."""
    names = {"role": left.pop("message_field_role", "role"),
             "content": left.pop("message_field_content", "content"),
             **left.pop("message_property_mappings", {})}  # fmt: skip
    column, roles = left.pop("field_messages", "messages"), left.pop("roles", {})
    expected = {"roles_to_train": ["assistant"], "train_on_eos": "turn", "train_on_eot": "turn"}
    for key, usual in expected.items():
        if (value := left.pop(key, usual)) != usual:
            nearest = "data.loss_on: answers with the ends of their turns"
            draft.block(f"{place}.{key}", value, nearest)
    if any(not {*theirs} <= ROLES.get(role, set()) for role, theirs in roles.items()):
        draft.block(f"{place}.roles", roles, "docs/data.md#chats has the roles")
    sharegpt = names == {"role": "from", "content": "value"}
    if not sharegpt and names != {"role": "role", "content": "content"}:
        nearest = "docs/data.md#chats has the keys of a turn"
        draft.block(f"{place}.message_property_mappings", names, nearest)
    # ShareGPT's format also takes turns with role and content, whatever their roles are called.
    form, usual = "sharegpt", "conversations"
    if not sharegpt and column not in ("conversations", "conversation"):
        form, usual = "messages", "messages"
    found = {"format": Leaf(form, f"{origin}, message_property_mappings" if sharegpt else origin)}
    if column != usual or form == "sharegpt":
        found[usual] = Leaf(column, given("field_messages", column))
    return found


def _put_rest(draft: Draft) -> None:
    """Keys whose value decides whether they mean something."""
    for plugin in draft.items("plugins"):
        name = str(plugin).rpartition(".")[2]
        if name in (*SPEED_PLUGINS, "SwanLabPlugin"):
            draft.skip("plugins", name, "speed" if name in SPEED_PLUGINS else "logging")
        else:
            draft.block("plugins", plugin, "a loop of your own: examples/own_loop.py")
    kept = draft.take("gradient_checkpointing", False)
    draft.put("train.gradient_checkpointing", bool(kept), given("gradient_checkpointing", kept))
    if isinstance(kept, str):
        draft.put("train.activation_offloading", True, given("gradient_checkpointing", kept))
    if re.search("ForCausalLM$|LMHeadModel$", str(draft.keys.get("model_type"))):
        draft.take("model_type")
    settings = draft.mapping("model_config")
    if settings.pop("output_router_logits", False):
        draft.put("train.router_aux_loss_coef", 0.001, "model_config: output_router_logits")
        draft.change("train.router_aux_loss_coef: there it is the model's own; compare its config")
    if settings:
        draft.block("model_config", settings, "the model's own configuration")
    method = draft.take("model_quantization_config")
    if not draft.mapping("model_quantization_config_kwargs").get("dequantize") and method:
        draft.block("model_quantization_config", method, "model.quantize")
    project, board = draft.take("wandb_project"), draft.take("use_tensorboard")
    if project is not None and draft.take("use_wandb", True):
        draft.note("tracker_options.wandb.project", project, "wandb_project")
    trackers = ["wandb"] * (draft.at("tracker_options") is not None) + ["tensorboard"] * bool(board)
    draft.put("trackers", trackers or None, "wandb_project, use_tensorboard")
