"""Tokenised rows in arrays, in memory or mapped from files: a million rows, not a million objects.

An entry of the cache holds the sequences of one source; what a run trains on is several of them
side by side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anygauge.data.cache import Entry, key_of
from anygauge.data.encode import Counts, Encoded


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """One document as it is laid out in a batch.

    Attributes:
        ids: token numbers; int32 of shape (length,).
        loss_mask: True where the token's own prediction counts; bool of shape (length,).
        origin: where it stands: ``data.jsonl:17``.
    """

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """The sequences of one source.

    Attributes:
        ids: token numbers of all sequences, one after another; int32 of shape (tokens,).
        loss_mask: whether each has a loss; bool of shape (tokens,).
        starts: where each sequence begins, and the end of the last; int64 of shape (n + 1,).
        num_loss_tokens: loss tokens of each; int32 of shape (n,).
        places: line or index of the record that each came from; int64 of shape (n,).
        parts: 0, or which part of its record it is, from 1; int32 of shape (n,).
        origin: how a place is written: ``data.jsonl:{}``.
        fingerprint: hexadecimal digest of ids, loss mask and starts.
        counts: what became of the records.
        records: of the whole source, those included that another part of it has.
    """

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    starts: NDArray[np.int64]
    num_loss_tokens: NDArray[np.int32]
    places: NDArray[np.int64]
    parts: NDArray[np.int32]
    origin: str
    fingerprint: str
    counts: Counts
    records: int

    def __len__(self) -> int:
        return len(self.num_loss_tokens)


_ARRAYS: dict[str, Any] = {
    "ids": np.int32,
    "loss_mask": np.bool_,
    "starts": np.int64,
    "num_loss_tokens": np.int32,
    "places": np.int64,
    "parts": np.int32,
}


class PieceWriter:
    """Appends sequences to the files of an entry; what is written is not kept in memory."""

    def __init__(self, folder: Path) -> None:
        self._open = ExitStack()
        self._files = {
            name: self._open.enter_context((folder / name).open("wb")) for name in _ARRAYS
        }
        self._digests = {name: hashlib.sha256() for name in ("ids", "loss_mask", "starts")}
        self._tokens = 0
        self._counts = Counts()
        self._append("starts", [0])

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, encoded: Sequence[Encoded], counts: Counts, places: NDArray[np.int64]) -> None:
        """Append what a batch of records became; `places` has one number per record."""
        self._counts += counts
        if not encoded:
            return
        ends = np.cumsum([len(each.ids) for each in encoded], dtype=np.int64) + self._tokens
        self._append("ids", np.concatenate([each.ids for each in encoded]))
        self._append("loss_mask", np.concatenate([each.loss_mask for each in encoded]))
        self._append("starts", ends)
        self._append("num_loss_tokens", [int(each.loss_mask.sum()) for each in encoded])
        self._append("places", [places[each.record] for each in encoded])
        self._append("parts", [each.part for each in encoded])
        self._tokens = int(ends[-1])

    def facts(self, mark: str, records: int) -> dict[str, Any]:
        """For the entry's manifest.

        Args:
            mark: how a place is written behind the source's name.
            records: of the whole source.
        """
        digests = [digest.hexdigest() for digest in self._digests.values()]
        counts = {name: getattr(self._counts, name) for name in Counts.__dataclass_fields__}
        return {"mark": mark, "fingerprint": key_of(*digests), "counts": counts, "records": records}

    def _append(self, name: str, values: Any) -> None:
        # Native byte order: a cache belongs to one sort of machine.
        array = np.ascontiguousarray(values, dtype=_ARRAYS[name])
        self._files[name].write(array.data)
        if name in self._digests:
            self._digests[name].update(array.data)


def open_piece(entry: Entry, name: str) -> Piece:
    """The sequences that an entry holds. `name`: of the source, as origins show it."""
    counts = entry.facts["counts"]
    arrays: dict[str, Any] = {key: entry.array(key, dtype) for key, dtype in _ARRAYS.items()}
    return Piece(
        **arrays,
        origin=name.replace("{", "{{").replace("}", "}}") + entry.facts["mark"],
        fingerprint=entry.facts["fingerprint"],
        counts=Counts(**{**counts, "beyond": tuple((n, rows) for n, rows in counts["beyond"])}),
        records=entry.facts["records"],
    )


class TokenizedRows:
    """The sequences of one or more sources, numbered from 0 through all of them.

    Args:
        pieces: at least one.
        built: when the oldest of them was tokenised; None where that was just now.
    """

    def __init__(self, pieces: Sequence[Piece], built: str | None = None) -> None:
        self.pieces, self.built = tuple(pieces), built
        self.sizes = [len(piece) for piece in self.pieces]
        self._ends = np.cumsum(self.sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def report(self) -> Counts:
        """What became of the rows of all sources."""
        return sum((piece.counts for piece in self.pieces), Counts())

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence; int64 of shape (n,)."""
        return np.concatenate([np.diff(piece.starts) for piece in self.pieces])

    @cached_property
    def loss_token_counts(self) -> NDArray[np.int64]:
        """Learned tokens of each sequence; int64 of shape (n,)."""
        return np.concatenate([piece.num_loss_tokens for piece in self.pieces]).astype(np.int64)

    def tokens(self, index: int) -> Tokens:
        """One sequence with all that a batch needs of it."""
        piece, inside = self._find(index)
        here = slice(int(piece.starts[inside]), int(piece.starts[inside + 1]))
        return Tokens(piece.ids[here], piece.loss_mask[here], self.origin(index))

    def row(self, index: int) -> NDArray[np.int32]:
        """Token numbers of one sequence; int32 of shape (length,)."""
        return self.tokens(index).ids

    def loss_mask(self, index: int) -> NDArray[np.bool_]:
        """Which tokens of one sequence have a loss; bool of shape (length,)."""
        return self.tokens(index).loss_mask

    def num_loss_tokens(self, index: int) -> int:
        """Learned tokens of one sequence."""
        return int(self.loss_token_counts[index])

    def origin(self, index: int) -> str:
        """Where one sequence came from: ``data.jsonl:17`` or ``notes.txt:3 (part 2)``."""
        piece, inside = self._find(index)
        part = int(piece.parts[inside])
        return piece.origin.format(int(piece.places[inside])) + (f" (part {part})" if part else "")

    def fingerprint(self) -> str:
        """Hexadecimal digest of all tokens and their loss masks."""
        return key_of(*(piece.fingerprint for piece in self.pieces))

    def _find(self, index: int) -> tuple[Piece, int]:
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self.pieces[which], int(index - (self._ends[which] - self.sizes[which]))
