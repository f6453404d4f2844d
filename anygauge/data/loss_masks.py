"""Which characters of a rendered chat have a loss, and which tokens: those of its answers.

An answer is what the assistant says, up to its end token. A chat is rendered once as a whole.
Where its template has ``{% generation %}`` marks, they tell. Otherwise an answer begins where the
turns before it and the generation prompt end, and ends where the turns up to it end: both are
rendered, and must be beginnings of the whole. Templates that render a turn in another way once
others follow it (they drop earlier reasoning, or move the tools) break that: there a mark is
written into a turn, found in the rendering of the whole chat, and the text that follows it in the
shorter renderings is found behind it in the whole. Where neither gives an answer, the chat is
refused: a mask is never guessed.

The text, or a prompt with its completion, is then tokenized as a whole. Where a token would stand
on both sides of a stretch's border, it is cut at the borders and tokenized in pieces instead: so
the mask is that of the characters.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anygauge.data.formats import Chat, Turn
from anygauge.data.template import ChatTemplate, Span, TemplateRefusal
from anygauge.interface import DataError

_PRIVATE_USE = range(0xE000, 0xF900)


def rendered_spans(
    chat: Chat, template: ChatTemplate, *, has_all: bool = False
) -> tuple[str, list[Span]]:
    """A chat's text, and its stretches with a loss: its answers, or where it `has_all` the whole
    text; sorted, without overlap, in characters."""
    written = template.texts[chat.tools is not None]
    way_out = "give a data.chat_template that does, or remove the row"
    if any("tool_calls" in turn for turn in chat.turns) and "tool_calls" not in written:
        raise DataError(
            f"{chat.origin}: the assistant calls tools, but the chat template does not write "
            f"tool_calls: {way_out}"
        )
    if chat.tools and not re.search(r"\btools\b", written):
        raise DataError(
            f"{chat.origin}: the row has tools, but the chat template does not write them: "
            f"{way_out}, or name another column as 'tools'"
        )
    try:
        text, marked = template.render(chat.turns, chat.tools)
        if has_all:
            return text, [(0, len(text))]
        if template.has_marks(chat.tools):
            return text, _of_answers(chat, template, text, marked)
    except TemplateRefusal as refusal:
        roles = ", ".join(turn["role"] for turn in chat.turns)
        raise DataError(
            f"{chat.origin}: the chat template refuses this row: {refusal} (turns here: {roles}); "
            "correct or remove the row, or give another data.chat_template"
        ) from None
    finder = _Finder(chat, template, text)
    spans: list[Span] = []
    for index in chat.answers:
        span = finder.span(index)
        if span is None or (spans and span[0] < spans[-1][1]):
            raise _no_boundary_error(chat, finder, index)
        spans.append(span)
    return text, spans


def _of_answers(chat: Chat, template: ChatTemplate, text: str, spans: list[Span]) -> list[Span]:
    """Select the stretches that generation marks enclose, of the turns with a loss."""

    def number(end: int) -> int:
        """Stretches in so many turns."""
        return len(template.render(chat.turns[:end], chat.tools)[1]) if end else 0

    assistants = [n for n, turn in enumerate(chat.turns) if turn["role"] == "assistant"]
    if list(chat.answers) != assistants:
        ranges = [slice(number(index), number(index + 1)) for index in chat.answers]
        spans = [span for one in ranges for span in spans[one]]
    if spans and template.end_of_turn(text[slice(*spans[-1])]) is None:
        shown = text[slice(*spans[-1])][-40:]
        raise DataError(
            f"{chat.origin}: what the chat template's generation marks enclose ends with "
            f"{shown!r}, without the token that ends a turn, so the model would never learn to "
            "stop; put that token before {% endgeneration %}"
        )
    return spans


class _Finder:
    """Finds turns of one chat in its rendering."""

    def __init__(self, chat: Chat, template: ChatTemplate, text: str) -> None:
        self.turns, self.tools, self.template, self.text = chat.turns, chat.tools, template, text
        self._is_rewritten = False
        self._marks: list[str] = []
        self._anchors: dict[int, tuple[int, Turn] | None] = {}

    def span(self, index: int) -> Span | None:
        """The characters of a turn that have a loss; None where they cannot be found."""
        for marked in (False, True):
            end = self._end(index, marked)
            start = None if end is None else self._start(index, marked)
            if start is not None and end is not None and start < end:
                return start, end
        return None

    def _end(self, index: int, marked: bool) -> int | None:
        is_last = index + 1 == len(self.turns)
        if self._is_rewritten and not (marked or is_last):
            return None
        found = self._tail(index, marked)
        if not marked and not (found and self.text.startswith(found[1])):
            self._is_rewritten, found = True, None
        if found is None:
            return None
        place, tail = found
        # What closes the last turn of a chat may not close an earlier one: the common text does.
        end = self.template.end_of_turn(tail, _common_prefix(tail, self.text[place:]))
        return None if end is None else place + end

    def _start(self, index: int, marked: bool) -> int | None:
        if found := self._tail(index - 1, marked, asks=True):
            place, tail = found
            if self.text.startswith(tail, place):
                return place + len(tail)
            # A prompt may end in the beginning of an answer that the history does not keep, as a
            # tag that opens reasoning; so it is shortened, token by token, but never to nothing.
            if closed := self._tail(index - 1, marked):
                common = _common_prefix(tail, closed[1])
                starts = [match.start() for match in self.template.added.finditer(tail, common)]
                for start in reversed(starts[1:]):
                    if self.text.startswith(tail[:start], place):
                        return place + start
        return self._content_start(index) if marked else None

    def _content_start(self, index: int) -> int | None:
        turn, mark = self.turns[index], self._marks[index]
        if turn.get("tool_calls") or not turn.get("content", "").strip():
            return None
        marked = {**turn, "content": mark + turn["content"]}
        whole = self._try([*self.turns[:index], marked, *self.turns[index + 1 :]])
        if whole is None or whole.count(mark) != 1:
            return None
        before, _, after = whole.partition(mark)
        is_same = self.text[len(before) :].lstrip() == after.lstrip()
        return len(before) if is_same and self.text.startswith(before) else None

    def _tail(self, index: int, marked: bool, *, asks: bool = False) -> tuple[int, str] | None:
        """The place of a turn's mark, or the beginning, and what follows it if no turn does."""
        if index < 0:
            return None
        if not marked:
            is_whole = index + 1 == len(self.turns) and not asks
            text = self.text if is_whole else self._try(self.turns[: index + 1], asks=asks)
            return None if text is None else (0, text)
        if (anchor := self._anchor(index)) is None:
            return None
        place, turn = anchor
        parts = (self._try([*self.turns[:index], turn], asks=asks) or "").split(self._marks[index])
        return (place, parts[1]) if len(parts) == 2 else None

    def _anchor(self, index: int) -> tuple[int, Turn] | None:
        """Find where a turn's mark stands in the text, and the turn with it."""
        if not self._marks:
            self._place_marks()
        if index not in self._anchors:
            ways = _with_mark(self.turns[index], self._marks[index])
            placed = (self._locate({index: turn}) for turn in ways)
            self._anchors[index] = next((each[index] for each in placed if each), None)
        return self._anchors[index]

    def _place_marks(self) -> None:
        """Mark all turns at once; turns that this does not do for are marked one by one."""
        used = set(self.text)
        free = (mark for mark in map(chr, _PRIVATE_USE) if mark not in used)
        self._marks = list(itertools.islice(free, len(self.turns)))
        # Chats beyond that have thousands of turns: their later turns share a mark.
        self._marks += self._marks[-1:] * (len(self.turns) - len(self._marks))
        first = [
            next(_with_mark(*each), None) for each in zip(self.turns, self._marks, strict=True)
        ]
        self._anchors.update(self._locate({n: turn for n, turn in enumerate(first) if turn}) or {})

    def _locate(self, marked: dict[int, Turn]) -> dict[int, tuple[int, Turn]] | None:
        """Find where the marks of some turns stand in the text; None if that is not certain."""
        whole = self._try([marked.get(index, turn) for index, turn in enumerate(self.turns)])
        marks = {self._marks[index]: index for index in marked}
        if whole is None or len(marks) < len(marked):
            return None
        parts = re.split(f"([{''.join(marks)}])", whole)
        if sorted(parts[1::2]) != sorted(marks):
            return None
        anchors, place = {}, 0
        for text, mark in zip(parts[::2], parts[1::2], strict=False):
            # White space that the template strips at the end of a content is kept by the mark.
            before = text if self.text.startswith(text, place) else text.rstrip()
            if not self.text.startswith(before, place):
                return None
            place += len(before)
            anchors[marks[mark]] = (place, marked[marks[mark]])
        return anchors if self.text[place:] == parts[-1] else None

    def _try(self, turns: Sequence[Turn], *, asks: bool = False) -> str | None:
        try:
            return self.template.render(turns, self.tools, asks=asks)[0]
        except TemplateRefusal:
            return None


def _common_prefix(one: str, other: str) -> int:
    """How many characters two texts share at their beginning."""
    if other.startswith(one):
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), len(other))


def _with_mark(turn: Turn, mark: str) -> Iterator[Turn]:
    """The turn with a mark at the end of its content, or of a name that it calls."""
    content = turn.get("content")
    if isinstance(content, str) and (content or not turn.get("tool_calls")):
        yield {**turn, "content": content + mark}
    if turn.get("tool_calls"):
        first, *others = turn["tool_calls"]
        function = {**first["function"], "name": first["function"]["name"] + mark}
        yield {**turn, "tool_calls": [{**first, "function": function}, *others]}


def _no_boundary_error(chat: Chat, finder: _Finder, index: int) -> DataError:
    where = f"{chat.origin}: turn {index + 1} (assistant)"
    last = chat.answers[-1]
    closing = finder.template.text_after_answer()
    if closing is not None and finder.template.end_of_turn(closing) is None:
        return DataError(
            f"{where}: the chat template ends a turn of the assistant with {closing!r}, not with "
            "a special token of this tokenizer, so the model would never learn to stop; write "
            "{{ eos_token }} there in data.chat_template, or list the token in "
            "model.new_special_tokens"
        )
    eased = index != last and finder.span(last) is not None
    return DataError(
        f"{where}: anygauge cannot tell which text to train on: the chat template writes this "
        "turn differently when other turns follow it, or leaves it out. Enclose what the assistant "
        "says in {% generation %} and {% endgeneration %} in a data.chat_template"
        + ("; or set data.loss_on: last_turn" if eased else "")
    )


Aligned = tuple[NDArray[np.int32], NDArray[np.bool_]]

_AT_ONCE = 2_000_000
"""Characters that a tokenizer is given; it takes hundreds of bytes of memory for each."""


def bounded_parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts, as many at once as memory allows, which is one at least."""
    start = length = 0
    for end, text in enumerate(texts):
        if length and length + len(text) > _AT_ONCE:
            yield list(texts[start:end])
            start, length = end, 0
        length += len(text)
    if texts:
        yield list(texts[start:])


class Aligner:
    """Tokenizes texts with stretches; by a tokenizer without offsets (a slow one) in pieces."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._has_offsets = bool(getattr(tokenizer, "is_fast", False))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = np.asarray(sorted(added), dtype=np.int64)
        # SentencePiece puts a space before a text, so before a piece too unless something precedes.
        self._puts_space = self._token_ids("\nb") != self._token_ids("\n") + self._token_ids("b")

    def align(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Aligned]:
        """Tokens of each text, and their loss mask; `spans`: its stretches with a loss, sorted, not
        touching, in characters."""
        if not self._has_offsets:
            return [self._in_pieces(*each) for each in zip(texts, spans, strict=True)]
        result: list[Aligned] = []
        for part in bounded_parts(texts):
            # verbose=False: long texts are cut later, so the tokenizer's warning would mislead.
            encoding = self.tokenizer(
                part, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            rows = zip(part, encoding["input_ids"], encoding["offset_mapping"], strict=True)
            for text, ids, offsets in rows:
                stretches = spans[len(result)]
                loss_mask = self._loss_mask(text, ids, offsets, stretches)
                if loss_mask is None:
                    result.append(self._in_pieces(text, stretches))
                else:
                    result.append((np.asarray(ids, dtype=np.int32), loss_mask))
        return result

    def _loss_mask(
        self, text: str, ids: list[int], offsets: list[tuple[int, int]], spans: Sequence[Span]
    ) -> NDArray[np.bool_] | None:
        loss_mask = np.zeros(len(ids), dtype=np.bool_)
        if not ids:
            return loss_mask
        given = np.asarray(offsets, dtype=np.int64)
        # Offsets may leave out white space that a token begins with: it begins where the one before
        # ends, but not behind its own start, as several tokens may share one character.
        ends = np.maximum.accumulate(given[:, 1])
        starts = np.minimum(given[:, 0], np.concatenate(([0], ends[:-1])))
        # An added token may swallow white space around it; it belongs to where its own text stands.
        for token in np.flatnonzero(np.isin(np.asarray(ids), self._added)).tolist():
            start, end = given[token].tolist()
            if own := text[start:end].strip():
                starts[token] = start = text.index(own, start)
                ends[token] = start + len(own)
        for first, last in spans:
            touches = (starts < last) & (ends > first)
            inside = touches & (starts >= first) & (ends <= last)
            if np.any(touches & ~inside):
                return None
            loss_mask |= inside
        return loss_mask

    def _in_pieces(self, text: str, spans: Sequence[Span]) -> Aligned:
        ids: list[int] = []
        loss_mask: list[bool] = []
        borders = [0, *itertools.chain(*spans), len(text)]
        for number, (start, end) in enumerate(itertools.pairwise(borders)):
            piece = self._encode_piece(text[start:end], is_first=start == 0)
            ids += piece
            loss_mask += [number % 2 == 1] * len(piece)
        return np.asarray(ids, dtype=np.int32), np.asarray(loss_mask, dtype=np.bool_)

    def _encode_piece(self, text: str, *, is_first: bool) -> list[int]:
        if not text:
            return []
        # What precedes must not join with the piece's beginning.
        for before in ("\n", "0", "a") if self._puts_space and not is_first else ():
            ids, own = self._token_ids(before + text), self._token_ids(before)
            if ids[: len(own)] == own:
                return ids[len(own) :]
        return self._token_ids(text)

    def _token_ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
