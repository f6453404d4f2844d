"""The tokenizer: from the model's folder, a hub name or a bare ``tokenizer.json``; new tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from anygauge.config.schema import ModelSection
from anygauge.interface import ModelError
from anygauge.models.hub import names_hub, needed_copy
from anygauge.models.model_files import check_folder, read_fields
from anygauge.models.source import local_folder
from anygauge.util.text import first_line


def load_tokenizer(section: ModelSection) -> Any:
    """The run's tokenizer, with a pad token and the run's new tokens.

    Where it has none, the end-of-text token pads: padded positions are masked and have no loss.

    Raises:
        ModelError: there is no usable tokenizer, or a new token is none.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    origin = section.tokenizer or section.name
    assert origin is not None
    try:
        if origin.endswith(".json") and Path(origin).is_file():
            tokenizer: Any = PreTrainedTokenizerFast(
                tokenizer_file=origin, **special_tokens(Path(origin))
            )
        else:
            folder = tokenizer_source(section)
            if folder.is_dir():
                check_folder(folder)
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=section.trust_remote_code
            )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"model.tokenizer: no tokenizer could be loaded from {origin!r}: "
            f"{first_line(error)}. Give a folder with tokenizer files, a tokenizer.json, "
            "or a hub name"
        ) from error
    add_tokens(tokenizer, section)
    if (end := section.eos_token) is not None:
        if end not in tokenizer.get_vocab():
            raise ModelError(
                f"model.eos_token: {end!r} is not a token of {origin!r}; list it in "
                "model.new_special_tokens as well, or name another"
            )
        tokenizer.eos_token = end
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"model.tokenizer: {origin!r} has no end-of-text token, so answers would never end; "
            "name one of its tokens in model.eos_token"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def tokenizer_source(section: ModelSection) -> Path:
    """Return the tokenizer's folder as it is named, or this machine's copy of the hub's."""
    if section.tokenizer is None:
        return local_folder(section)
    if names_hub(section.tokenizer):
        # A revision of the model's repository means nothing in another one.
        return needed_copy("model.tokenizer", section.tokenizer, None)
    return Path(section.tokenizer)


def check_vocabulary(config: Any, tokenizer: Any) -> None:
    """Refuse a tokenizer whose tokens the model has no embedding for.

    Raises:
        ModelError: names both sizes.
    """
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    if vocabulary is not None and len(tokenizer) > vocabulary:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens, the model only {vocabulary} rows in its "
            "embedding; set model.tokenizer (or --tokenizer) to the model's own"
        )


ROLES = {
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>"),
    "eos_token": ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>"),
    "pad_token": ("<pad>", "<|pad|>", "[PAD]"),
    "unk_token": ("<unk>", "[UNK]"),
}
"""A bare tokenizer.json does not say which special token plays which role; customary names do."""


def special_tokens(file: Path) -> dict[str, str]:
    """The tokens of a bare tokenizer.json that play a role, by role."""
    added = {t["content"] for t in read_fields(file).get("added_tokens", [])}
    found = {role: next(filter(added.__contains__, names), None) for role, names in ROLES.items()}
    return {role: name for role, name in found.items() if name is not None}


def token_names(section: ModelSection) -> tuple[list[str], list[str]]:
    """The tokens that a section adds: plain ones and special ones.

    Raises:
        ModelError: a file cannot be read.
    """
    plain = _read_list(section.new_tokens, "model.new_tokens")
    return plain, _read_list(section.new_special_tokens, "model.new_special_tokens")


def _read_list(given: str | list[str], field: str) -> list[str]:
    if not isinstance(given, str):
        return given
    try:
        return Path(given).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{field}: {given} cannot be read as lines of text: {error}") from None


def add_tokens(tokenizer: Any, section: ModelSection) -> None:
    """Give a tokenizer the tokens that a section adds; special ones last.

    Raises:
        ModelError: one is empty, listed twice or there already.
    """
    plain, special = token_names(section)
    known = tokenizer.get_vocab()
    for name, times in Counter([*plain, *special]).items():
        wrong = (
            f"already token {known[name]} of the tokenizer"
            if name in known
            else "listed twice"
            if times > 1
            else "empty"
            if not name.strip()
            else ""
        )
        if wrong:
            raise ModelError(f"model.new_tokens: {name!r} is {wrong}; remove it from the list")
    tokenizer.add_tokens(plain)
    tokenizer.add_tokens(special, special_tokens=True)
