"""What stands beside a result's weights: the base's own files, changed where training changed them.

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
from anygauge.interface import ModelError
from anygauge.models.hub import CONFIG, GENERATION_CONFIG, TOKENIZER_FILES
from anygauge.models.source import load_config, local_folder
from anygauge.models.tokenizer import read_tokenizer, special_tokens, tokenizer_source
from anygauge.models.vocabulary import add_tokens, token_names
from anygauge.util.files import read_text, write_text

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
OTHER_TEMPLATES = ("chat_template.json", "additional_chat_templates/*")
MOST_BYTES = 2**28
"""Of a JSON file that is read here; the largest tokenizers have some 3e7."""


class ResultFiles:
    """Tokenizer, template, generation config and, for a whole model, its configuration.

    Args:
        section: the base.
        tokenizer: of the run, with the tokens that the section adds.
        chat_template: takes the place of the tokenizer's own.
        end_ids: end an answer, in addition to the base's own and the tokenizer's end tokens.
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
        base = None if section.name is None else local_folder(section)
        fields: dict[str, Any] = {}
        for folder in (adapter, base):
            if folder is not None:
                fields = fields or read_fields(folder / GENERATION_CONFIG)
        fields = fields or _usual_generation(section)
        # The library would replace what is here by the values of config.json.
        fields.pop("_from_model_config", None)
        ends = fields.get("eos_token_id")
        known = [] if ends is None else ends if isinstance(ends, list) else [ends]
        every = list(dict.fromkeys([*known, tokenizer.eos_token_id, *end_ids]))
        fields["eos_token_id"] = every if len(every) > 1 else every[0]
        self._generation = fields

    def write(self, folder: Path, config: Any = None, dtype: Any = None) -> None:
        """Write them into the folder of the weights.

        Args:
            config: of a whole model, as it was trained or merged; None beside an adapter.
            dtype: torch's, of a whole model's weights.

        Raises:
            OSError: a file cannot be copied or written.
        """
        self._write_tokenizer(folder, alone=config is None or self._section.tokenizer is not None)
        _write_json(folder / GENERATION_CONFIG, self._generation)
        if config is not None:
            self._write_config(folder, config, str(dtype).removeprefix("torch."))

    def _write_config(self, folder: Path, config: Any, dtype: str) -> None:
        source, before = folder, config
        if self._section.name is None:
            config.save_pretrained(folder)
        else:
            source, before = local_folder(self._section), load_config(self._section)
        fields = read_fields(source / CONFIG)
        if "auto_map" in fields:
            _copy(source, folder, ("*.py",))
        fields.pop("quantization_config", None)  # what is saved is plain numbers
        if not fields.get("architectures"):
            fields["architectures"] = [_architecture(config)]
        if not {"dtype", "torch_dtype"} & fields.keys():
            fields["torch_dtype"] = dtype  # the name that every version reads
        parts = [(fields, config, before)]
        text = config.get_text_config()
        for key, value in vars(config).items():
            if value is text and isinstance(fields.get(key), dict):
                parts.append((fields[key], text, before.get_text_config()))
        for part, now, then in parts:
            part.update({key: dtype for key in ("dtype", "torch_dtype") if key in part})
            for key in ("vocab_size", "tie_word_embeddings"):
                if getattr(now, key, None) != getattr(then, key, None):
                    part[key] = getattr(now, key)
        _write_json(folder / CONFIG, fields)

    def _write_tokenizer(self, folder: Path, *, alone: bool) -> None:
        """Args:
        alone: it is not beside the ``config.json`` from which the library takes its class.
        """
        source = tokenizer_source(self._section)
        if source.is_file():
            shutil.copyfile(source, folder / "tokenizer.json")
            fields: dict[str, Any] = dict(special_tokens(source))
        else:
            _copy(source, folder, TOKENIZER_FILES)
            fields = read_fields(source / TOKENIZER_CONFIG)
        before = dict(fields)
        if any(token_names(self._section)):
            fields = self._with_new_tokens(folder, fields)
        if self._chat_template is not None:
            fields.pop("chat_template", None)
            for path in (path for pattern in OTHER_TEMPLATES for path in folder.glob(pattern)):
                path.unlink()
            write_text(folder / TEMPLATE, self._chat_template)
        if "auto_map" in fields:
            _copy(source, folder, ("*.py",))
        elif alone:
            # What transformers 5 calls TokenizersBackend; it also reads the older name.
            name = {"TokenizersBackend": "PreTrainedTokenizerFast"}
            loaded, named = type(self._tokenizer).__name__, str(fields.get("tokenizer_class"))
            if loaded.removesuffix("Fast") != named.removesuffix("Fast"):
                fields["tokenizer_class"] = name.get(loaded, loaded)
        if fields != before:
            _write_json(folder / TOKENIZER_CONFIG, fields)

    def _with_new_tokens(self, folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
        file = folder / "tokenizer.json"
        if not file.is_file():  # what the library makes it of has no place for them
            tokenizer = read_tokenizer(self._section)
            add_tokens(tokenizer, self._section)
            tokenizer.save_pretrained(folder)
            return read_fields(folder / TOKENIZER_CONFIG)
        names = [name for listed in token_names(self._section) for name in listed]
        known = self._tokenizer.added_tokens_decoder
        kinds = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
        added = {
            number: {kind: getattr(known[number], kind) for kind in kinds}
            for number in self._tokenizer.convert_tokens_to_ids(names)
        }
        stored = read_fields(file)
        stored["added_tokens"] += [{"id": number, **token} for number, token in added.items()]
        _write_json(file, stored)
        if "added_tokens_decoder" in fields:
            listed = {str(number): token for number, token in added.items()}
            return {**fields, "added_tokens_decoder": fields["added_tokens_decoder"] | listed}
        return fields


def _usual_generation(section: ModelSection) -> dict[str, Any]:
    """What the library makes of a configuration without a generation config beside it."""
    from transformers import GenerationConfig

    fields = GenerationConfig.from_model_config(load_config(section)).to_diff_dict()
    if section.config is not None:
        # An architecture's default numbers of these tokens are not about this tokenizer.
        for role in {"bos_token_id", "eos_token_id", "pad_token_id"} - section.config.keys():
            fields.pop(role, None)
    return dict(fields)


def _architecture(config: Any) -> str:
    """The class of a causal language model."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.auto_factory import _get_model_class

    if code := (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM"):
        return str(code).rpartition(".")[2]
    return str(_get_model_class(config, AutoModelForCausalLM._model_mapping).__name__)


def read_fields(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file.

    Raises:
        ModelError: it cannot be read, or holds something else.
    """
    try:
        found = json.loads(read_text(path, MOST_BYTES))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, not an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from None
    return found


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    write_text(path, json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


def _copy(source: Path, folder: Path, patterns: Sequence[str]) -> None:
    for path in (path for pattern in patterns for path in source.glob(pattern)):
        there = folder / path.relative_to(source)
        there.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, there)
