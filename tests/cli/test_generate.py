"""``anygauge generate``: models that are not there; prompts, files of prompts, and chats."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import PretrainedConfig

from anygauge.cli import run as command
from anygauge.cli.trained import model_origin
from anygauge.config.schema import ModelSection
from anygauge.interface import FULL, DataError, ModelError, UsageError
from anygauge.util.files import write_text
from tests.helpers.chats import assistant, make_chat_tokenizer, template, user
from tests.standins.hub import Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has nothing, and a machine without copies."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with Hub({}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        yield hub


def refused(model: str) -> str:
    with pytest.raises((ModelError, UsageError)) as error:
        command(["generate", model, "--prompt", "hello"])
    return str(error.value)


def test_a_path_that_is_no_folder_is_answered_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub
) -> None:
    (tmp_path / "runs/my-run").mkdir(parents=True)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    assert f"looked at {tmp_path}/runs/nope); runs has my-run; give a" in refused("runs/nope")
    assert "; did you mean 'my-run'?" in refused("runs/my-rum")
    assert "./file: a file, not a folder" in refused("./file")
    for path in ("./nope", "/nope/at/all", "~/nope-at-all", "a/b/c"):
        assert f"{path}: no such folder (looked at " in refused(path)
    assert hub.requests == []


def test_a_name_is_asked_of_the_hub_once(hub: Hub) -> None:
    message = refused("nobody/no-such-model")
    assert message.startswith("MODEL: 'nobody/no-such-model' is not a folder here (looked at ")
    assert [request.path for request in hub.requests] == ["/api/models/nobody/no-such-model"]


def test_a_hub_that_does_not_answer_is_given_up_shortly() -> None:
    import huggingface_hub

    from anygauge.models import hub as module
    from anygauge.models.hub import download_requests, fetch

    (want,) = download_requests(ModelSection(name="nobody/no-such-model"))
    limits: list[float] = []

    def model_info(self: Any, name: str, *, timeout: float, **options: Any) -> None:
        limits.append(timeout)
        raise ConnectionError("no route to the hub")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        with pytest.raises(ModelError, match=r"is not a folder here .* no route to the hub"):
            fetch(want)
    assert limits == [module.ANSWER_S] and limits[0] <= 5


def test_a_checkpoint_is_an_adapter_wherever_it_lies(tmp_path: Path) -> None:
    adapter = tmp_path / "step-00000002" / "adapter"
    write_text(adapter / "adapter_config.json", '{"base_model_name_or_path": "owner/name"}')
    origin = model_origin(str(adapter.parent), None, None)
    assert (origin.section.name, origin.adapter) == ("owner/name", adapter)


# -- prompts, files of them, chats; what the model itself does is made up --------------------------


class Talk:
    """A model that answers each prompt with its next line.

    Attributes:
        asked: each prompt as text; of the base alone, behind ``base: ``.
        answers: gives its lines; an error is raised.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.is_base = folder, False
        self.tokenizer: Any = make_chat_tokenizer(folder)
        self.config = PretrainedConfig(vocab_size=512)
        self.asked: list[str] = []
        self.answers = Mock()

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self.is_base = True
        yield
        self.is_base = False

    def answer(self, model: Any, tokenizer: Any, ids: Any, *, stream: bool, **options: Any) -> str:
        self.asked.append("base: " * self.is_base + self.tokenizer.decode(ids))
        found = str(self.answers())
        if stream:
            print(found)
        return found

    def generate(self, *options: str, answers: Sequence[str | BaseException]) -> list[str]:
        """What it was asked by a command."""
        self.answers, self.asked = Mock(side_effect=answers), []
        assert command(["generate", str(self.folder), *options]) == 0
        assert self.answers.call_count == len(answers)
        return self.asked


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """A model in a folder with a chat template, and an adapter beside it."""
    import anygauge
    from anygauge.models import generate

    @contextlib.contextmanager
    def open_backend(name: str) -> Iterator[Any]:
        dtypes = frozenset({"float32"})
        placement = SimpleNamespace(seed=lambda seed: None, dtypes=dtypes, device="host")
        yield SimpleNamespace(placement=placement, support=lambda name: FULL, attention="eager")

    talk = Talk(tmp_path / "model")
    talk.tokenizer.chat_template = template("inst")
    talk.tokenizer.save_pretrained(talk.folder)
    write_text(tmp_path / "adapter/adapter_config.json", '{"base_model_name_or_path": "model"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(anygauge, "open_backend", open_backend)
    monkeypatch.setattr(generate, "load_for_inference", lambda *_, **options: talk)
    monkeypatch.setattr(generate, "generate", talk.answer)
    return talk


def at_a_terminal(monkeypatch: pytest.MonkeyPatch, typed: list[str | type[BaseException]]) -> None:
    """Have these lines typed; of an error, its key is pressed."""
    monkeypatch.setattr("builtins.input", Mock(side_effect=typed))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))


@pytest.mark.parametrize("answer", ["", "yes"])
def test_an_empty_answer_is_told(
    answer: str, talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A file that an editor began with a byte order mark.
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffhello\n"))
    assert talk.generate("--raw", answers=[answer]) == ["<s>hello"]
    err = capsys.readouterr().err
    assert ("the model ended it with its first token" in err) == (not answer)


def test_base_and_adapter_answer_one_prompt(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--adapter", "adapter", "--compare", "--prompt", "a"]
    asked = talk.generate(*options, answers=["b", "c"])
    assert asked == ["base: <s>[INST] a[/INST]", "<s>[INST] a[/INST]"]
    assert capsys.readouterr().out == "base:\nb\nadapter:\nc\n"


def test_in_a_chat_base_and_adapter_keep_what_each_said(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_a_terminal(monkeypatch, ["a", " ", "b", "c", KeyboardInterrupt, "/new", "d", "/quit"])
    answers = ["x", "y", KeyboardInterrupt(), "z", "u", "v", "w"]
    first, base = "<s>[INST] a[/INST]", "base: <s>[INST] a[/INST]"
    assert talk.generate("--adapter", "adapter", "--compare", answers=answers) == [
        *(base, first, f"{base}x</s>[INST] b[/INST]"),
        *(f"{base}x</s>[INST] c[/INST]", f"{first}y</s>[INST] c[/INST]"),
        *("base: <s>[INST] d[/INST]", "<s>[INST] d[/INST]"),
    ]
    assert capsys.readouterr().err.startswith("A chat: /new begins again, /quit or Ctrl-D ends it")


def test_without_a_template_prompts_stand_alone(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at_a_terminal(monkeypatch, ["a", "b", EOFError])
    assert talk.generate("--raw", answers=["x", "y"]) == ["<s>a", "<s>b"]
    assert capsys.readouterr().err.endswith("each prompt stands alone\n")


def test_prompts_of_files(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    write_text("some.txt", "a b\n\nc\nd\n")
    asked = talk.generate("--raw", "--prompts", "some.txt", answers="xyz")
    assert asked == ["<s>a b", "<s>c", "<s>d"]
    written = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert written[0] == {"prompt": "a b", "answer": "x"} and len(written) == 3
    turns = [user("a"), assistant("x"), user("é")]
    rows = [{"prompt": "a", "completion": "of training"}, {"messages": turns}]
    write_text("some.jsonl", "\n".join(map(json.dumps, rows)))
    options = ["--prompts", "some.jsonl", "--output", "new.jsonl", "--adapter", "adapter"]
    asked = talk.generate(*options, "--compare", answers="uvxy")
    assert asked[3] == "<s>[INST] a[/INST]x</s>[INST] é[/INST]"
    assert [json.loads(line) for line in Path("new.jsonl").read_text().splitlines()] == [
        {"prompt": "a", "base": "u", "adapter": "v"},
        {"messages": turns, "base": "x", "adapter": "y"},
    ]
    # What was answered before Ctrl-C is there.
    talk.answers = Mock(side_effect=["u", KeyboardInterrupt()])
    assert command(["generate", "model", "--raw", "--prompts", "some.txt"]) == 130
    assert capsys.readouterr().out == '{"prompt": "a b", "answer": "u"}\n'


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--prompts a.jsonl --prompt b", "--prompts .*: give a file that is here, without --pr"),
        ("--prompts missing.txt", "--prompts missing.txt: give a file that is here"),
        ("--prompts a.jsonl --output a.jsonl", r"--output a\.jsonl: name a new file"),
        ("--prompt a --output b.jsonl", r"--output b\.jsonl: .* give --prompts FILE"),
        ("--prompt a --compare", "--compare: there is no adapter to compare .* --adapter FOLDER"),
        ("--prompts a.jsonl", r"a\.jsonl:2: no column 'prompt'; columns here: question"),
        ("--prompts b.jsonl", r"b\.jsonl:1: the last turn is the assistant's; remove it to ask"),
        ("--prompts c.jsonl --raw", r"--raw: c\.jsonl:1 has turns or tools, which need a template"),
        ("--prompts e.txt", r"e\.txt is empty; at least one prompt is needed"),
    ],
)
def test_what_cannot_be_asked(options: str, words: str, talk: Talk) -> None:
    write_text("a.jsonl", '{"prompt": "a"}\n{"question": "b"}\n')
    write_text("b.jsonl", json.dumps({"messages": [user("a"), assistant("b")]}))
    write_text("c.jsonl", json.dumps({"messages": [user("a"), assistant("b"), user("c")]}))
    write_text("e.txt", "\n\n")
    with pytest.raises((DataError, UsageError), match=words):
        talk.generate(*options.split(), answers=[])
    assert talk.asked == []
