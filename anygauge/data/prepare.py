"""From the run file's data section to tokenised rows: read, split, tokenise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anygauge.config.schema import DataSection
from anygauge.data.order import split
from anygauge.data.sources import read_rows
from anygauge.data.tokens import Report, TokenizedRows, tokenize_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prepared:
    """Rows to train on, and rows to evaluate on where there are any."""

    train: TokenizedRows
    eval: TokenizedRows | None

    @property
    def report(self) -> Report:
        """What became of the training rows (`eval.report` has the others)."""
        return self.train.report


PEEKED_ROWS = 20


def peek(data: DataSection) -> None:
    """Read the first rows only, so that a wrong column is told before anything is started.

    Raises:
        DataError: a file or one of its first rows cannot be used.
        RunFileError: settings that do not go together.
    """
    for field, source in (("data.train", data.train), ("data.eval", data.eval)):
        if source is not None:
            limit = min(source.limit or PEEKED_ROWS, PEEKED_ROWS)
            read_rows(source.model_copy(update={"limit": limit}), field=field)


def prepare(data: DataSection, tokenizer: Any, seed: int) -> Prepared:
    """Read and tokenise all rows; `eval_fraction` holds out whole rows, never parts of one.

    Args:
        tokenizer: a tokenizer of the transformers library.
        seed: decides which rows are held out.

    Raises:
        DataError: a file or row cannot be used, or no row is left.
        RunFileError: settings that do not go together.
        ModelError: the tokenizer cannot be used.
    """

    def tokens(rows: list[Any]) -> TokenizedRows:
        return tokenize_rows(
            rows,
            tokenizer,
            max_length=data.max_length,
            too_long=data.too_long,
            loss_on=data.loss_on,
        )

    rows = read_rows(data.train, field="data.train")
    if data.eval is not None:
        held_out = read_rows(data.eval, field="data.eval")
    else:
        rows, held_out = split(rows, data.eval_fraction, seed)
    return Prepared(train=tokens(rows), eval=tokens(held_out) if held_out else None)
