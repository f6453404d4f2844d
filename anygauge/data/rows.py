"""Tokenised rows: an Arrow table on the disk, written once and mapped by all that read it.

The table of a source has a row for each sequence, and one for each record that became none, so that
what became of the records of a part, such as those held out, can be counted from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anygauge.data.cache import Entry, key_of
from anygauge.data.encode import Counts, Encoded

TABLE = "rows.arrow"
NAMED_BAD = 5
"""Bad rows that are named where they are skipped."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedChunk:
    """What neighbouring records of a source became.

    Attributes:
        records: how many there were.
        batch: an Arrow record batch, a row a sequence; see `batch_of`.
        bad: what is wrong with records that were skipped.
    """

    records: int
    batch: Any
    bad: Sequence[str] = ()


def batch_of(encoded: Sequence[Encoded], places: Sequence[int]) -> Any:
    """Sequences as an Arrow record batch.

    Args:
        places: line or index of each record.
    """
    import pyarrow as pa

    ends = np.cumsum([0, *(len(each.ids) for each in encoded)], dtype=np.int32)

    def joined(name: str, dtype: Any) -> Any:
        parts = [np.empty(0, dtype=dtype), *(getattr(each, name) for each in encoded)]
        return pa.array(np.concatenate(parts).view(np.int8 if dtype is np.bool_ else dtype))

    def column(values: Iterable[Any], dtype: Any) -> Any:
        return pa.array(np.fromiter(values, dtype, len(encoded)))

    return pa.RecordBatch.from_pydict(
        {
            "ids": pa.ListArray.from_arrays(ends, joined("ids", np.int32)),
            "loss_mask": pa.ListArray.from_arrays(ends, joined("loss_mask", np.bool_)),
            "num_loss_tokens": column((int(each.loss_mask.sum()) for each in encoded), np.int32),
            "record": column((each.record for each in encoded), np.int64),
            "place": column((places[each.record] for each in encoded), np.int64),
            "part": column((each.part for each in encoded), np.int32),
            "fate": column((each.fate for each in encoded), np.int8),
            "length": column((each.length for each in encoded), np.int32),
        }
    )


def write_table(folder: Path, chunks: Iterable[EncodedChunk]) -> dict[str, Any]:
    """Write what the records of a source became, chunk by chunk; returns facts for the entry."""
    import pyarrow as pa

    records, bad = 0, list[str]()
    digest, writer = hashlib.sha256(), None
    try:
        for chunk in chunks:
            if writer is None:
                writer = pa.ipc.new_file(str(folder / TABLE), chunk.batch.schema)
            at = chunk.batch.schema.get_field_index("record")
            numbered = pa.array(chunk.batch.column(at).to_numpy() + records)
            writer.write_batch(chunk.batch.set_column(at, "record", numbered))
            for name in ("ids", "loss_mask"):
                column = chunk.batch.column(name)
                digest.update(column.offsets.to_numpy().tobytes())
                digest.update(column.values.to_numpy().tobytes())
            records += chunk.records
            bad += chunk.bad[: NAMED_BAD - len(bad)]
    finally:
        if writer is not None:
            writer.close()
    return {"fingerprint": digest.hexdigest(), "records": records, "bad": bad}


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """The sequences of one source, or of a part of it.

    Attributes:
        table: batches of an Arrow file, mapped; see `batch_of`.
        rows: the numbers of the sequences in it; int64 of shape (n,).
        origin: how a place is written: ``data.jsonl:{}``.
        fingerprint: hexadecimal digest of all that the sequences hold.
        counts: what became of the records.
        records: of the whole source, those included that another part of it has.
        bad: what is wrong with the first of the records that were skipped.
    """

    table: Sequence[Any]
    rows: NDArray[np.int64]
    origin: str
    counts: Counts
    fingerprint: str = ""
    records: int = 0
    bad: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence; int64 of shape (n,)."""
        return _lengths(self.table)[self.rows]

    @cached_property
    def num_loss_tokens(self) -> NDArray[np.int64]:
        """Loss tokens of each sequence; int64 of shape (n,)."""
        return _column(self.table, "num_loss_tokens").astype(np.int64)[self.rows]

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum([batch.num_rows for batch in self.table])

    @cached_property
    def _views(self) -> Sequence[dict[str, NDArray[Any]]]:
        """Of each batch, its columns as arrays that are not copied."""
        return [
            {
                "starts": batch.column("ids").offsets.to_numpy(),
                "ids": batch.column("ids").values.to_numpy(),
                "loss_mask": batch.column("loss_mask").values.to_numpy().view(np.bool_),
                "place": batch.column("place").to_numpy(),
                "part": batch.column("part").to_numpy(),
            }
            for batch in self.table
        ]

    def _find(self, index: int) -> tuple[dict[str, NDArray[Any]], int]:
        row = int(self.rows[index])
        number = int(np.searchsorted(self._ends, row, side="right"))
        return self._views[number], row - int(self._ends[number]) + self.table[number].num_rows

    def origin_of(self, index: int) -> str:
        """Where one sequence came from: ``data.jsonl:17`` or ``notes.txt:3 (part 2)``."""
        view, row = self._find(index)
        part = int(view["part"][row])
        return self.origin.format(int(view["place"][row])) + (f" (part {part})" if part else "")

    def tokens(self, index: int) -> Tokens:
        """One sequence."""
        view, row = self._find(index)
        here = slice(int(view["starts"][row]), int(view["starts"][row + 1]))
        return Tokens(view["ids"][here], view["loss_mask"][here], self.origin_of(index))


def open_piece(
    entry: Entry, origin: str, part: Any = None, members: NDArray[np.int64] | None = None
) -> Piece:
    """The sequences that an entry holds, or a part of them.

    Args:
        origin: how a place is written: ``data.jsonl:{}``.
        part: what tells the part from others (JSON); None for all.
        members: of the part: the numbers of its records; int64, rising.
    """
    import pyarrow as pa

    file = pa.ipc.open_file(pa.memory_map(str(entry.folder / TABLE)))
    table = [file.get_batch(number) for number in range(file.num_record_batches)]
    facts = entry.facts
    piece = _piece(table, origin, members)
    return replace(
        piece,
        fingerprint=key_of(facts["fingerprint"], part),
        records=facts["records"],
        bad=facts["bad"] if piece.counts.skipped else (),
    )


def _piece(table: Sequence[Any], origin: str, members: NDArray[np.int64] | None = None) -> Piece:
    lengths = _lengths(table)
    inside = np.ones(len(lengths), dtype=np.bool_)
    if members is not None:
        inside = np.isin(_column(table, "record"), members)
    counted = ("fate", "part", "length", "num_loss_tokens")
    fates, parts, whole, loss_tokens = (_column(table, name)[inside] for name in counted)
    return Piece(
        table=table,
        rows=np.flatnonzero(inside & (lengths > 0)),
        origin=origin,
        counts=Counts.of(fates, parts, whole, lengths[inside], loss_tokens),
    )


def documents_of(chunk: EncodedChunk, origin: str) -> tuple[list[list[Tokens]], Counts]:
    """What each record of a chunk became: no sequence, one, or several; and their counts."""
    documents: list[list[Tokens]] = [[] for _ in range(chunk.records)]
    piece = _piece([chunk.batch], origin)
    records = chunk.batch.column("record").to_numpy()
    for index, row in enumerate(piece.rows.tolist()):
        documents[records[row]].append(piece.tokens(index))
    return documents, piece.counts


def _column(table: Sequence[Any], name: str) -> NDArray[Any]:
    return np.concatenate([batch.column(name).to_numpy() for batch in table])


def _lengths(table: Sequence[Any]) -> NDArray[np.int64]:
    offsets = [batch.column("ids").offsets.to_numpy() for batch in table]
    return np.concatenate([np.diff(each) for each in offsets]).astype(np.int64)


class TokenizedRows:
    """The sequences of several sources, numbered from 0 through all of them.

    Args:
        built: when, where all of them came from the cache.
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

    @property
    def bad(self) -> Sequence[str]:
        """What is wrong with the first of the rows that were skipped."""
        return [text for piece in self.pieces for text in piece.bad][:NAMED_BAD]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence; int64 of shape (n,)."""
        return np.concatenate([piece.lengths for piece in self.pieces])

    @cached_property
    def loss_token_counts(self) -> NDArray[np.int64]:
        """Loss tokens of each sequence; int64 of shape (n,)."""
        return np.concatenate([piece.num_loss_tokens for piece in self.pieces])

    def tokens(self, index: int) -> Tokens:
        """One sequence with all that a batch needs of it."""
        piece, inside = self._find(index)
        return piece.tokens(inside)

    def row(self, index: int) -> NDArray[np.int32]:
        """Token numbers of one sequence; int32 of shape (length,)."""
        return self.tokens(index).ids

    def loss_mask(self, index: int) -> NDArray[np.bool_]:
        """Which tokens of one sequence have a loss; bool of shape (length,)."""
        return self.tokens(index).loss_mask

    def num_loss_tokens(self, index: int) -> int:
        """Loss tokens of one sequence."""
        return int(self.loss_token_counts[index])

    def origin(self, index: int) -> str:
        """Where one sequence came from: ``data.jsonl:17`` or ``notes.txt:3 (part 2)``."""
        piece, inside = self._find(index)
        return piece.origin_of(inside)

    def fingerprint(self) -> str:
        """Hexadecimal digest of all tokens and their loss masks."""
        return key_of(*(piece.fingerprint for piece in self.pieces))

    def _find(self, index: int) -> tuple[Piece, int]:
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self.pieces[which], int(index - (self._ends[which] - self.sizes[which]))
