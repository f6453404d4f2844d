"""Real files of the formats that are read; found through ANYGAUGE_DATA."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import first_records, prepare
from anygauge.data.formats import detect_format
from anygauge.data.readers import Record
from tests.helpers.chats import make_chat_tokenizer, template
from tests.helpers.masks import encode, stretches

FOLDER = os.environ.get("ANYGAUGE_DATA", "")

pytestmark = pytest.mark.skipif(not FOLDER, reason="ANYGAUGE_DATA names no folder of real files")


def test_question_and_answer(tokenizer):
    path = Path(FOLDER) / "gsm8k_train.jsonl"
    source = SourceSection(path=str(path), prompt="question", completion="answer", limit=400)
    data = DataSection(train=source, max_length=2048, too_long="drop")
    prepared = prepare(data, tokenizer, seed=0)
    report = prepared.train.report
    assert report.rows == report.used == 400
    first = json.loads(path.read_text(encoding="utf-8").split("\n")[0])
    ids, masked = prepared.train.tokens(0).ids, int(prepared.train.tokens(0).loss_mask.argmax())
    assert tokenizer.decode(ids[1:masked]) == first["question"] + "\n"
    assert tokenizer.decode(ids[masked:-1]) == first["answer"]


def spoken(turn):
    """What a turn of a ShareGPT file becomes in the template."""
    if turn["from"] == "gpt":
        return turn["value"]
    call = json.loads(turn["value"])
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {arguments}}}\n</tool_call>'


def test_tool_calls_of_a_sharegpt_file(tmp_path):
    tokenizer = make_chat_tokenizer(tmp_path)
    path = Path(FOLDER) / "toolcall_sharegpt.json"
    source = SourceSection(path=str(path))
    rows = [dict(one.values) for one in first_records(source, 40, "data.train")]
    assert detect_format(Record(rows[0], "x"), source, "data.train") == "sharegpt"
    sequences, counts = encode(
        tokenizer, "sharegpt", *rows, chat_template=template("chatml"), max_length=10**5
    )
    assert counts.used == len(sequences) == 40
    for row, sequence in zip(rows, sequences, strict=True):
        turns = [turn for turn in row["conversations"] if turn["from"] in ("gpt", "function_call")]
        expected = [f"{spoken(turn)}<|im_end|>" for turn in turns]
        expected[-1] = f"<think>\n\n</think>\n\n{expected[-1]}"
        loss_mask = [text for is_learned, text in stretches(tokenizer, sequence) if is_learned]
        assert loss_mask == expected
