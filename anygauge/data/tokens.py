"""Texts to token numbers, alike in training and in generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_AT_ONCE = 2_000_000
"""Characters that a tokenizer is given; it takes hundreds of bytes of memory for each."""


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens that stand for a prompt, alike in training and in generation.

    What the tokenizer puts at the start of a text (BOS, if it does) is included; what it would
    put at the end is not.

    Args:
        text: the whole prompt, template applied.
    """
    return start_ids(tokenizer) + encode_texts(tokenizer, [text])[0]


def encode_texts(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """The tokens of each text, with nothing put before or behind it."""
    if not texts:
        return []
    found: list[list[int]] = []
    for part in _bounded_parts(texts):
        # verbose=False: long texts are cut later, so the tokenizer's warning would mislead.
        found += tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def _bounded_parts(texts: list[str]) -> Iterator[list[str]]:
    """The texts, as many at once as memory allows, which is one at least."""
    start = length = 0
    for end, text in enumerate(texts):
        if length and length + len(text) > _AT_ONCE:
            yield texts[start:end]
            start, length = end, 0
        length += len(text)
    yield texts[start:]


def start_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer itself puts before a text; told by trying, as no property says it."""
    probe = "a"
    bare = tokenizer(probe, add_special_tokens=False)["input_ids"]
    full = tokenizer(probe)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start])
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and full[:1] == [bos] else []
