"""Rows that are too long, of the wrong type, or written twice; nulls that nobody wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from anygauge.config.schema import SourceSection
from anygauge.data import formats, json_rows, masks, records
from anygauge.data.cache import Cache
from anygauge.data.encode import encode_texts
from anygauge.data.formats import parse
from anygauge.data.records import Record
from anygauge.data.sources import first_records
from anygauge.data.tables import as_written
from anygauge.data.template import ChatTemplate, read_template
from anygauge.interface import DataError, RunFileError
from tests.data.conftest import read
from tests.helpers.chats import assistant, user


def read_file(path: Path, cache: Cache) -> list[Record]:
    return read(SourceSection(path=str(path)), cache)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5", "column 'prompt' holds a number (5); text is expected. Write it as text"),
        ("NaN", "column 'prompt' holds a number (nan); text is expected. Write it as text"),
        ("1e400", "column 'prompt' holds a number (inf); text is expected"),
        ("true", "column 'prompt' holds true or false; text is expected. Correct or remove"),
        ('"a", "prompt": "b"', "the key 'prompt' is written twice in one object; keep one"),
        ('"a", "x": {"b": [{"c": 1, "c": 1}]}', "the key 'c' is written twice in one object"),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_rows_that_say_something_else(source, cache, text, said, suffix):
    rows = ['{"prompt": "q", "completion": "a"}', f'{{"prompt": {text}, "completion": "a"}}']
    content = "\n".join(rows) if suffix == "jsonl" else f"[{', '.join(rows)}]"
    section = source(content, name=f"rows.{suffix}")
    place = ":2" if suffix == "jsonl" else "[1]"
    for reading in (lambda: read(section, cache), lambda: first_records(section, 5, "data.train")):
        with pytest.raises(DataError) as caught:
            for record in reading():
                parse(record, "prompt_completion", section, "data.train")
        assert str(caught.value).startswith(f"{section.path}{place}: {said}")


def test_a_double_key_is_found_in_one_pass():
    compared = 0

    class Key(str):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    keys = [Key(number) for number in [*range(1000), 999]]
    with pytest.raises(records.DoubleKeyError, match="the key '999' is written twice"):
        records.plain_object([(key, None) for key in keys])
    assert compared < 10 * len(keys)


def test_a_number_that_json_lacks_is_no_argument_of_a_call():
    for arguments, said in (
        ({"n": float("nan")}, "a number in the chat is NaN or infinite"),
        ('{"a": 1, "a": 2}', "turn 2.*the key 'a' is written twice"),
    ):
        record = Record({"messages": chat_of(arguments)}, "x.jsonl:3")
        with pytest.raises(DataError, match=rf"^x\.jsonl:3: {said}"):
            parse(record, "messages", SourceSection(path="x"), "data")


def test_a_row_with_too_much_text_is_refused_by_name():
    source = SourceSection(path="x.jsonl")
    half = "é" * (formats.MOST_TEXT // 4)
    record = Record({"prompt": half, "completion": half + "long"}, "x.jsonl:7")
    with pytest.raises(DataError, match=r"^x\.jsonl:7: the row has 2,000,005 bytes of text, at mo"):
        parse(record, "prompt_completion", source, "data.train")
    record = Record({"messages": [user(half), assistant(half)]}, "x.jsonl:8")
    with pytest.raises(DataError, match=r"^x\.jsonl:8: the row has 2,000,\d+ bytes of text"):
        parse(record, "messages", source, "data.train")


def test_a_line_that_is_too_long_is_not_even_read(source, cache, monkeypatch):
    monkeypatch.setattr(json_rows, "MOST_LINE", 100)
    short, long = (json.dumps({"text": "x" * length}) for length in (10, 1000))
    section = source(f"{short}\n\n{long}\n{short}\n")
    said = r"jsonl:3: the row has more than 100 bytes, which is as many as are read; split it"
    for reading in (lambda: read(section, cache), lambda: first_records(section, 3, "f")):
        with pytest.raises(DataError, match=said):
            reading()


def test_texts_are_tokenised_as_many_at_once_as_memory_allows(tokenizer, monkeypatch):
    texts = ["one two", "", "three" * 9, "four", "five", "six"]
    together = encode_texts(tokenizer, texts)
    monkeypatch.setattr(masks, "_AT_ONCE", 10)
    assert encode_texts(tokenizer, texts) == together
    assert [len(part) for part in masks.bounded_parts(texts)] == [2, 1, 2, 1]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".txt"])
def test_a_pipe_is_no_file_of_rows(tmp_path, cache, suffix):
    path = tmp_path / f"rows{suffix}"
    os.mkfifo(path)
    with pytest.raises(DataError, match="cannot be read: it is a named pipe, not a regular file"):
        read_file(path, cache)
    with pytest.raises(RunFileError, match="it is a named pipe"):
        read_template(str(path))


CALLS = [{"city": "Rome", "unit": None}, {"amounts": [{"x": 1}, {"y": [2, None]}]}, {}]


def chat_of(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [user("q"), {"role": "assistant", "tool_calls": [call]}]


def tool_of(name: str) -> dict[str, Any]:
    properties = {name: {"type": "string"}}
    return {"name": "f", "parameters": {"type": "object", "properties": properties}}


ROWS = [{"messages": chat_of(a), "tools": [tool_of(n)]} for a, n in zip(CALLS, "abc", strict=True)]


def arguments_of(records: list[Record]) -> list[Any]:
    chats = [parse(each, "messages", SourceSection(path="x"), "data.train") for each in records]
    for chat, name in zip(chats, "abc", strict=True):
        (tool,) = chat.tools
        assert list(tool["function"]["parameters"]["properties"]) == [name]
    return [chat.turns[1]["tool_calls"][0]["function"]["arguments"] for chat in chats]


def test_a_table_gives_a_call_the_arguments_that_were_written(tmp_path, cache, tokenizer):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), path)
    records = read_file(path, cache)
    # A null that was written cannot be told from one that the table filled in.
    assert arguments_of(records) == [{"city": "Rome"}, CALLS[1], {}]
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls or [] | tojson }}{% endfor %}"
    chat = parse(records[0], "messages", SourceSection(path="x"), "data.train")
    text, _ = ChatTemplate(tokenizer, template).render(chat.turns, chat.tools)
    assert "Rome" in text and "unit" not in text and "amounts" not in text


def test_the_hubs_tables_do_so_too():
    from datasets import Dataset

    rows = Dataset.from_list(ROWS)
    records = [
        Record({key: as_written(value, rows.features[key]) for key, value in row.items()}, "h[0]")
        for row in rows
    ]
    assert arguments_of(records) == [{"city": "Rome"}, CALLS[1], {}]


def test_a_null_that_was_written_as_json_stays(source, tmp_path, cache):
    assert arguments_of(read(source(ROWS), cache)) == CALLS
    # In a column of text too, whatever the file is.
    texts = [{**row, "messages": json.dumps(row["messages"])} for row in ROWS]
    parquet.write_table(pa.Table.from_pylist(texts), tmp_path / "texts.parquet")
    assert arguments_of(read_file(tmp_path / "texts.parquet", cache)) == CALLS
