"""A tokenizer with the tokens of three families of chat templates, and those templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.helpers.tiny_tokenizer import FIXTURES, make_tokenizer

SPECIAL = (
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
    "[INST]",
    "[/INST]",
)
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def make_chat_tokenizer(folder: Path | str) -> PreTrainedTokenizerFast:
    """`make_tokenizer` with the templates' tokens; it has no chat template of its own."""
    tokenizer = make_tokenizer(folder)
    tokenizer.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL], special_tokens=True
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    tokenizer.save_pretrained(folder)
    return tokenizer


def template(name: str) -> str:
    """The text of a template: headers_marked, chatml or inst."""
    return (FIXTURES / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}
