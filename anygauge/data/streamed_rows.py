"""Rows that are read and tokenised when a step needs them; nothing is prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from anygauge.data.cache import key_of
from anygauge.data.encode import Counts, RowEncoder
from anygauge.data.files import Reader
from anygauge.data.order import Split
from anygauge.data.rows import Tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedSource:
    """One source. `identity` is a digest of its content and of the encoder's settings."""

    reader: Reader
    encoder: RowEncoder
    split: Split
    identity: str


class StreamedRows:
    """The records of all training sources, numbered from 0 through all of them.

    Attributes:
        sizes: records of each source.
        counts: what became of the records that were read so far, over all ranks.
        left_out: rows that found no room in the packs of their step.
    """

    def __init__(self, sources: Sequence[StreamedSource]) -> None:
        self._sources = tuple(sources)
        self.sizes = [source.split.kept_count for source in sources]
        self._ends = np.cumsum(self.sizes)
        self.counts = Counts()
        self.left_out = 0

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def report(self) -> str:
        """What became of the records so far, in words."""
        if not self.counts.rows:
            return f"{len(self)} rows, tokenised while training"
        left_out = f"; {self.left_out} left out of full packs" if self.left_out else ""
        return f"streamed {self.counts}{left_out}"

    def encode(self, numbers: NDArray[np.int64]) -> tuple[list[list[Tokens]], Counts]:
        """What each record became: no sequence, one, or for a long text several.

        Raises:
            DataError: a record cannot be read or used; names it.
        """
        documents: list[list[Tokens]] = [[] for _ in numbers]
        counts = Counts()
        for places, source, indices in self._by_source(numbers):
            records = source.reader.records(indices)
            encoded, count = source.encoder.encode(records)
            counts += count
            for each in encoded:
                part = f" (part {each.part})" if each.part else ""
                origin = records[each.record].origin + part
                documents[places[each.record]].append(Tokens(each.ids, each.loss_mask, origin))
        return documents, counts

    def origins(self, numbers: NDArray[np.int64]) -> tuple[str, ...]:
        """Where records stand; reads none of them."""
        origins = [""] * len(numbers)
        for places, source, indices in self._by_source(numbers):
            mark = source.reader.name.replace("{", "{{").replace("}", "}}") + source.reader.mark
            shown = source.reader.places(indices).tolist()
            for place, number in zip(places.tolist(), shown, strict=True):
                origins[place] = mark.format(number)
        return tuple(origins)

    def fingerprint(self) -> str:
        """Hexadecimal digest of what the sources hold and how it becomes tokens."""
        return key_of("stream", *(source.identity for source in self._sources))

    def _by_source(
        self, numbers: NDArray[np.int64]
    ) -> list[tuple[NDArray[np.int64], StreamedSource, NDArray[np.int64]]]:
        """For each source that is asked: places in `numbers`, the source, its own records."""
        which = np.searchsorted(self._ends, numbers, side="right")
        found = []
        for index in np.unique(which).tolist():
            places = np.flatnonzero(which == index)
            inside = numbers[places] - (self._ends[index] - self.sizes[index])
            source = self._sources[index]
            found.append((places, source, source.split.kept(inside)))
        return found


def first_parts(
    documents: Sequence[Sequence[Tokens]], counts: Counts
) -> tuple[list[list[Tokens]], Counts]:
    """Only the first sequence of each record; records that lose the others count as truncated."""
    kept = [list(parts[:1]) for parts in documents]
    lost = sum(len(parts) > 1 for parts in documents)
    counts = replace(
        counts,
        sequences=sum(map(len, kept)),
        truncated=counts.truncated + lost,
        tokens=sum(len(each.ids) for parts in kept for each in parts),
        num_loss_tokens=sum(int(each.loss_mask.sum()) for parts in kept for each in parts),
    )
    return kept, counts
