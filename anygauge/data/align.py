"""Text whose loss is on some stretches, to tokens and their loss mask.

A text is tokenised as a whole. Where a token would stand on both sides of a stretch's border, the
text is cut at the borders and tokenised in pieces instead: so the mask is that of the characters,
and an answer's tokens are those that follow a prompt tokenised by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anygauge.data.template import Span

Tokens = tuple[NDArray[np.int32], NDArray[np.bool_]]


class Aligner:
    """Tokenises texts with stretches.

    Args:
        tokenizer: a tokenizer of the transformers library with offsets (a fast one).
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._added = np.asarray(sorted(tokenizer.added_tokens_decoder), dtype=np.int64)
        line_end, both = self._ids("\n"), self._ids("\nb")
        # SentencePiece puts a space before a text, so before a piece too unless something precedes.
        self._line_end = None if both == line_end + self._ids("b") else line_end

    def align(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Tokens]:
        """Tokens of each text, and their loss mask.

        Args:
            spans: for each text the stretches to learn: sorted, apart, in characters.
        """
        if not texts:
            return []
        # verbose=False: long texts are cut later, so the tokenizer's warning would mislead.
        encoding = self.tokenizer(
            list(texts), add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        result: list[Tokens] = []
        for text, stretches, ids, offsets in zip(
            texts, spans, encoding["input_ids"], encoding["offset_mapping"], strict=True
        ):
            loss_mask = self._loss_mask(ids, offsets, stretches)
            if loss_mask is None:
                result.append(self._in_pieces(text, stretches))
            else:
                result.append((np.asarray(ids, dtype=np.int32), loss_mask))
        return result

    def _loss_mask(
        self, ids: list[int], offsets: list[tuple[int, int]], spans: Sequence[Span]
    ) -> NDArray[np.bool_] | None:
        loss_mask = np.zeros(len(ids), dtype=np.bool_)
        if not ids:
            return loss_mask
        given = np.asarray(offsets, dtype=np.int64)
        # Offsets may leave out white space that a token begins with: it begins where the one before
        # ends, but not behind its own start, as several tokens may share one character.
        ends = np.maximum.accumulate(given[:, 1])
        starts = np.minimum(given[:, 0], np.concatenate(([0], ends[:-1])))
        added = np.isin(np.asarray(ids), self._added)
        for first, last in spans:
            touches = (starts < last) & (ends > first)
            inside = touches & (starts >= first) & (ends <= last)
            # An added token may swallow white space around it; it belongs to where it begins.
            inside |= touches & added & (starts >= first)
            if np.any(touches & ~inside & ~added):
                return None
            loss_mask |= inside
        return loss_mask

    def _in_pieces(self, text: str, spans: Sequence[Span]) -> Tokens:
        ids: list[int] = []
        loss_mask: list[bool] = []
        at = 0
        for first, last in spans:
            for start, end, counts in ((at, first, False), (first, last, True)):
                piece = self._piece(text[start:end], is_first=start == 0)
                ids += piece
                loss_mask += [counts] * len(piece)
            at = last
        piece = self._piece(text[at:], is_first=at == 0)
        ids += piece
        loss_mask += [False] * len(piece)
        return np.asarray(ids, dtype=np.int32), np.asarray(loss_mask, dtype=np.bool_)

    def _piece(self, text: str, *, is_first: bool) -> list[int]:
        if not text:
            return []
        if self._line_end is not None and not is_first:
            ids = self._ids("\n" + text)
            if ids[: len(self._line_end)] == self._line_end:
                return ids[len(self._line_end) :]
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
