"""Chat templates: where they come from, what is checked before a run, and how a question is put."""

from __future__ import annotations

import pytest

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import Record, RowEncoder
from anygauge.data import template as template_module
from anygauge.data.template import ChatTemplate, TemplateRefusal, check_syntax, read_template
from anygauge.interface import DataError, ModelError, RunFileError
from tests.helpers.chats import assistant, make_chat_tokenizer, template, user

TURNS = [user("q"), assistant("a")]
ECHO = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"


@pytest.fixture
def tokenizer(tmp_path):
    return make_chat_tokenizer(tmp_path)


def test_a_file_or_the_template_itself(tmp_path):
    assert read_template(None) is None
    assert read_template(ECHO) == ECHO
    file = tmp_path / "chat.jinja"
    # Some editors write a byte order mark.
    file.write_text("{% if true %}é{% endif %}", encoding="utf-8-sig")
    assert read_template(str(file)) == "{% if true %}é{% endif %}"
    for path, said in ((tmp_path / "no.jinja", "no such file"), (tmp_path, "cannot be read")):
        with pytest.raises(RunFileError, match=said):
            read_template(str(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\xff{{", "not UTF-8 at byte 0"),
        (b"one\n{% for m in messages %}", "line 2: not a valid Jinja template"),
        (b"{% generation %}", "line 1: not a valid Jinja template"),
    ],
)
def test_files_that_are_no_template(tmp_path, content, words):
    file = tmp_path / "chat.jinja"
    file.write_bytes(content)
    with pytest.raises(RunFileError) as caught:
        read_template(str(file))
    assert str(caught.value).startswith(f"data.chat_template: {file}")
    assert words in str(caught.value)


def test_the_tokenizers_own_template_and_one_that_wins_over_it(tokenizer):
    with pytest.raises(ModelError, match=r"no chat template.*data\.chat_template"):
        ChatTemplate(tokenizer, None)
    tokenizer.chat_template = ECHO
    assert ChatTemplate(tokenizer, None).render(TURNS, None) == "q</s>a</s>"
    inst = ChatTemplate(tokenizer, template("inst"))
    assert inst.render(TURNS, None) == "<s>[INST] q[/INST]a</s>"
    tokenizer.chat_template = "{{ messages"
    with pytest.raises(RunFileError, match="the tokenizer's chat template, line 1"):
        ChatTemplate(tokenizer, None)


def test_a_tokenizer_with_a_template_for_tools(tokenizer):
    tokenizer.chat_template = {"default": ECHO, "tool_use": "tools:" + ECHO}
    chat = ChatTemplate(tokenizer, None)
    tool = {"type": "function", "function": {"name": "f"}}
    assert chat.render(TURNS, None) == "q</s>a</s>"
    assert chat.render(TURNS, [tool]) == "tools:q</s>a</s>"


def test_a_tokenizer_without_offsets(tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "is_fast", False)
    with pytest.raises(ModelError, match=r"give a tokenizer with a tokenizer\.json"):
        ChatTemplate(tokenizer, ECHO)


def test_todays_date_is_always_the_same(tokenizer):
    text = "{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%Y-%m-%d') }}\n" + ECHO
    chat = ChatTemplate(tokenizer, text)
    assert chat.render(TURNS, None) == "01 Jan 2025|2025-01-01\nq</s>a</s>"
    # What stands in front of it changes nothing else, not even white space at the start.
    spaced = ChatTemplate(tokenizer, "\n  {% if strftime_now is defined %}x{% endif %}" + ECHO)
    plain = ChatTemplate(tokenizer, "\n  {% if messages is defined %}x{% endif %}" + ECHO)
    assert spaced.render(TURNS, None) == plain.render(TURNS, None)


def test_a_refusal_has_the_templates_words(tokenizer):
    chat = ChatTemplate(tokenizer, "{{ raise_exception('No ' + messages[0].role) }}")
    with pytest.raises(TemplateRefusal, match=r"^No user$"):
        chat.render(TURNS, None)
    with pytest.raises(TemplateRefusal, match="no turn"):
        chat.render([], None)
    with pytest.raises(DataError, match="does not take a question: No user; give --raw"):
        chat.question_ids("q")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError|is unsafe|access to at"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError: maximum recursion"),
        ("{% for a in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{{ 'a' * 1001 }}", "it makes a text of more than 1,000 characters"),
        ("{% generation %}{{ 'a' * 1001 }}{% endgeneration %}", "a text of more than 1,000 char"),
    ],
)
def test_what_a_template_may_not_do(tokenizer, text, why, monkeypatch):
    monkeypatch.setattr(template_module, "MOST_CHARACTERS", 1000)
    chat = ChatTemplate(tokenizer, text + ECHO)
    rendered = chat.render_marked if chat.has_marks(None) else chat.render
    with pytest.raises(TemplateRefusal, match=why):
        rendered(TURNS, None)


def test_a_template_nested_beyond_python_is_not_valid():
    nested = "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"
    with pytest.raises(RunFileError, match=r"^x: not a valid Jinja template: nested"):
        check_syntax(nested, "x")


def test_what_is_rendered_is_reported_before_and_after(tokenizer):
    found = []
    data = DataSection(train=SourceSection(path="x", format="messages"), chat_template=ECHO)
    (source,) = data.train_sources

    def report(*names):
        found.append(names)

    encoder = RowEncoder(source, data, tokenizer, field="data.train", rendering=report)
    encoder.encode([Record({"messages": TURNS}, f"x.jsonl:{line}") for line in (1, 2)])
    rows = [row for _, row in found]
    assert list(dict.fromkeys(rows)) == ["a trial chat", "", "x.jsonl:1", "x.jsonl:2"]
    assert set(rows[1::2]) == {""} and "" not in rows[::2]
    assert {name for name, row in found if row} == {"data.chat_template"}
    found.clear()
    ChatTemplate(tokenizer, "{{ raise_exception('no') }}", report)
    assert [row for _, row in found] == ["a trial chat", ""]
    tokenizer.chat_template = ECHO
    assert ChatTemplate(tokenizer, None, report).stop_ids()
    assert found[-2] == ("the chat template of the tokenizer", "a trial chat")


MACRO = (
    "{% macro turn(m) %}{{ m.role }}: {% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}"
)


PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PARTS, r"leaves out what the turns say.*'</s></s>'"),
        (MACRO, "not in a macro or a set block"),
    ],
    ids=["no text", "marks in a macro"],
)
def test_templates_that_a_trial_refuses(tokenizer, text, said):
    with pytest.raises(RunFileError, match=said):
        ChatTemplate(tokenizer, text)


def test_marks_are_seen_however_they_are_written(tokenizer):
    for mark in ("{% generation %}", "{%- generation -%}", "{%generation%}", "{%+ generation %}"):
        text = "{% for m in messages %}{{ m.content }}{% endfor %}"
        assert not ChatTemplate(tokenizer, text).has_marks(None)
        with pytest.raises(RunFileError, match="not the assistant's reply"):
            ChatTemplate(tokenizer, text + mark + "{% endgeneration %}")


def test_the_end_of_a_turn(tokenizer):
    chat = ChatTemplate(tokenizer, ECHO)
    for end in ("words<|im_end|>", "a</tool_call>", "a</s></tool_call>"):
        assert chat.end_of_turn(f"{end}\n") == len(end)
    assert chat.end_of_turn("a</s>b") is None
    assert chat.end_of_turn("words") is None
