"""Sequences of tokens as text, with the stretches of loss tokens between ⟦ and ⟧."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data.encode import Counts, RowEncoder, Tokens
from anygauge.data.readers import Record
from anygauge.data.rows import batch_of, documents_of


def encoder(tokenizer: Any, form: str, source: dict[str, Any] | None = None, **data: Any) -> Any:
    """An encoder for rows of a form."""
    section = SourceSection(path="c.jsonl", format=form, **(source or {}))
    fields = {"max_length": 4096, **data}
    return RowEncoder(section, DataSection(train=section, **fields), tokenizer, field="data.train")


def encode(
    tokenizer: Any, form: str, *rows: dict[str, Any], **fields: Any
) -> tuple[list[Tokens], Counts]:
    """What rows become, each of them one line of a file."""
    records = [Record(row, f"c.jsonl:{line}") for line, row in enumerate(rows, start=1)]
    return encoded(encoder(tokenizer, form, **fields), records)


def encoded(rows: RowEncoder, records: Sequence[Record]) -> tuple[list[Tokens], Counts]:
    """The sequences of records, and what became of all of them."""
    every = rows.encode(records)
    chunk = batch_of(every, range(len(records)))
    return [one for one in every if len(one.ids)], documents_of(chunk, "{}")[1]


def stretches(tokenizer: Any, sequence: Tokens) -> list[tuple[bool, str]]:
    """The texts of neighbouring tokens that are all loss tokens, or all not."""
    pairs = zip(sequence.loss_mask.tolist(), sequence.ids.tolist(), strict=True)
    groups = groupby(pairs, key=lambda pair: pair[0])
    return [
        (has_loss, text_of(tokenizer, [token for _, token in group])) for has_loss, group in groups
    ]


def text_of(tokenizer: Any, ids: list[int]) -> str:
    """Decoded as it is: special tokens shown, spaces left alone."""
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def marked(tokenizer: Any, sequence: Tokens) -> str:
    """The whole text with its stretches of loss tokens between ⟦ and ⟧."""
    return "".join(
        f"⟦{text}⟧" if has_loss else text for has_loss, text in stretches(tokenizer, sequence)
    )


def shown(tokenizer: Any, chat_template: str, *turns: Any, tools: Any = None, **data: Any) -> str:
    """The tokens of the one sequence of a chat, as `marked` shows them."""
    row = {"messages": list(turns), "tools": tools}
    [sequence], _ = encode(tokenizer, "messages", row, chat_template=chat_template, **data)
    assert not sequence.loss_mask[0]
    return marked(tokenizer, sequence)
