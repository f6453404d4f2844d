"""``anygauge data`` and ``anygauge generate`` on chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from anygauge.cli import run as command
from anygauge.cli.data import example_text
from anygauge.cli.trained import model_origin, question_ids
from anygauge.config.schema import ModelSection
from anygauge.data.encode import Tokens
from anygauge.data.formats import user_chat
from anygauge.interface import DataError, RunFileError
from anygauge.launch import prepare, prepare_endings
from tests.helpers.chats import make_chat_tokenizer
from tests.helpers.runs import check_here, run_file
from tests.helpers.tiny_tokenizer import FIXTURES
from tests.standins.files import File, FileServer

CHATML = FIXTURES / "templates" / "chatml.jinja"

EPOCH = ("data.train.limit=20", "train.steps=null", "train.epochs=1")


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A run file on 40 chats of rising length."""
    make_chat_tokenizer(tmp_path / "tokenizer")
    rows = [
        [
            {"role": "user", "content": f"Count\x1b[31m to {n}"},
            {"role": "assistant", "content": " ".join(map(str, range(n)))},
        ]
        for n in range(1, 41)
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in rows))
    data = {"train": {"path": str(path)}, "chat_template": str(CHATML), "max_length": 256}
    return run_file(tmp_path, data=data)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert command(["data", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_counts_lengths_padding_and_examples(
    chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown(capsys, chats, "--rows", "2", "--set", "data.eval_fraction=0.1")
    assert f"data.train\n  {chats.parent}/chats.jsonl\n    36 of 36 rows; " in out
    assert "data.eval_fraction 0.1\n" in out
    assert "    4 of 4 rows; " in out
    assert "Batches of 4, 2 sequences per forward" in out
    lines = {line.split()[0]: line for line in out.splitlines() if "%" in line}
    assert "(this run)" in lines["padded"]
    padded, grouped = (
        float(lines[name].split("%")[0].split()[-1]) for name in ("padded", "group_by_length")
    )
    assert 0 < grouped < padded < 100
    bins = [line for line in out.splitlines() if " to " in line and "█" in line]
    assert sum(int(line.split()[3]) for line in bins) == 36
    assert out.count("⟦<think>\n\n</think>\n\n0") == out.count("⟦") == 2
    assert "<|im_end|>⟧" in out
    assert "\x1b" not in out, "a row must not change the terminal"


def test_the_run_files_own_layout_is_named(chats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, chats, "--rows", "0", "--set", "data.packing=true")
    assert "packing (this run)" in out
    assert "⟦" not in out


def test_streamed_sources_are_read_in_part(
    chats: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anygauge.cli.data.STREAMED_ROWS", 10)
    epoch = [part for one in EPOCH for part in ("--set", one)]
    out = shown(capsys, chats, "--rows", "0", "--set", "data.streaming=true", *epoch)
    assert "streamed: the first 10 rows of each source" in out
    assert "    10 of 10 rows; " in out
    assert "\nthe run has 5 steps\n" in out


def test_a_dry_run_counts_epochs(
    chats: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_here(monkeypatch)
    for steps, said in ((10, "10 steps, 1 epoch\n"), (20, "20 steps, 2 epochs\n")):
        assert command(["train", str(chats), "--dry-run", "--set", f"train.steps={steps}"]) == 0
        assert f"  {said}" in capsys.readouterr().out


def test_a_remote_source_is_looked_at_without_a_copy(
    chats: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anygauge.cli.data.STREAMED_ROWS", 10)
    check_here(monkeypatch)
    body = (chats.parent / "chats.jsonl").read_bytes()
    with FileServer({"chats.jsonl": File(body=body)}) as server:
        path = f"data.train.path={server.address('chats.jsonl')}?signature=x"
        options = ("--set", path, "--set", "data.streaming=true")
        out = shown(capsys, chats, "--rows", "1", *options)
        assert command(["train", str(chats), "--dry-run", *options]) == 0
        assert (
            "the ranks will read the rows of the hub and of other machines"
            in capsys.readouterr().out
        )
        said = (
            r"train\.epochs: anygauge does not know how many rows http://.*/chats\.jsonl has "
            r"before it reaches the end"
        )
        with pytest.raises(RunFileError, match=said):
            command(["train", str(chats), "--dry-run", *options, "--set", "train.steps=null"])
    assert f"data.train\n  {server.address('chats.jsonl')}\n    10 of 10 rows; " in out
    assert f"{server.address('chats.jsonl')}:1  " in out
    assert not [p for p in (chats.parent / "cache").rglob("*") if p.suffix == ".jsonl"]


def test_errors_name_row_or_field(chats: Path) -> None:
    broken = chats.parent / "broken.jinja"
    broken.write_text("{{ messages")
    with pytest.raises(RunFileError, match=r"broken\.jinja, line 1: not a valid Jinja template"):
        command(["data", str(chats), "--set", f"data.chat_template={broken}"])
    with (chats.parent / "chats.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "q"}]}\n')
    with pytest.raises(DataError, match=r"chats\.jsonl:41: no turn of the assistant"):
        command(["data", str(chats)])


def test_colors_show_what_is_learned(tmp_path: Path) -> None:
    tokenizer: Any = make_chat_tokenizer(tmp_path)
    ids = tokenizer("ab[INST]cd</s>", add_special_tokens=False)["input_ids"]
    from_here = ids.index(tokenizer.convert_tokens_to_ids("[INST]")) + 1
    loss_mask = np.arange(len(ids)) >= from_here
    sequence = Tokens(ids=np.asarray(ids, dtype=np.int32), loss_mask=loss_mask, record=0)
    text = example_text(tokenizer, sequence, in_color=True)
    assert text.plain == "ab[INST]cd</s>"
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styles == {"ab": "dim", "[INST]": "bold blue", "cd": "green", "</s>": "bold green"}
    plain = example_text(tokenizer, sequence, in_color=False)
    console = Console(no_color=True, width=200)
    with console.capture() as capture:
        console.print(plain)
    assert capture.get() == "ab[INST]⟦cd</s>⟧\n"


def test_other_runs_are_asked_through_their_template(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "adapter").mkdir(parents=True)
    path = run_file(tmp_path, data={"train": {"template": "Q: {prompt}\nA: "}})
    (folder / "run.yaml").write_text(path.read_text())
    tokenizer: Any = make_chat_tokenizer(tmp_path / "other")
    [ids], stops = question_ids(
        model_origin(str(folder), None, None), tokenizer, [user_chat("What?")]
    )
    assert (tokenizer.decode(ids), stops) == ("<s>Q: What?\nA: ", [])


FOR_EVER = (
    "{% if 'to 7' in messages[0].content %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}{% endif %}"
)


@pytest.mark.parametrize(
    "options", [(), ("data.streaming=true", "data.packing=true", "train.steps=null")]
)
def test_a_template_that_goes_on_for_ever_is_ended_and_its_row_named(
    chats: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """Also a row of a stream that is read only to count packs."""
    monkeypatch.setattr("anygauge.cli.data.STREAMED_ROWS", 5)
    monkeypatch.setattr(prepare_endings, "RENDERING_LIMIT_S", 2.0)
    path = chats.parent / "loop.jinja"
    path.write_text(FOR_EVER + CHATML.read_text())
    said = r"^data\.chat_template has not rendered .*chats\.jsonl:7 within 2 s, and may loop for"
    with pytest.raises(DataError, match=said):
        settings = (f"data.chat_template={path}", *options)
        command(["data", str(chats), *(part for each in settings for part in ("--set", each))])


def test_a_template_beyond_all_memory_is_ended_with_a_prompt(tmp_path: Path) -> None:
    tokenizer: Any = make_chat_tokenizer(tmp_path)
    tokenizer.chat_template = "{{ 'a' * 10**13 if messages | length == 1 }}" + CHATML.read_text()
    tokenizer.save_pretrained(tmp_path)
    section = ModelSection(name=str(tmp_path))
    said = (
        rf"^the chat template of {tmp_path} took more than 4\.0 GiB to render the prompt\. Correct"
    )
    with pytest.raises(DataError, match=said):
        prepare.render(section, None, [user_chat("What?")])
