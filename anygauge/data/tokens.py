"""Rows to token numbers, and which of them are learned.

Prompt and answer are tokenised apart and then joined: so training sees exactly the tokens that
generation reads, and the boundary of the loss is the boundary of the strings. Tokens of the first
position are never learned: nothing stands before them that could predict them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from anygauge.data.sources import Row
from anygauge.interface import DataError, ModelError, RunFileError

_CHUNK = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What became of the rows.

    Attributes:
        rows: rows given.
        used: rows of which something is trained on.
        sequences: what they became; more than `used` where long texts were cut in pieces.
        dropped_empty: rows left out because they hold nothing to learn.
        dropped_long: rows left out because no answer fits beside the prompt, or because rows
            beyond the maximum length are to be dropped.
        truncated: rows whose answer lost its end.
        tokens: tokens of all sequences.
        supervised_tokens: those that are learned.
    """

    rows: int
    used: int
    sequences: int
    dropped_empty: int
    dropped_long: int
    truncated: int
    tokens: int
    supervised_tokens: int

    def __str__(self) -> str:
        parts = [f"{self.used} of {self.rows} rows"]
        if self.sequences != self.used:
            parts.append(f"{self.sequences} sequences")
        parts.append(f"{self.tokens} tokens, {self.supervised_tokens} of them learned")
        if self.dropped_empty:
            parts.append(f"{self.dropped_empty} dropped with nothing to learn")
        if self.dropped_long:
            parts.append(f"{self.dropped_long} dropped as too long")
        if self.truncated:
            parts.append(f"{self.truncated} truncated")
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenizedRows:
    """All sequences in three arrays, so that a million rows are no million objects.

    Attributes:
        ids: token numbers of all sequences, one after another; int32 of shape (tokens,).
        starts: where each begins, and the end of the last; int64 of shape (n + 1,).
        masked: leading tokens of each that are not learned, at least 1; int32 of shape (n,).
        origins: where each came from.
        report: what was dropped on the way.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    masked: NDArray[np.int32]
    origins: tuple[str, ...]
    report: Report

    def __len__(self) -> int:
        return len(self.masked)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence; int64 of shape (n,)."""
        return np.diff(self.starts)

    def row(self, index: int) -> NDArray[np.int32]:
        """Token numbers of one sequence; int32 of shape (length,)."""
        return self.ids[self.starts[index] : self.starts[index + 1]]

    def supervised(self, index: int) -> int:
        """Tokens of one sequence that are learned."""
        return int(self.starts[index + 1] - self.starts[index]) - int(self.masked[index])

    def fingerprint(self) -> str:
        """Hexadecimal digest of tokens and masks: tells whether two runs read the same data."""
        digest = hashlib.sha256()
        for array, dtype in ((self.ids, "<i4"), (self.starts, "<i8"), (self.masked, "<i4")):
            digest.update(array.astype(dtype).tobytes())
        return digest.hexdigest()


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens that stand for a prompt, alike in training and in generation.

    What the tokenizer puts at the start of a text (BOS, if it does) is included; what it would
    put at the end is not.

    Args:
        text: the whole prompt, template applied.
    """
    return _prefix(tokenizer) + _encode(tokenizer, [text])[0]


def tokenize_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    max_length: int,
    too_long: Literal["truncate", "drop"] = "truncate",
    loss_on: Literal["answer", "all"] = "answer",
) -> TokenizedRows:
    """Tokenise rows: start token, prompt, answer, end token.

    The end token is learned, unless it was cut off. A row whose prompt leaves no room for a token
    that is learned is dropped and counted. Plain text beyond the maximum length is never lost: it
    is cut in pieces, each starting with the last token of the one before, so that every token but
    the first is learned exactly once; `too_long` does not apply to it.

    Args:
        tokenizer: a tokenizer of the transformers library.
        max_length: most tokens of a sequence, at least 2.
        too_long: what becomes of prompt-and-answer rows beyond it.
        loss_on: learn the answer's tokens, or the prompt's as well.

    Raises:
        DataError: no row is left.
        ModelError: the tokenizer has no end token.
        RunFileError: max_length is below 2.
    """
    if max_length < 2:
        raise RunFileError(
            f"data.max_length is {max_length}; at least 2 is needed, since the first token "
            "of a sequence is never learned"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "the tokenizer has no end-of-sequence token, so the model could not learn where an "
            "answer ends; set eos_token in its tokenizer_config.json, or give another tokenizer"
        )
    build = _Builder(max_length=max_length, too_long=too_long, loss_on=loss_on)
    prefix, end = _prefix(tokenizer), [int(tokenizer.eos_token_id)]
    for chunk in _chunks(rows):
        answers = _encode(tokenizer, [row.text for row in chunk])
        prompts = _encode(tokenizer, [row.prompt or "" for row in chunk])
        for row, prompt, answer in zip(chunk, prompts, answers, strict=True):
            if not row.text.strip():
                build.dropped_empty += 1
            elif row.prompt is None:
                build.add_text(prefix + answer + end, row.origin)
            else:
                build.add_answer(prefix + prompt, answer + end, row.origin)
    if not build.origins:
        raise _nothing_left(rows, build)
    return build.finish(len(rows))


class _Builder:
    """Collects sequences and counts."""

    def __init__(self, *, max_length: int, too_long: str, loss_on: str) -> None:
        self.max_length, self.too_long, self.loss_on = max_length, too_long, loss_on
        self.parts: list[NDArray[np.int32]] = []
        self.masked: list[int] = []
        self.origins: list[str] = []
        self.used = self.dropped_empty = self.dropped_long = self.truncated = 0

    def add_answer(self, prompt: list[int], answer: list[int], origin: str) -> None:
        ids = prompt + answer
        masked = max(1, len(prompt)) if self.loss_on == "answer" else 1
        if masked >= self.max_length or (len(ids) > self.max_length and self.too_long == "drop"):
            self.dropped_long += 1
        elif masked >= len(ids):
            self.dropped_empty += 1
        else:
            self.truncated += len(ids) > self.max_length
            self.used += 1
            self._append(ids[: self.max_length], masked, origin)

    def add_text(self, ids: list[int], origin: str) -> None:
        if len(ids) < 2:
            self.dropped_empty += 1
            return
        self.used += 1
        starts = range(0, len(ids) - 1, self.max_length - 1)
        for number, start in enumerate(starts, start=1):
            where = origin if len(starts) == 1 else f"{origin} (part {number})"
            self._append(ids[start : start + self.max_length], 1, where)

    def _append(self, ids: list[int], masked: int, origin: str) -> None:
        self.parts.append(np.asarray(ids, dtype=np.int32))
        self.masked.append(masked)
        self.origins.append(origin)

    def finish(self, rows: int) -> TokenizedRows:
        ids = np.concatenate(self.parts)
        starts = np.zeros(len(self.parts) + 1, dtype=np.int64)
        np.cumsum([len(part) for part in self.parts], out=starts[1:])
        report = Report(
            rows=rows,
            used=self.used,
            sequences=len(self.parts),
            dropped_empty=self.dropped_empty,
            dropped_long=self.dropped_long,
            truncated=self.truncated,
            tokens=len(ids),
            supervised_tokens=len(ids) - sum(self.masked),
        )
        return TokenizedRows(
            ids=ids,
            starts=starts,
            masked=np.asarray(self.masked, dtype=np.int32),
            origins=tuple(self.origins),
            report=report,
        )


def _nothing_left(rows: Sequence[Row], build: _Builder) -> DataError:
    if not rows:
        return DataError("there are no rows to tokenise")
    causes = []
    if build.dropped_long:
        causes.append(
            f"{build.dropped_long} too long for data.max_length {build.max_length} "
            "(raise it, or shorten the prompts)"
        )
    if build.dropped_empty:
        causes.append(f"{build.dropped_empty} without an answer (is it the right column?)")
    return DataError(
        f"none of the {len(rows)} rows is left to use: {'; '.join(causes)}; "
        f"the first is {rows[0].origin}"
    )


def _chunks(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), _CHUNK):
        yield rows[start : start + _CHUNK]


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    # verbose=False: long texts are cut here, so the tokenizer's warning would mislead.
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def _prefix(tokenizer: Any) -> list[int]:
    """What the tokenizer itself puts before a text; told by trying, as no property says it."""
    probe = "a"
    bare = tokenizer(probe, add_special_tokens=False)["input_ids"]
    full = tokenizer(probe)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start])
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and full[:1] == [bos] else []
