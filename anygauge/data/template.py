"""Chat templates: read, checked before a run, and rendered; and the tokens that end a turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from anygauge.config.paths import CHAT_TEMPLATE, NAMED_TEMPLATES, holds_template
from anygauge.data.formats import Chat, Turn
from anygauge.interface import DataError, ModelError, RunFileError
from anygauge.util.files import read_text
from anygauge.util.text import did_you_mean

Span = tuple[int, int]
Tools = Sequence[dict[str, Any]] | None
Rendering = Callable[[str, str], None]
"""Gets a template's name and the row that it is about to render; two empty texts once it has."""

MOST_CHARACTERS = 2**24
"""Of a chat's text: a tokenizer takes some 200 bytes of memory for each."""

MOST_BYTES = 2**20
"""Of a template's file; long ones have some ten thousand."""

FOLDER = Path(__file__).with_name("templates")
"""Folder of the templates that have a name."""

_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

# A template that writes today's date would give other tokens on another day, and a run that is
# resumed would read other data. A macro of this name takes the place of the library's function.
_FIXED_DATE = (
    '{%- macro strftime_now(format) -%}{{- format | replace("%d", "01") | replace("%m", "01") | '
    'replace("%b", "Jan") | replace("%B", "January") | replace("%Y", "2025") | '
    'replace("%y", "25") | replace("%A", "Wednesday") | replace("%H", "12") | '
    'replace("%M", "00") | replace("%S", "00") -}}{%- endmacro %}\n'
)


class TemplateRefusal(Exception):
    """The template does not render these turns; the text says why, in the template's words."""


def read_template(given: str | None) -> str | None:
    """The text of `data.chat_template`: a name, a template or a file of one; None if not given."""
    if given is None:
        return None
    if given in NAMED_TEMPLATES:
        return (FOLDER / f"{given}.jinja").read_text(encoding="utf-8")
    text, where = given, "data.chat_template"
    if not holds_template(CHAT_TEMPLATE, given):
        where = f"data.chat_template: {given}"
        file = Path(given).expanduser()
        try:
            text = read_text(file, MOST_BYTES)
        except FileNotFoundError:
            raise RunFileError(
                f"{where}: no such file (looked at {file.absolute()}); give a Jinja file, the "
                f"template itself, or one of {', '.join(NAMED_TEMPLATES)}"
                + did_you_mean(file.name, NAMED_TEMPLATES)
            ) from None
        except OSError as error:
            raise RunFileError(f"{where} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise RunFileError(
                f"{where}: not UTF-8 at byte {error.start}; save the file as UTF-8"
            ) from None
        if not text.strip():
            raise RunFileError(f"{where} is empty")
    _check_syntax(text, where)
    return text


def template_to_save(tokenizer: Any, given: str | None, kwargs: Mapping[str, Any]) -> str | None:
    """The template that takes the place of the tokenizer's own in a result; None where that stays.

    Variables of the run are its defaults there, so that others ask the model as it was trained. A
    tokenizer that has one template for tools and one without keeps both, without such defaults.
    """
    own = given or getattr(tokenizer, "chat_template", None)
    if not kwargs or not isinstance(own, str):
        return given
    # Jinja reads what Python writes: 'text', 1, True, None, [...] and {...}.
    defaults = "".join(
        f"{{%- if {name} is not defined -%}}{{%- set {name} = {value!r} -%}}{{%- endif %}}\n"
        for name, value in kwargs.items()
    )
    return given if own.startswith(defaults) else defaults + own


def _check_syntax(text: str, where: str) -> None:
    """Refuse what is not valid Jinja, without rendering it; names the line."""
    from jinja2 import Environment, TemplateSyntaxError
    from jinja2.ext import Extension
    from jinja2.nodes import Scope

    class Marks(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return Scope(body).set_lineno(line)

    try:
        Environment(extensions=[Marks, "jinja2.ext.loopcontrols"]).parse(text)
    except TemplateSyntaxError as error:
        raise RunFileError(
            f"{where}, line {error.lineno}: not a valid Jinja template: {error.message}"
        ) from None
    except RecursionError:
        raise RunFileError(f"{where}: not a valid Jinja template: nested too deeply") from None


def render_unbounded(template: str, row: str) -> None:
    """Watch no rendering, where nobody bounds what a template takes; see `Rendering`."""


class ChatTemplate:
    """A tokenizer's chat template, or one given instead, as `read_template` returns it.

    The library renders it in a sandbox, so it reads and runs nothing. Time and memory are bounded
    by whoever starts the process that renders: see `anygauge.launch.prepare_call`.

    Attributes:
        row: what is rendered next, in words.

    Raises:
        ModelError: there is no template, or the tokenizer cannot say where its tokens stand.
        RunFileError: the template cannot be used, or does not read one of the variables.
    """

    def __init__(
        self,
        tokenizer: Any,
        given: str | None,
        rendering: Rendering = render_unbounded,
        *,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self._kwargs = tokenizer, dict(kwargs or {})
        self.row, self._rendering = "a trial chat", rendering
        if given is not None:
            self._name, plain, with_tools = "data.chat_template", given, given
        else:
            self._name = f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
            try:
                plain = tokenizer.get_chat_template(None, None)
                with_tools = tokenizer.get_chat_template(None, [])
            except (AttributeError, ValueError):
                raise ModelError(
                    "the tokenizer has no chat template, so turns cannot become text; give "
                    "data.chat_template (a name such as chatml, or a Jinja file), or a model that "
                    "was tuned for chats"
                ) from None
            for text in {plain, with_tools}:
                _check_syntax(text, "the tokenizer's chat template")
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                f"{type(tokenizer).__name__} cannot say which characters a token stands for, which "
                "chats need; give a tokenizer with a tokenizer.json"
            )
        words = set(re.findall(r"\w+", plain + with_tools))
        for name in sorted(self._kwargs.keys() - words):
            raise RunFileError(
                f"data.chat_template_kwargs: {self._name} does not read {name!r}"
                + did_you_mean(name, words)
            )
        self.texts = [
            _FIXED_DATE + text if "strftime_now" in text else text for text in (plain, with_tools)
        ]
        self.special, self.added = _token_patterns(tokenizer)
        self._check_contents()

    def has_marks(self, tools: Tools) -> bool:
        """Whether the template marks what the assistant says with ``{% generation %}``."""
        return bool(_MARKS.search(self.texts[tools is not None]))

    def render(
        self, turns: Sequence[Turn], tools: Tools, *, asks: bool = False
    ) -> tuple[str, list[Span]]:
        """The text of some turns, with the generation prompt if it `asks`; and the stretches of it
        that generation marks enclose."""
        from jinja2 import TemplateError, UndefinedError
        from transformers.utils.chat_template_utils import render_jinja_template

        if not turns:
            raise TemplateRefusal("there is no turn")
        has_marks = self.has_marks(tools)
        self._rendering(self._name, self.row)
        try:
            [text], spans = render_jinja_template(
                conversations=[list(turns)],
                tools=list(tools) if tools else None,
                chat_template=self.texts[tools is not None],
                add_generation_prompt=asks,
                return_assistant_tokens_mask=has_marks,
                **{**self.tokenizer.special_tokens_map, **self._kwargs},
            )
        except MemoryError:  # the row counts as being rendered until somebody has named it
            raise
        except Exception as error:
            self._rendering("", "")
            message = str(error).strip() or type(error).__name__
            # What a template raises is a sentence; a name that it lacks is not.
            if not isinstance(error, TemplateError) or isinstance(error, UndefinedError):
                message = f"{type(error).__name__}: {message}"
            raise TemplateRefusal(message) from None
        self._rendering("", "")
        if len(text) > MOST_CHARACTERS:
            raise TemplateRefusal(f"it makes a text of more than {MOST_CHARACTERS:,} characters")
        return text, [(start, end) for start, end in spans[0] if start < end] if has_marks else []

    def end_of_turn(self, text: str, within: int | None = None) -> int | None:
        """Where a turn's last special token ends, if only white space and such tokens follow; it
        ends `within` so many characters of the text, or None for all."""
        for pattern in (self.special, self.added):
            limit = len(text) if within is None else within
            ends = [match.end() for match in pattern.finditer(text, 0, limit)]
            if ends and not pattern.sub("", text[ends[-1] :]).strip():
                return ends[-1]
        return None

    def text_after_answer(self) -> str | None:
        """What the template writes behind an answer; None where it does not take a question."""
        mark = "\ue0a7"
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
        try:
            return self.render(turns, None)[0].partition(mark)[2]
        except TemplateRefusal:
            return None

    def stop_ids(self) -> list[int]:
        """The token that ends a turn of the assistant, for generation; empty if there is none."""
        closing = self.text_after_answer() or ""
        for pattern in (self.special, self.added):
            if matches := pattern.findall(closing):
                return [int(self.tokenizer.convert_tokens_to_ids(matches[0]))]
        return []

    def question_ids(self, chat: Chat) -> list[int]:
        """The tokens of turns that end with a question, up to where the answer begins."""
        self.row = chat.origin
        try:
            text, _ = self.render(chat.turns, chat.tools, asks=True)
        except TemplateRefusal as refusal:
            raise DataError(
                f"{chat.origin}: the chat template does not take it: {refusal}; give --raw to ask "
                "without it"
            ) from None
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _check_contents(self) -> None:
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "reply"}]
        try:
            text, spans = self.render(turns, None)
        except TemplateRefusal:
            return
        if "question" not in text or "reply" not in text:
            raise RunFileError(
                "the chat template leaves out what the turns say: it turned a question and a "
                f"reply into {text!r}. It may expect contents as lists of parts, as for images; "
                "give a data.chat_template that writes message.content as text"
            )
        marked = "".join(text[start:end] for start, end in spans)
        # The library misplaces marks that stand behind text in a macro or a `set` block.
        if self.has_marks(None) and ("reply" not in marked or "question" in marked):
            raise RunFileError(
                "the chat template's {% generation %} marks enclose "
                f"{marked!r} of {text!r}, not the assistant's reply; put them directly in the loop "
                "over the turns, not in a macro or a set block"
            )


def end_of_turn_ids(
    tokenizer: Any,
    given: str | None,
    rendering: Rendering = render_unbounded,
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """The token that ends a turn of the assistant; empty where no template can be used."""
    try:
        return ChatTemplate(tokenizer, given, rendering, kwargs=kwargs).stop_ids()
    except (ModelError, RunFileError):  # rows without turns need none
        return []


def _token_patterns(tokenizer: Any) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what matches a special token, and what matches any added token but white space."""
    tokens = tokenizer.added_tokens_decoder.values()
    special = {each.content for each in tokens if each.special} | set(tokenizer.all_special_tokens)

    def pattern(texts: set[str]) -> re.Pattern[str]:
        # Longest first, so that a token wins over one that it contains.
        ordered = sorted(filter(str.strip, texts), key=lambda text: (-len(text), text))
        return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")

    return pattern(special), pattern(special | {each.content for each in tokens})
