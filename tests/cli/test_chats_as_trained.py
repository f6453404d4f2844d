"""A named template and its variables, from a run to what it left behind; and runs on tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anygauge.cli import run as command
from anygauge.cli.trained import model_origin, question_ids
from anygauge.data.formats import user_chat
from anygauge.interface import ModelError
from tests.helpers.chats import make_chat_tokenizer, template
from tests.helpers.runs import check_here, run_file, save_tiny, trained_here

ASKED = "<|im_start|>user\nWhat?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_results_are_asked_as_they_were_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    check_here(monkeypatch)
    base = save_tiny(tmp_path / "base")
    make_chat_tokenizer(base)
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "ok"}]
    (tmp_path / "rows.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 8)
    run = trained_here(
        run_file(
            tmp_path,
            model={"name": str(base), "config": None, "tokenizer": None},
            data={
                "train": {"path": str(tmp_path / "rows.jsonl")},
                "chat_template": "qwen3",
                "chat_template_kwargs": {"enable_thinking": False},
            },
            train={"steps": 1},
        )
    )
    assert command(["merge", str(run.folder), "--output", str(tmp_path / "merged")]) == 0
    adapter = run.folder / "adapter"
    saved = (adapter / "chat_template.jinja").read_text()
    assert saved == (tmp_path / "merged" / "chat_template.jinja").read_text()
    for folder in (adapter, tmp_path / "merged"):
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        text = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
        assert text == ASKED
    for folder in (run.folder, tmp_path / "merged"):
        origin = model_origin(str(folder), None, None)
        [ids], stops = question_ids(origin, tokenizer, [user_chat("What?")])
        assert tokenizer.decode(ids) == ASKED
        assert tokenizer.convert_ids_to_tokens(stops) == ["<|im_end|>"]


def test_the_rows_of_a_run_with_a_named_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_chat_tokenizer(tmp_path / "tokenizer")
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "ok"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    path = run_file(tmp_path, data={"train": {"path": str(tmp_path / "rows.jsonl")}})
    thinking = "data.chat_template_kwargs.enable_thinking=false"
    options = ["--set", "data.chat_template=qwen3", "--set", thinking]
    assert command(["data", str(path), *options]) == 0
    assert f"{ASKED}⟦ok<|im_end|>⟧\n" in capsys.readouterr().out
    with pytest.raises(ModelError, match=r"no chat template.*give data\.chat_template \(a name"):
        command(["data", str(path)])


def test_a_run_on_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer: Any = make_chat_tokenizer(tmp_path / "tokenizer")
    ids = tokenizer("a[INST]b</s>", add_special_tokens=False)["input_ids"]
    row = {"input_ids": ids, "labels": [*[-100] * (len(ids) - 2), *ids[-2:]]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    path = run_file(tmp_path, data={"train": {"path": str(tmp_path / "rows.jsonl")}})
    assert command(["data", str(path)]) == 0
    assert "a[INST]⟦b</s>⟧\n" in capsys.readouterr().out
    # How the rows were made is not known: a chat template is used where there is one.
    folder = tmp_path / "run"
    (folder / "adapter").mkdir(parents=True)
    (folder / "run.yaml").write_text(path.read_text())
    origin = model_origin(str(folder), None, str(tmp_path / "tokenizer"))
    assert tokenizer.decode(question_ids(origin, tokenizer, [user_chat("q")])[0][0]) == "<s>q"
    tokenizer.chat_template = template("inst")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert (
        tokenizer.decode(question_ids(origin, tokenizer, [user_chat("q")])[0][0])
        == "<s>[INST] q[/INST]"
    )
