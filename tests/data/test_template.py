"""Chat templates: where they come from, what is checked before a run, how a question is put; and
those that come with anygauge: what they render, and which tokens have a loss."""

from __future__ import annotations

import pytest

from anygauge.config.paths import NAMED_TEMPLATES
from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import template as template_module
from anygauge.data.encode import RowEncoder
from anygauge.data.formats import user_chat
from anygauge.data.readers import Record
from anygauge.data.template import (
    FOLDER,
    ChatTemplate,
    TemplateRefusal,
    read_template,
    template_to_save,
)
from anygauge.interface import DataError, ModelError, RunFileError
from tests.helpers.chats import assistant, make_chat_tokenizer, system, template, tool, user
from tests.helpers.masks import shown

TURNS = [user("q"), assistant("a")]
ECHO = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds."}}


@pytest.fixture
def own(tmp_path):
    """A tokenizer of the test's own, without a chat template."""
    return make_chat_tokenizer(tmp_path)


def rendered(tokenizer, text, tools=None):
    return ChatTemplate(tokenizer, text).render(TURNS, tools)[0]


def test_a_name_a_file_or_the_template_itself(tmp_path):
    assert read_template(None) is None
    assert read_template(ECHO) == ECHO
    # Some editors write a byte order mark.
    (tmp_path / "phi").write_text("{{ é }}", encoding="utf-8-sig")
    assert read_template(str(tmp_path / "phi")) == "{{ é }}"
    assert read_template("phi") == (FOLDER / "phi.jinja").read_text()
    for path, said in (
        (tmp_path / "no.jinja", "no such file"),
        (tmp_path, "cannot be read"),
        ("qwen_3", r"one of chatml, .*, phi; did you mean 'qwen3'\?$"),
    ):
        with pytest.raises(RunFileError, match=said):
            read_template(str(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\xff{{", "not UTF-8 at byte 0"),
        (b"one\n{% for m in messages %}", "line 2: not a valid Jinja template"),
        (b"{% generation %}", "line 1: not a valid Jinja template"),
        (b"{{" + b"(" * 5000 + b"1" + b")" * 5000 + b"}}", "a valid Jinja template: nested too"),
    ],
)
def test_files_that_are_no_template(tmp_path, content, words):
    file = tmp_path / "chat.jinja"
    file.write_bytes(content)
    with pytest.raises(RunFileError) as caught:
        read_template(str(file))
    assert str(caught.value).startswith(f"data.chat_template: {file}")
    assert words in str(caught.value)


def test_the_tokenizers_own_template_and_one_that_wins_over_it(own):
    own.chat_template = {"default": ECHO, "tool_use": "tools:" + ECHO}
    assert rendered(own, None) == "q</s>a</s>"
    assert rendered(own, None, tools=[TOOL]) == "tools:q</s>a</s>"
    assert rendered(own, template("inst")) == "<s>[INST] q[/INST]a</s>"
    own.chat_template = "{{ messages"
    with pytest.raises(RunFileError, match="the tokenizer's chat template, line 1"):
        ChatTemplate(own, None)


def test_a_tokenizer_without_offsets(chats, monkeypatch):
    monkeypatch.setattr(type(chats), "is_fast", False)
    with pytest.raises(ModelError, match=r"give a tokenizer with a tokenizer\.json"):
        ChatTemplate(chats, ECHO)


def test_todays_date_is_always_the_same(chats):
    text = "{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%Y-%m-%d') }}\n" + ECHO
    assert rendered(chats, text) == "01 Jan 2025|2025-01-01\nq</s>a</s>"
    # What stands in front of it changes nothing else, not even white space at the start.
    spaced = "\n  {% if NAME is defined %}x{% endif %}" + ECHO
    found = [rendered(chats, spaced.replace("NAME", name)) for name in ("strftime_now", "messages")]
    assert found[0] == found[1]


def test_a_refusal_has_the_templates_words(chats):
    chat = ChatTemplate(chats, "{{ raise_exception('No ' + messages[0].role) }}")
    with pytest.raises(TemplateRefusal, match=r"^No user$"):
        chat.render(TURNS, None)
    with pytest.raises(TemplateRefusal, match="no turn"):
        chat.render([], None)
    with pytest.raises(DataError, match="does not take it: No user; give --raw"):
        chat.question_ids(user_chat("q"))


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
def test_what_a_template_may_not_do(chats, text, why, monkeypatch):
    monkeypatch.setattr(template_module, "MOST_CHARACTERS", 1000)
    with pytest.raises(TemplateRefusal, match=why):
        rendered(chats, text + ECHO)


def test_what_is_rendered_is_reported_before_and_after(own):
    found = []
    data = DataSection(train=SourceSection(path="x", format="messages"), chat_template=ECHO)
    (source,) = data.train_sources

    def report(*names):
        found.append(names)

    encoder = RowEncoder(source, data, own, field="data.train", rendering=report)
    encoder.encode([Record({"messages": TURNS}, f"x.jsonl:{line}") for line in (1, 2)])
    rows = [row for _, row in found]
    assert list(dict.fromkeys(rows)) == ["a trial chat", "", "x.jsonl:1", "x.jsonl:2"]
    assert set(rows[1::2]) == {""} and "" not in rows[::2]
    assert {name for name, row in found if row} == {"data.chat_template"}
    found.clear()
    ChatTemplate(own, "{{ raise_exception('no') }}", report)
    assert [row for _, row in found] == ["a trial chat", ""]
    own.chat_template = ECHO
    assert ChatTemplate(own, None, report).stop_ids()
    assert found[-2] == ("the chat template of the tokenizer", "a trial chat")


MACRO = (
    "{% macro turn(m) %}{{ m.role }}: {% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}"
)
PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}</s>{% endfor %}"
MARKS = ("{% generation %}", "{%- generation -%}", "{%generation%}", "{%+ generation %}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PARTS, r"leaves out what the turns say.*'</s></s>'"),
        (MACRO, "not in a macro or a set block"),
        *((f"{ECHO}{mark}{{% endgeneration %}}", "not the assistant's reply") for mark in MARKS),
    ],
)
def test_templates_that_a_trial_refuses(chats, text, said):
    with pytest.raises(RunFileError, match=said):
        ChatTemplate(chats, text)


def test_the_end_of_a_turn(chats):
    chat = ChatTemplate(chats, ECHO)
    for end in ("words<|im_end|>", "a</tool_call>", "a</s></tool_call>"):
        assert chat.end_of_turn(f"{end}\n") == len(end)
    assert chat.end_of_turn("a</s>b") is None
    assert chat.end_of_turn("words") is None


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """A tokenizer with the tokens of all templates that have a name."""
    tokenizer = make_chat_tokenizer(tmp_path_factory.mktemp("named"))
    more = ["<start_of_turn>", "<end_of_turn>", "<|im_sep|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": more}, False)
    return tokenizer


CHAT = (user(" q"), assistant("a 🙂"), user("r"), assistant(" b "))
RENDERED = {
    "chatml": (
        "<|im_start|>user\n q<|im_end|>\n<|im_start|>assistant\n⟦a 🙂<|im_end|>⟧\n"
        "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n⟦ b <|im_end|>⟧\n"
    ),
    "llama3": (
        "<s><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦a 🙂<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nr<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦b<|eot_id|>⟧"
    ),
    "gemma": (
        "<s><start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\n⟦a 🙂<end_of_turn>⟧\n"
        "<start_of_turn>user\nr<end_of_turn>\n<start_of_turn>model\n⟦b<end_of_turn>⟧\n"
    ),
    "mistral": "<s> [INST]  q [/INST]⟦ a 🙂</s>⟧ [INST] r [/INST]⟦  b </s>⟧",
    "qwen3": (
        "<|im_start|>user\n q<|im_end|>\n<|im_start|>assistant\n⟦a 🙂<|im_end|>⟧\n"
        "<|im_start|>user\nr<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\n b <|im_end|>⟧\n"
    ),
    "phi": (
        "<|im_start|>user<|im_sep|> q<|im_end|><|im_start|>assistant<|im_sep|>⟦a 🙂<|im_end|>⟧"
        "<|im_start|>user<|im_sep|>r<|im_end|><|im_start|>assistant<|im_sep|>⟦ b <|im_end|>⟧"
    ),
}
"""As the models whom the files name publish it."""

SYSTEM = {
    "chatml": "<|im_start|>system\ns<|im_end|>\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|>",
    "mistral": "<s> [INST] s\n\n",
    "qwen3": "<|im_start|>system\ns<|im_end|>\n",
    "phi": "<|im_start|>system<|im_sep|>s<|im_end|>",
}
"""What stands before the first question."""

ENDS = {name: text.rsplit("⟧", 1)[0].rsplit("<", 1)[1] for name, text in RENDERED.items()}
"""The tokens that end a turn, without what opens them."""


def test_each_name_has_its_file():
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.jinja" for name in NAMED_TEMPLATES}


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_a_chat_is_as_published_and_a_question_is_put_as_training_put_it(named, name):
    expected = RENDERED[name]
    assert shown(named, name, *CHAT) == expected
    last = shown(named, name, *CHAT, loss_on="last_turn")
    assert last == expected.replace("⟦", "", 1).replace("⟧", "", 1)
    if name in SYSTEM:
        start = {"llama3": "<s>", "mistral": "<s> [INST] "}.get(name, "")
        with_system = SYSTEM[name] + expected.removeprefix(start)
        assert shown(named, name, system("s"), *CHAT) == with_system
    template = ChatTemplate(named, read_template(name))
    assert expected.startswith(f"{named.decode(template.question_ids(user_chat(' q')))}⟦")
    assert named.convert_ids_to_tokens(template.stop_ids()) == [f"<{ENDS[name]}"]


@pytest.mark.parametrize(
    ("name", "turns", "why"),
    [
        ("gemma", [system("s"), *CHAT], "System role not supported"),
        ("gemma", [user("a"), user("b"), assistant("c")], "Conversation roles must alternate"),
        ("mistral", [user("a"), user("b"), assistant("c")], "After the optional system message"),
        ("mistral", [assistant("a"), user("b"), assistant("c")], "roles must alternate"),
        ("mistral", [user("a"), system("s"), assistant("c")], "Only user and assistant roles"),
        ("phi", [user("a"), tool("b"), assistant("c")], "Only system, user"),
    ],
)
def test_a_chat_that_the_family_does_not_take(named, name, turns, why):
    with pytest.raises(DataError, match=rf"^c\.jsonl:1: the chat template refuses.*{why}"):
        shown(named, name, *turns)


@pytest.mark.parametrize("name", ["chatml", "llama3", "phi"])
def test_two_turns_of_one_role_where_the_family_takes_them(named, name):
    text = shown(named, name, user("a"), user("b"), assistant("c"), assistant("d"))
    assert text.count("⟦") == 2
    assert f"⟦c<{ENDS[name]}⟧" in text and f"⟦d<{ENDS[name]}⟧" in text


@pytest.mark.parametrize("name", [name for name in NAMED_TEMPLATES if name != "qwen3"])
def test_tools_where_the_family_has_none(named, name):
    said = r"^c\.jsonl:1: the assistant calls tools.*does not write tool_calls"
    with pytest.raises(DataError, match=said):
        shown(named, name, user("a"), assistant(None, tool_calls=[CALL]))
    with pytest.raises(DataError, match="the row has tools, but"):
        shown(named, name, *CHAT, tools=[TOOL])


TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"type": "function", "function": {"name": "add", "description": "Adds."}}\n</tools>\n\n'
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)
ONE_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'


@pytest.mark.parametrize(("turns", "words"), [([], "Both."), ([system("s")], None)])
def test_tools_and_calls(named, turns, words):
    called = assistant(words, tool_calls=[CALL, CALL])
    chat = [*turns, user("1+1?"), called, tool("2"), tool("3"), assistant("2 and 3.")]
    said = "s\n\n" if turns else ""
    called = f"{words}\n" if words else ""
    assert shown(named, "qwen3", *chat, tools=[TOOL]) == (
        f"<|im_start|>system\n{said}{TOOLS}<|im_start|>user\n1+1?<|im_end|>\n"
        f"<|im_start|>assistant\n⟦{called}{ONE_CALL}\n{ONE_CALL}<|im_end|>⟧\n"
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n"
        "<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\n2 and 3.<|im_end|>⟧\n"
    )


@pytest.mark.parametrize(
    "reasoned",
    [assistant("4", reasoning_content="2 and 2"), assistant("<think>\n2 and 2\n</think>\n\n4")],
)
def test_reasoning_is_kept_behind_the_last_question_alone(named, reasoned):
    assert shown(named, "qwen3", user("2+2?"), reasoned, user("Again?"), reasoned) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n"
        "<|im_start|>user\nAgain?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n2 and 2\n</think>\n\n4<|im_end|>⟧\n"
    )


def test_a_variable_reaches_every_rendering(named):
    def with_variable(text, value, *turns, name="enable_thinking"):
        return shown(named, text, *turns, chat_template_kwargs={name: value})

    # What the prompt of an answer ends in is not learned.
    off = with_variable("qwen3", False, *CHAT)
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n⟦ b <|im_end|>⟧\n")
    assert with_variable("qwen3", True, *CHAT) == RENDERED["qwen3"]
    marked = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{{ sign }}{% else %}"
        "{% generation %}{{ m.content }}{{ sign }}{{ eos_token }}{% endgeneration %}{% endif %}"
        "{% endfor %}"
    )
    assert with_variable(marked, "!", *TURNS, name="sign") == "q!⟦a!</s>⟧"
    said = r"^data\.chat_template_kwargs: .* does not read 'enable_thinkng'; did you mean 'ena"
    with pytest.raises(RunFileError, match=said):
        with_variable("qwen3", False, *CHAT, name="enable_thinkng")


@pytest.mark.parametrize("value", [False, None, 1.5, 'it\'s "é"\n{{ x }}', [1, {"a": True}]])
def test_a_result_has_the_variables_as_defaults(named, value):
    text = "  {{ value }} {{ value is defined }}{% for m in messages %}{{ value }}{% endfor %}"
    saved = template_to_save(named, text, {"value": value})

    def rendered(template, **kwargs):
        fields = {"chat_template": template, "tokenize": False, **kwargs}
        return named.apply_chat_template([user("a"), assistant("b")], **fields)

    assert rendered(saved) == rendered(text, value=value) == rendered(saved, value=value)
    assert rendered(saved, value="other") == rendered(text, value="other")
    assert template_to_save(named, saved, {"value": value}) == saved
    assert template_to_save(named, text, {}) == text
    assert template_to_save(named, None, {"value": value}) is None


def test_a_base_without_the_token_that_begins_a_text_or_ends_a_turn(own):
    with pytest.raises(DataError, match=r"'<end_of_turn>\\n', not with.*model\.new_special_tokens"):
        shown(own, "gemma", *CHAT)
    own.bos_token = None
    for name in ("llama3", "mistral"):
        assert shown(own, name, *CHAT) == RENDERED[name].removeprefix("<s>")
