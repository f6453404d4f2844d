"""Writes the files beside a result's weights: the base's own, changed where training changed them.

The library's `save_pretrained` writes each of them anew, in the words of its own version. An older
one then reads other numbers from a configuration, or cannot load a tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anygauge.config.schema import ModelSection
from anygauge.models.hub import CONFIG, TOKENIZER_FILES
from anygauge.models.model_files import read_fields
from anygauge.models.source import load_config, local_folder
from anygauge.models.tokenizer import (
    add_tokens,
    special_tokens,
    token_names,
    tokenizer_source,
)
from anygauge.util.files import write_text

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
OTHER_TEMPLATES = ("chat_template.json", "additional_chat_templates/*")


class ResultFiles:
    """Tokenizer, template, generation config and, for a whole model, its configuration.

    Args:
        section: the base.
        tokenizer: of the run, with the tokens that the section adds.
        chat_template: takes the place of the tokenizer's own.
        end_ids: tokens that end an answer, in addition to those that base and tokenizer name.
        adapter: its generation config, if it has one, wins over the base's.

    Raises:
        ModelError: the generation config cannot be read.
    """

    def __init__(
        self,
        section: ModelSection,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        end_ids: Sequence[int] = (),
        adapter: Path | None = None,
    ) -> None:
        self._section = section
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        fields = {} if adapter is None else fields_in(adapter / GENERATION_CONFIG)
        if section.name is not None:
            fields = fields or fields_in(local_folder(section) / GENERATION_CONFIG)
        fields = fields or _usual_generation(section)
        # It has the library replace what is here by the values of config.json.
        fields.pop("_from_model_config", None)
        ends = fields.get("eos_token_id")
        known = [] if ends is None else ends if isinstance(ends, list) else [ends]
        every = list(dict.fromkeys([*known, tokenizer.eos_token_id, *end_ids]))
        self._generation = {**fields, "eos_token_id": every if len(every) > 1 else every[0]}

    def write(self, folder: Path, config: Any = None, dtype: Any = None) -> None:
        """Write them into the folder of the weights.

        Args:
            config: of a whole model, as it was trained or merged; None beside an adapter.
            dtype: torch's, of a whole model's weights.
        """
        self._write_tokenizer(folder, alone=config is None or self._section.tokenizer is not None)
        _write_json(folder / GENERATION_CONFIG, self._generation)
        if config is not None:
            self._write_config(folder, config, str(dtype).removeprefix("torch."))

    def _write_config(self, folder: Path, config: Any, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        source, before = folder, config
        if self._section.name is None:
            config.save_pretrained(folder)
        else:
            source, before = local_folder(self._section), load_config(self._section)
        fields = read_fields(source / CONFIG)
        if "auto_map" in fields:
            _copy(source, folder, "*.py")
        if not fields.get("architectures"):
            own = fields.get("auto_map", {}).get("AutoModelForCausalLM")
            known = AutoModelForCausalLM._model_mapping
            name = own.rsplit(".")[-1] if own else known[type(config)].__name__
            fields["architectures"] = [name]
        if not {"dtype", "torch_dtype"} & fields.keys():
            fields["torch_dtype"] = dtype  # the name that every version reads
        parts = [(fields, config, before)]
        text = config.get_text_config()
        for key, value in vars(config).items():
            if value is text and isinstance(fields.get(key), dict):
                parts.append((fields[key], text, before.get_text_config()))
        for part, now, then in parts:
            # Not true of what is saved.
            for key in ("quantization_config", "_attn_implementation", "attn_implementation"):
                part.pop(key, None)
            part.update({key: dtype for key in ("dtype", "torch_dtype") if key in part})
            for key in ("vocab_size", "tie_word_embeddings"):
                if getattr(now, key, None) != getattr(then, key, None):
                    part[key] = getattr(now, key)
        _write_json(folder / CONFIG, fields)

    def _write_tokenizer(self, folder: Path, *, alone: bool) -> None:
        """Args:
        alone: without the ``config.json`` from which the library may take its class.
        """
        source = tokenizer_source(self._section)
        if source.is_file():
            shutil.copyfile(source, folder / "tokenizer.json")
            fields: dict[str, Any] = dict(special_tokens(source))
        else:
            _copy(source, folder, *TOKENIZER_FILES)
            fields = fields_in(source / TOKENIZER_CONFIG)
        before = dict(fields)
        if any(token_names(self._section)):
            fields = self._with_new_tokens(source, folder, fields)
        if (end := self._section.eos_token) is not None:
            fields["eos_token"] = end
            if (older := folder / "special_tokens_map.json").is_file():
                _write_json(older, {**read_fields(older), "eos_token": end})
        if self._chat_template is not None:
            fields.pop("chat_template", None)
            for path in (path for pattern in OTHER_TEMPLATES for path in folder.glob(pattern)):
                path.unlink()
            write_text(folder / TEMPLATE, self._chat_template)
        if alone:
            kind = type(self._tokenizer)
            if "auto_map" not in fields and kind.__module__.startswith("transformers_modules."):
                fields["auto_map"] = read_fields(source / CONFIG)["auto_map"]
            loaded, named = kind.__name__, str(fields.get("tokenizer_class"))
            # Transformers 5 calls it the former, and reads the latter as well as older ones do.
            loaded = loaded.replace("TokenizersBackend", "PreTrainedTokenizerFast")
            if named.removesuffix("Fast") not in (loaded.removesuffix("Fast"), "TokenizersBackend"):
                fields["tokenizer_class"] = loaded
        if "auto_map" in fields:
            _copy(source, folder, "*.py")
        if fields != before:
            _write_json(folder / TOKENIZER_CONFIG, fields)

    def _with_new_tokens(
        self, source: Path, folder: Path, fields: dict[str, Any]
    ) -> dict[str, Any]:
        """The fields of ``tokenizer_config.json``; changes ``tokenizer.json``."""
        from transformers import AutoTokenizer

        file = folder / "tokenizer.json"
        if not file.is_file():  # the files that the library makes it of have no place for them
            code = self._section.trust_remote_code
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=code)
            add_tokens(tokenizer, self._section)
            tokenizer.save_pretrained(folder)
            return read_fields(folder / TOKENIZER_CONFIG)
        stored = read_fields(file)
        before = {token["content"] for token in stored["added_tokens"]}
        every = json.loads(self._tokenizer.backend_tokenizer.to_str())["added_tokens"]
        # Also what the tokenizer's class adds by itself: its numbers come before the new ones.
        added = [token for token in every if token["content"] not in before]
        _write_json(file, {**stored, "added_tokens": [*stored["added_tokens"], *added]})
        if listed := fields.get("added_tokens_decoder"):
            more = {str(token["id"]): dict(list(token.items())[1:]) for token in added}
            return {**fields, "added_tokens_decoder": listed | more}
        return fields


def fields_in(path: Path) -> dict[str, Any]:
    """See `read_fields`; empty where there is no such file."""
    return read_fields(path) if path.exists() else {}


def _usual_generation(section: ModelSection) -> dict[str, Any]:
    """What the library makes of a configuration with no generation config beside it."""
    from transformers import GenerationConfig

    fields = GenerationConfig.from_model_config(load_config(section)).to_diff_dict()
    usual = {"bos_token_id", "eos_token_id", "pad_token_id"}
    # An architecture's default numbers of these tokens are not about this tokenizer.
    unknown = set() if section.config is None else usual - section.config.keys()
    return {key: value for key, value in fields.items() if key not in unknown}


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    write_text(path, json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def _copy(source: Path, folder: Path, *patterns: str) -> None:
    for path in (path for pattern in patterns for path in source.glob(pattern) if path.is_file()):
        there = folder / path.relative_to(source)
        there.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, there)
