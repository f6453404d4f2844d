"""The templates that come with anygauge: what they render, and which tokens have a loss."""

from __future__ import annotations

import pytest

from anygauge.config.paths import NAMED_TEMPLATES
from anygauge.data.template import NAMED, ChatTemplate, read_template, template_to_save
from anygauge.interface import DataError, RunFileError
from tests.helpers.chats import assistant, make_chat_tokenizer, system, tool, user
from tests.helpers.masks import shown

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds."}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer = make_chat_tokenizer(tmp_path_factory.mktemp("named"))
    more = ["<start_of_turn>", "<end_of_turn>", "<|im_sep|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": more}, False)
    return tokenizer


CHAT = (user(" Hi"), assistant("Hello 🙂"), user("And?"), assistant(" Größe "))
RENDERED = {
    "chatml": (
        "<|im_start|>user\n Hi<|im_end|>\n<|im_start|>assistant\n⟦Hello 🙂<|im_end|>⟧\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n⟦ Größe <|im_end|>⟧\n"
    ),
    "llama3": (
        "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello 🙂<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Größe<|eot_id|>⟧"
    ),
    "gemma": (
        "<s><start_of_turn>user\nHi<end_of_turn>\n"
        "<start_of_turn>model\n⟦Hello 🙂<end_of_turn>⟧\n"
        "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n⟦Größe<end_of_turn>⟧\n"
    ),
    "mistral": "<s> [INST]  Hi [/INST]⟦ Hello 🙂</s>⟧ [INST] And? [/INST]⟦  Größe </s>⟧",
    "qwen3": (
        "<|im_start|>user\n Hi<|im_end|>\n<|im_start|>assistant\n⟦Hello 🙂<|im_end|>⟧\n"
        "<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\n Größe <|im_end|>⟧\n"
    ),
    "phi": (
        "<|im_start|>user<|im_sep|> Hi<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦Hello 🙂<|im_end|>⟧"
        "<|im_start|>user<|im_sep|>And?<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦ Größe <|im_end|>⟧"
    ),
}
"""As the models whom the files name publish it."""

SYSTEM = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>",
    "mistral": "<s> [INST] Be brief.\n\n",
    "qwen3": "<|im_start|>system\nBe brief.<|im_end|>\n",
    "phi": "<|im_start|>system<|im_sep|>Be brief.<|im_end|>",
}
"""What stands before the first question."""

ENDS = {
    **dict.fromkeys(("chatml", "qwen3", "phi"), "<|im_end|>"),
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
}


def test_each_name_has_its_file():
    assert {path.name for path in NAMED.iterdir()} == {f"{name}.jinja" for name in NAMED_TEMPLATES}
    assert set(RENDERED) == set(ENDS) == set(NAMED_TEMPLATES)


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_a_chat_of_several_turns(tokenizer, name):
    assert shown(tokenizer, name, *CHAT) == RENDERED[name]
    last = shown(tokenizer, name, *CHAT, loss_on="last_turn")
    assert last == RENDERED[name].replace("⟦", "", 1).replace("⟧", "", 1)


@pytest.mark.parametrize("name", SYSTEM)
def test_a_system_turn(tokenizer, name):
    start = {"llama3": "<s>", "mistral": "<s> [INST] "}.get(name, "")
    expected = SYSTEM[name] + RENDERED[name].removeprefix(start)
    assert shown(tokenizer, name, system("Be brief."), *CHAT) == expected


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_a_question_is_put_as_training_put_it(tokenizer, name):
    template = ChatTemplate(tokenizer, read_template(name))
    prompt = tokenizer.decode(template.question_ids(" Hi"))
    assert RENDERED[name].startswith(f"{prompt}⟦")
    assert tokenizer.convert_ids_to_tokens(template.stop_ids()) == [ENDS[name]]


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
def test_a_chat_that_the_family_does_not_take(tokenizer, name, turns, why):
    with pytest.raises(DataError, match=rf"^c\.jsonl:1: the chat template refuses.*{why}"):
        shown(tokenizer, name, *turns)


@pytest.mark.parametrize("name", ["chatml", "llama3", "phi"])
def test_two_turns_of_one_role_where_the_family_takes_them(tokenizer, name):
    text = shown(tokenizer, name, user("a"), user("b"), assistant("c"), assistant("d"))
    assert text.count("⟦") == 2
    assert f"⟦c{ENDS[name]}⟧" in text and f"⟦d{ENDS[name]}⟧" in text


@pytest.mark.parametrize("name", [name for name in NAMED_TEMPLATES if name != "qwen3"])
def test_tools_where_the_family_has_none(tokenizer, name):
    said = r"^c\.jsonl:1: the assistant calls tools.*does not write tool_calls"
    with pytest.raises(DataError, match=said):
        shown(tokenizer, name, user("a"), assistant(None, tool_calls=[CALL]))
    with pytest.raises(DataError, match="the row has tools, but"):
        shown(tokenizer, name, *CHAT, tools=[TOOL])


TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"type": "function", "function": {"name": "add", "description": "Adds."}}\n</tools>\n\n'
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)
ONE_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "ü"}}\n</tool_call>'


@pytest.mark.parametrize(("turns", "words"), [([], "Both."), ([system("Be brief.")], None)])
def test_tools_and_calls(tokenizer, turns, words):
    chat = [
        *turns,
        user("1+1?"),
        assistant(words, tool_calls=[CALL, CALL]),
        tool("2"),
        tool("3"),
        assistant("2 and 3."),
    ]
    said = "Be brief.\n\n" if turns else ""
    called = f"{words}\n" if words else ""
    assert shown(tokenizer, "qwen3", *chat, tools=[TOOL]) == (
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
def test_reasoning_is_kept_behind_the_last_question_alone(tokenizer, reasoned):
    assert shown(tokenizer, "qwen3", user("2+2?"), reasoned, user("Again?"), reasoned) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n"
        "<|im_start|>user\nAgain?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n2 and 2\n</think>\n\n4<|im_end|>⟧\n"
    )


def test_a_variable_reaches_every_rendering(tokenizer):
    off = {"enable_thinking": False}
    text = shown(tokenizer, "qwen3", *CHAT, chat_template_kwargs=off)
    # What the prompt of an answer ends in is not learned.
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n⟦ Größe <|im_end|>⟧\n")
    on = shown(tokenizer, "qwen3", *CHAT, chat_template_kwargs={"enable_thinking": True})
    assert on == RENDERED["qwen3"]
    template = ChatTemplate(tokenizer, read_template("qwen3"), kwargs=off)
    prompt = tokenizer.decode(template.question_ids("Hi"))
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.convert_ids_to_tokens(template.stop_ids()) == ["<|im_end|>"]


def test_a_variable_reaches_generation_marks(tokenizer):
    text = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{{ sign }}{% else %}"
        "{% generation %}{{ m.content }}{{ sign }}{{ eos_token }}{% endgeneration %}{% endif %}"
        "{% endfor %}"
    )
    signed = {"chat_template_kwargs": {"sign": "!"}}
    assert shown(tokenizer, text, user("a"), assistant("b"), **signed) == "a!⟦b!</s>⟧"


def test_a_variable_that_the_template_does_not_read(tokenizer):
    said = r"^data\.chat_template_kwargs: .* does not read 'enable_thinkng'; did you mean 'ena"
    with pytest.raises(RunFileError, match=said):
        shown(tokenizer, "qwen3", *CHAT, chat_template_kwargs={"enable_thinkng": False})


@pytest.mark.parametrize("value", [False, None, 1.5, 'it\'s "é"\n{{ x }}', [1, {"a": True}]])
def test_a_result_has_the_variables_as_defaults(tokenizer, value):
    text = "  {{ value }} {{ value is defined }}{% for m in messages %}{{ value }}{% endfor %}"
    saved = template_to_save(tokenizer, text, {"value": value})

    def rendered(template, **kwargs):
        fields = {"chat_template": template, "tokenize": False, **kwargs}
        return tokenizer.apply_chat_template([user("a"), assistant("b")], **fields)

    assert rendered(saved) == rendered(text, value=value) == rendered(saved, value=value)
    assert rendered(saved, value="other") == rendered(text, value="other")
    assert template_to_save(tokenizer, saved, {"value": value}) == saved
    assert template_to_save(tokenizer, text, {}) == text
    assert template_to_save(tokenizer, None, {"value": value}) is None


def test_a_base_without_the_token_that_ends_a_turn(chats):
    with pytest.raises(DataError, match=r"'<end_of_turn>\\n', not with.*model\.new_special_tokens"):
        shown(chats, "gemma", *CHAT)


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_a_base_without_a_token_that_begins_a_text(tmp_path, name):
    tokenizer = make_chat_tokenizer(tmp_path)
    tokenizer.bos_token = None
    assert shown(tokenizer, name, *CHAT) == RENDERED[name].removeprefix("<s>")


def test_a_misspelt_name(tmp_path):
    with pytest.raises(RunFileError, match=r"one of chatml, .*, phi; did you mean 'qwen3'\?$"):
        read_template("qwen_3")
    (tmp_path / "phi").write_text("{{ messages }}")
    assert read_template(str(tmp_path / "phi")) == "{{ messages }}"
    assert read_template("phi") == (NAMED / "phi.jinja").read_text()
