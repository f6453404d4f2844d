"""Which characters of a rendered chat have a loss, and which tokens: those of its answers.

An answer is what the assistant says, up to its end token. A chat is rendered once as a whole.
Where its template has ``{% generation %}`` marks, they tell. Otherwise a turn is what the rendering
grows by between the turns before it with the generation prompt, and the turns up to it; this needs
both to be beginnings of the whole. Templates that
render a turn in another way once others follow it (they drop earlier reasoning, or move the tools)
break that: there a mark is written into the turn, found in the rendering of the whole chat, and
the text that follows it in the shorter renderings is found behind it in the whole. Where neither
gives an answer, the chat is refused: a mask is never guessed.

The text, or a prompt with its completion, is then tokenised as a whole. Where a token would stand
on both sides of a stretch's border, it is cut at the borders and tokenised in pieces instead: so
the mask is that of the characters.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anygauge.data.chat import Chat, Turn
from anygauge.data.template import ChatTemplate, Span, TemplateRefusal
from anygauge.interface import DataError

_PRIVATE_USE = range(0xE000, 0xF900)


def rendered_spans(chat: Chat, template: ChatTemplate) -> tuple[str, list[Span]]:
    """A chat's text, and its stretches with a loss: sorted, without overlap, in characters.

    Raises:
        DataError: the template does not take the chat, leaves out a part of it, or does not let
            the answers be distinguished from the rest.
    """
    if template.has_marks(chat.tools):
        return _by_marks(chat, template)
    finder = _Finder(chat, template)
    spans: list[Span] = []
    for index in chat.answers:
        span = finder.span(index)
        if span is None or (spans and span[0] < spans[-1][1]):
            raise _untold(chat, finder, index)
        spans.append(span)
    return finder.text, spans


def rendered(chat: Chat, template: ChatTemplate) -> str:
    """A chat's text.

    Raises:
        DataError: the template does not take the chat, or leaves out a part of it.
    """
    check_written(chat, template)
    try:
        return template.render(chat.turns, chat.tools)
    except TemplateRefusal as refusal:
        raise _refused(chat, refusal) from None


def check_written(chat: Chat, template: ChatTemplate) -> None:
    """Refuse a template that would leave out calls or tools without a word.

    Raises:
        DataError: names the row and the way out.
    """
    text = template.texts[chat.tools is not None]
    way_out = "give a data.chat_template that does, or remove the row"
    if any("tool_calls" in turn for turn in chat.turns) and "tool_calls" not in text:
        raise DataError(
            f"{chat.origin}: the assistant calls tools, but the chat template does not write "
            f"tool_calls: {way_out}"
        )
    if chat.tools and not re.search(r"\btools\b", text):
        raise DataError(
            f"{chat.origin}: the row has tools, but the chat template does not write them: "
            f"{way_out}, or name another column as 'tools'"
        )


@dataclass(frozen=True, slots=True)
class _Anchor:
    """A place in the text that belongs to a turn, and the turn with a mark in that place."""

    place: int
    turn: Turn
    mark: str


class _Finder:
    """Finds turns of one chat in its rendering."""

    def __init__(self, chat: Chat, template: ChatTemplate) -> None:
        self.turns, self.tools, self.template = chat.turns, chat.tools, template
        self.text = rendered(chat, template)
        self._is_rewritten = False
        self._marks: list[str] = []
        self._anchors: dict[int, _Anchor | None] = {}

    def span(self, index: int) -> Span | None:
        """The characters of a turn that have a loss; None where they cannot be found."""
        return self._grown(index) or self._marked(index)

    def _grown(self, index: int) -> Span | None:
        is_last = index + 1 == len(self.turns)
        if self._is_rewritten and not is_last:
            return None
        upto = self.text if is_last else self._try(self.turns[: index + 1])
        if upto is None or not self.text.startswith(upto):
            self._is_rewritten = True
            return None
        before = self._try(self.turns[:index], asks=True)
        if before is None or not upto.startswith(before):
            return None
        end = self.template.end_of_turn(upto[len(before) :])
        return None if end is None else (len(before), len(before) + end)

    def _marked(self, index: int) -> Span | None:
        if not self._marks:
            self._place_marks()
        end = self._end(index)
        start = None if end is None else self._start(index)
        return None if start is None or end is None or start >= end else (start, end)

    def _end(self, index: int) -> int | None:
        anchor = self._anchor(index)
        tail = self._tail(index, anchor) if anchor else None
        if anchor is None or tail is None:
            return None
        # What closes the last turn of a chat may not close an earlier one: the common text does.
        common = _common(tail, self.text[anchor.place :])
        for pattern in (self.template.special, self.template.added):
            ends = [match.end() for match in pattern.finditer(common)]
            if ends and not pattern.sub("", tail[ends[-1] :]).strip():
                return anchor.place + ends[-1]
        return None

    def _start(self, index: int) -> int | None:
        anchor = self._anchor(index - 1) if index else None
        tail = self._tail(index - 1, anchor, asks=True) if anchor else None
        if anchor is None or tail is None:
            return self._content_start(index)
        if self.text.startswith(tail, anchor.place):
            return anchor.place + len(tail)
        # A prompt may end in the beginning of an answer that the history does not keep, as a tag
        # that opens reasoning; so it is shortened, token by token, but never to nothing.
        closed = self._tail(index - 1, anchor)
        if closed is not None:
            common = len(_common(tail, closed))
            starts = [match.start() for match in self.template.added.finditer(tail, common)]
            for start in reversed(starts[1:]):
                if self.text.startswith(tail[:start], anchor.place):
                    return anchor.place + start
        return self._content_start(index)

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

    def _tail(self, index: int, anchor: _Anchor, *, asks: bool = False) -> str | None:
        """What follows a turn's mark where the turn is the last one."""
        text = self._try([*self.turns[:index], anchor.turn], asks=asks)
        if text is None or text.count(anchor.mark) != 1:
            return None
        return text.partition(anchor.mark)[2]

    def _anchor(self, index: int) -> _Anchor | None:
        if index not in self._anchors:
            self._anchors[index] = None
            for turn in _with_mark(self.turns[index], self._marks[index]):
                if placed := self._placed({index: turn}):
                    self._anchors[index] = placed[index]
                    break
        return self._anchors[index]

    def _place_marks(self) -> None:
        """Mark all turns at once; turns that this does not do for are marked one by one."""
        used = set(self.text)
        free = (mark for mark in map(chr, _PRIVATE_USE) if mark not in used)
        self._marks = list(itertools.islice(free, len(self.turns)))
        # Chats beyond that have thousands of turns: their later turns share a mark.
        self._marks += self._marks[-1:] * (len(self.turns) - len(self._marks))
        first = {
            index: next(_with_mark(turn, mark), None)
            for index, (turn, mark) in enumerate(zip(self.turns, self._marks, strict=True))
        }
        self._anchors.update(
            self._placed({index: turn for index, turn in first.items() if turn is not None}) or {}
        )

    def _placed(self, marked: dict[int, Turn]) -> dict[int, _Anchor] | None:
        """Where the marks of some turns stand in the text; None if that is not certain."""
        turns = [marked.get(index, turn) for index, turn in enumerate(self.turns)]
        whole = self._try(turns)
        marks = {self._marks[index]: index for index in marked}
        if whole is None or len(marks) < len(marked):
            return None
        parts = re.split(f"([{''.join(marks)}])", whole)
        if sorted(parts[1::2]) != sorted(marks):
            return None
        anchors, place = {}, 0
        for text, mark in zip(parts[::2], parts[1::2], strict=False):
            # White space that the template strips at the end of a content is kept by the mark.
            length = next(
                (len(end) for end in (text, text.rstrip()) if self.text.startswith(end, place)),
                None,
            )
            if length is None:
                return None
            place += length
            anchors[marks[mark]] = _Anchor(place, marked[marks[mark]], mark)
        return anchors if self.text[place:] == parts[-1] else None

    def _try(self, turns: Sequence[Turn], *, asks: bool = False) -> str | None:
        try:
            return self.template.render(turns, self.tools, asks=asks)
        except TemplateRefusal:
            return None


def _common(one: str, other: str) -> str:
    """The beginning that two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    length = next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
    return one[:length]


def _with_mark(turn: Turn, mark: str) -> Iterator[Turn]:
    """The turn with a mark at the end of its content, or of a name that it calls."""
    content = turn.get("content")
    if isinstance(content, str) and (content or not turn.get("tool_calls")):
        yield {**turn, "content": content + mark}
    if turn.get("tool_calls"):
        first, *others = turn["tool_calls"]
        function = {**first["function"], "name": first["function"]["name"] + mark}
        yield {**turn, "tool_calls": [{**first, "function": function}, *others]}


def _by_marks(chat: Chat, template: ChatTemplate) -> tuple[str, list[Span]]:
    check_written(chat, template)
    try:
        text, spans = template.render_marked(chat.turns, chat.tools)
        answers = [n for n, turn in enumerate(chat.turns) if turn["role"] == "assistant"]
        if list(chat.answers) != answers:
            counts = [
                len(template.render_marked(chat.turns[:end], chat.tools)[1]) if end else 0
                for index in chat.answers
                for end in (index, index + 1)
            ]
            pairs = zip(counts[::2], counts[1::2], strict=True)
            spans = [span for first, last in pairs for span in spans[first:last]]
    except TemplateRefusal as refusal:
        raise _refused(chat, refusal) from None
    if spans and template.end_of_turn(text[slice(*spans[-1])]) is None:
        shown = text[slice(*spans[-1])][-40:]
        raise DataError(
            f"{chat.origin}: what the chat template's generation marks enclose ends with "
            f"{shown!r}, without the token that ends a turn, so the model would never learn to "
            "stop; put that token before {% endgeneration %}"
        )
    return text, spans


def _refused(chat: Chat, refusal: TemplateRefusal) -> DataError:
    roles = ", ".join(turn["role"] for turn in chat.turns)
    return DataError(
        f"{chat.origin}: the chat template refuses this row: {refusal} (turns here: {roles}); "
        "correct or remove the row, or give another data.chat_template"
    )


def _untold(chat: Chat, finder: _Finder, index: int) -> DataError:
    where = f"{chat.origin}: turn {index + 1} (assistant)"
    last = chat.answers[-1]
    closing = finder.template.closing()
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


Tokens = tuple[NDArray[np.int32], NDArray[np.bool_]]

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
    """Tokenises texts with stretches.

    Args:
        tokenizer: a tokenizer of the transformers library. One without offsets (a slow one) always
            tokenises in pieces.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._has_offsets = bool(getattr(tokenizer, "is_fast", False))
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added = np.asarray(sorted(added), dtype=np.int64)
        # SentencePiece puts a space before a text, so before a piece too unless something precedes.
        self._puts_space = self._ids("\nb") != self._ids("\n") + self._ids("b")

    def align(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Tokens]:
        """Tokens of each text, and their loss mask.

        Args:
            spans: for each text the stretches with a loss: sorted, not touching, in characters.
        """
        if not self._has_offsets:
            return [self._in_pieces(*each) for each in zip(texts, spans, strict=True)]
        result: list[Tokens] = []
        for part in bounded_parts(texts):
            # verbose=False: long texts are cut later, so the tokenizer's warning would mislead.
            encoding = self.tokenizer(
                part, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            pairs = zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)
            for text, (ids, offsets) in zip(part, pairs, strict=True):
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
        # What precedes must not join with the piece's beginning.
        for before in ("\n", "0", "a") if self._puts_space and not is_first else ():
            ids, own = self._ids(before + text), self._ids(before)
            if ids[: len(own)] == own:
                return ids[len(own) :]
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
