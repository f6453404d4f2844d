"""Records to sequences of tokens and their loss masks."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data.formats import AnswerPair, AnyRow, Chat, Row, TokenRow, parse_all
from anygauge.data.loss_masks import Aligner, bounded_parts, rendered_spans
from anygauge.data.readers import Record
from anygauge.data.template import ChatTemplate, Rendering, Span, read_template, render_unbounded
from anygauge.interface import DataError, ModelError

_VERSION = 5
"""Counts up when the same rows become other tokens, masks or counts: no cache has those."""

WHOLE, CUT, EMPTY, LONG, BAD = range(5)
"""What became of a record: it is trained on, or without its end; it holds nothing to learn; it is
beyond the maximum length; or it cannot be used (`data.on_bad_row`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """One sequence, or document of one; or a record of which there is none, without tokens.

    Attributes:
        ids: token numbers; int32 of shape (length,).
        loss_mask: True where the token's own prediction counts, never for the first; bool of shape
            (length,).
        origin: where it stands: ``data.jsonl:17`` or ``notes.txt:3 (part 2)``; of one that comes
            from a table, which has the following instead.
        record: index of the record it came from, in the batch that was given.
        part: 0; from 1 where a plain text was cut in pieces; of a pair, 1 is the chosen answer, 2
            the rejected one.
        fate: `WHOLE`, `CUT`, `EMPTY`, `LONG` or `BAD`.
        length: tokens of the whole record.
    """

    ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    loss_mask: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    origin: str = ""
    _: KW_ONLY
    record: int = 0
    part: int = 0
    fate: int = WHOLE
    length: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What became of rows; counts of several batches or sources are added with ``+``.

    Rows of which something is trained on are `used`; `sequences` are more where long texts were cut
    in pieces. Rows are left out that hold nothing to learn (`dropped_empty`), of which no loss
    token fits in the maximum length or which `data.too_long` drops (`dropped_long`), and that
    cannot be used (`skipped`). `truncated` rows lost their end.

    Attributes:
        beyond: rows longer than the maximum length, by their whole length, rounded up.
    """

    rows: int = 0
    used: int = 0
    sequences: int = 0
    dropped_empty: int = 0
    dropped_long: int = 0
    skipped: int = 0
    truncated: int = 0
    tokens: int = 0
    num_loss_tokens: int = 0
    beyond: Counter[int] = field(default_factory=Counter)

    def record(self) -> dict[str, Any]:
        """All of them, as JSON can write them."""
        numbers = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**numbers, "beyond": sorted(self.beyond.items())}

    def __add__(self, other: Counts) -> Counts:
        names = [one.name for one in fields(self)]
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def length_for(self, share: float) -> int | None:
        """The maximum length that would hold a share of the rows; None where this one does."""
        total = self.used + self.dropped_long
        wanted = math.ceil(share * total)
        held = total - self.beyond.total()
        if held >= wanted:
            return None
        for length, rows in sorted(self.beyond.items()):
            held += rows
            if held >= wanted:
                return length
        return None

    def __str__(self) -> str:
        parts = [f"{self.used} of {self.rows} rows"]
        if self.sequences != self.used:
            parts.append(f"{self.sequences} sequences")
        parts.append(f"{self.tokens} tokens, {self.num_loss_tokens} loss tokens")
        others = {
            "dropped with nothing to learn": self.dropped_empty,
            "dropped as too long": self.dropped_long,
            "skipped as bad": self.skipped,
            "truncated": self.truncated,
        }
        parts += [f"{number} {what}" for what, number in others.items() if number]
        return "; ".join(parts)


class RowEncoder:
    """Encodes the records of one source; picklable, and usable from any one thread at a time.

    Args:
        source: with its format as `detect_format` gives it, not ``auto``.
    """

    def __init__(
        self,
        source: SourceSection,
        data: DataSection,
        tokenizer: Any,
        *,
        field: str,
        rendering: Rendering = render_unbounded,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                "the tokenizer has no end-of-sequence token, so the model could not learn where "
                "an answer ends; name one of its tokens in model.eos_token, or give another "
                "tokenizer"
            )
        self.source, self.data, self.tokenizer, self.field = source, data, tokenizer, field
        self._given, self._rendering = read_template(data.chat_template), rendering
        self._start, self._end = start_ids(tokenizer), [int(tokenizer.eos_token_id)]
        self._template: ChatTemplate | None = None
        self._aligner = Aligner(tokenizer)
        if source.format in ("messages", "sharegpt", "alpaca_chat"):
            self._chat_template()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: who watches renderings."""
        return {**self.__dict__, "_template": None, "_rendering": render_unbounded}

    def watch(self, rendering: Rendering) -> None:
        """Report renderings from now on."""
        self._rendering, self._template = rendering, None

    def encode(self, records: Sequence[Record]) -> list[Tokens]:
        """Encode a batch; about 1000 records at once is fast. Each record has a part in the result.

        A document of a .txt file comes as a record with one value under `source.text`. Plain text
        beyond the maximum length is never lost: it is cut in pieces, each starting with the last
        token of the one before, so that every token but the first has a loss exactly once.
        """
        sequences: list[Tokens] = []
        texts: list[tuple[int, Row]] = []
        answers: list[tuple[int, Row | Chat]] = []
        rows = parse_all(records, self.source.format, self.source, self.field)
        pairs = self.source.format == "preference"
        for index, row in _each_answer(rows):
            if isinstance(row, TokenRow):
                sequences.append(self._of_tokens(index, row))
                continue
            if isinstance(row, Chat) and self.data.loss_on == "last_turn":
                row = replace(row, answers=row.answers[-1:])
            if row.is_blank:
                sequences.append(Tokens(record=index, fate=EMPTY))
            elif isinstance(row, Row) and row.prompt is None:
                texts.append((index, row))
            else:
                answers.append((index, row))
        sequences += [*self._of_texts(texts), *self._of_answers(answers)]
        sequences.sort(key=lambda one: (one.record, one.part))
        return list(_in_pairs(sequences)) if pairs else sequences

    def key(self) -> str:
        """Hexadecimal digest of all other than the records that decides the result."""
        source = self.source.model_dump(mode="json")
        for name in ("path", "subset", "split", "revision", "limit", "weight"):
            del source[name]
        data = self.data
        decides = {
            "version": _VERSION,
            "source": source,
            "data": [data.max_length, data.too_long, data.loss_on],
            "chat_template": self._given or getattr(self.tokenizer, "chat_template", None),
            "chat_template_kwargs": data.chat_template_kwargs,
            "tokenizer": _tokenizer_state(self.tokenizer),
            "start": self._start,
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def _of_tokens(self, index: int, row: TokenRow) -> Tokens:
        count = len(self.tokenizer)
        beyond = next((place for place, one in enumerate(row.ids) if one >= count), None)
        if beyond is not None:
            raise DataError(
                f"{row.origin}: input_ids[{beyond}] is {row.ids[beyond]}, but this tokenizer has "
                f"{count} tokens (0 to {count - 1}); use the tokenizer that the rows were made with"
            )
        loss_mask = np.asarray(row.loss_mask, dtype=np.bool_) | (self.data.loss_on == "all")
        return self._fit(index, np.asarray(row.ids, dtype=np.int32), loss_mask)

    def _of_texts(self, rows: Sequence[tuple[int, Row]]) -> Iterator[Tokens]:
        tokens = encode_texts(self.tokenizer, [row.text for _, row in rows])
        most = self.data.max_length
        for (index, _), ids in zip(rows, tokens, strict=True):
            whole = np.asarray([*self._start, *ids, *self._end], dtype=np.int32)
            starts = range(0, max(len(whole) - 1, 1), most - 1)
            for number, start in enumerate(starts, start=1 if len(starts) > 1 else 0):
                part = whole[start : start + most]
                one = self._fit(index, part, np.ones(len(part), dtype=np.bool_))
                yield replace(one, part=number, length=len(whole))

    def _of_answers(self, rows: Sequence[tuple[int, Row | Chat]]) -> Iterator[Tokens]:
        spans = [self._text_and_spans(row) for _, row in rows]
        aligned = self._aligner.align([text for text, _ in spans], [each for _, each in spans])
        around = (len(self._start), len(self._end))
        for (index, row), (ids, loss_mask) in zip(rows, aligned, strict=True):
            if isinstance(row, Row):  # a chat's template writes both ends itself
                ids = np.asarray([*self._start, *ids, *self._end], dtype=np.int32)
                ends = (self.data.loss_on == "all", True)
                loss_mask = np.pad(loss_mask, around, constant_values=ends)
            yield self._fit(index, ids, loss_mask)

    def _text_and_spans(self, row: Row | Chat) -> tuple[str, list[Span]]:
        """Return a row's text, and the stretches of it that have a loss, in characters."""
        if isinstance(row, Row):
            text = f"{row.prompt}{row.text}"
            return text, [(0 if self.data.loss_on == "all" else len(row.prompt or ""), len(text))]
        template = self._chat_template()
        template.row = row.origin
        return rendered_spans(row, template, has_all=self.data.loss_on == "all")

    def _fit(self, record: int, ids: NDArray[np.int32], loss_mask: NDArray[np.bool_]) -> Tokens:
        """A sequence within the maximum length, or what became of it."""
        most, fate = self.data.max_length, WHOLE
        loss_mask[:1] = False
        if not loss_mask.any():
            fate = EMPTY
        elif len(ids) > most:
            fate = LONG if self.data.too_long == "drop" or not loss_mask[:most].any() else CUT
        end = most if fate in (WHOLE, CUT) else 0
        return Tokens(
            ids=ids[:end], loss_mask=loss_mask[:end], record=record, fate=fate, length=len(ids)
        )

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            given, kwargs = self._given, self.data.chat_template_kwargs
            self._template = ChatTemplate(self.tokenizer, given, self._rendering, kwargs=kwargs)
        return self._template


def _each_answer(rows: Iterable[AnyRow]) -> Iterator[tuple[int, Row | Chat | TokenRow]]:
    """Each row with its number; a pair is two, the chosen first."""
    for index, row in enumerate(rows):
        if isinstance(row, AnswerPair):
            yield from ((index, row.chosen), (index, row.rejected))
        else:
            yield index, row


def _in_pairs(sequences: Sequence[Tokens]) -> Iterator[Tokens]:
    """The two answers of each pair, both with the worse fate of the two."""
    for pair in zip(sequences[::2], sequences[1::2], strict=True):
        fate, length = max(each.fate for each in pair), max(each.length for each in pair)
        kept = None if fate in (WHOLE, CUT) else 0
        for part, each in enumerate(pair, start=1):
            ids, loss_mask = each.ids[:kept], each.loss_mask[:kept]
            yield Tokens(ids, loss_mask, record=each.record, part=part, fate=fate, length=length)


def _tokenizer_state(tokenizer: Any) -> list[Any]:
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [type(tokenizer).__name__, special, tokenizer.get_vocab()]
    state = json.loads(backend.to_str())
    # Set by whoever called the tokenizer last; they do not matter here.
    for name in ("truncation", "padding"):
        state.pop(name, None)
    return [special, state]


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a whole prompt, template applied, alike in training and in generation; with
    what the tokenizer puts at the start of a text (BOS, if it does), without what at the end."""
    return start_ids(tokenizer) + encode_texts(tokenizer, [text])[0]


def encode_texts(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """The tokens of each text, with nothing put before or behind it."""
    found: list[list[int]] = []
    for part in bounded_parts(texts):
        # verbose=False: long texts are cut later, so the tokenizer's warning would mislead.
        found += tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def start_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer itself puts before a text; found by a trial: no property states it."""
    probe = "a"
    bare = tokenizer(probe, add_special_tokens=False)["input_ids"]
    full = tokenizer(probe)["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return list(full[:start])
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and full[:1] == [bos] else []
