"""Rows of each kind of file: as they were written, and what is said where that cannot be used."""

from __future__ import annotations

import bz2
import functools
import gzip
import json
import lzma
import os
import sys
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import formats, loss_masks, prepare, readers
from anygauge.data.cache import Cache
from anygauge.data.encode import encode_texts
from anygauge.data.formats import parse
from anygauge.data.readers import Record
from anygauge.data.sources import open_source
from anygauge.data.template import ChatTemplate, read_template
from anygauge.interface import DataError, RunFileError
from tests.data.conftest import read
from tests.helpers.chats import assistant, user


def values(records):
    return [dict(record.values) for record in records]


zstd = functools.partial(pa.compress, codec="zstd", asbytes=True)
gz = functools.partial(gzip.compress, mtime=0)  # processes of one session name cases alike
PACKERS = {
    "": bytes,
    ".gz": gz,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda raw: b"".join(map(zstd, (raw[:9], raw[9:]))),
}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        (
            "data.jsonl",
            "\ufeff" + '{"a": 1}\r\n\n   \n{"a": {"b": null}}\n\t{"a": "é\u2028"}\n\n',
            {":1": {"a": 1}, ":4": {"a": {"b": None}}, ":5": {"a": "é\u2028"}},
        ),
        ("data.json", '\ufeff[{"a": 1}, {"a": 2}]', {"[0]": {"a": 1}, "[1]": {"a": 2}}),
        ("data.json", '\n [\n {"a": 1},\n{"a": 2}]\n', {"[0]": {"a": 1}, "[1]": {"a": 2}}),
        ("data.json", '\ufeff{"a": 1}\n{"a": 2}\n', {":1": {"a": 1}, ":2": {"a": 2}}),
        ("data.txt", "a\r\nb\r\n\r\n\r\nc\n", {":1": {"body": "a\nb"}, ":5": {"body": "c"}}),
        ("data.txt", "\none\ntwo", {":2": {"body": "one"}, ":3": {"body": "two"}}),
        (
            "data.csv",
            '\ufeffid,text,note\n007,"a ""b"", c",\n1e3,"two\nlines",NA\n,é,null\n',
            {
                ":2": {"id": "007", "text": 'a "b", c', "note": ""},
                ":3": {"id": "1e3", "text": "two\nlines", "note": "NA"},
                ":4": {"id": "", "text": "é", "note": "null"},
            },
        ),
    ],
)
def test_rows_are_as_written(source, cache, suffix, name, content, rows):
    column = {"text": "body"} if name == "data.txt" else {}
    section = source(PACKERS[suffix](content.encode()), name=name + suffix, **column)
    records = read(section, cache)
    assert values(records) == list(rows.values())
    assert [record.origin for record in records] == [section.path + mark for mark in rows]
    cut = section.model_copy(update={"limit": 1})
    assert values(read(cut, cache)) == values(records)[:1]


@given(
    rows=st.lists(
        st.sampled_from(["", " \v", "\f", '{"a": 1}', ' {"b": "xyz"}\f', "\r"]), max_size=30
    ),
    limit=st.none() | st.integers(1, 9),
    ends=st.booleans(),
    marked=st.booleans(),
)
def test_lines_that_hold_more_than_blanks_are_rows(tmp_path_factory, rows, limit, ends, marked):
    path = tmp_path_factory.mktemp("lines") / "data.jsonl"
    body = "\n".join([*rows, *([""] if ends else [])])
    path.write_bytes(body.encode("utf-8-sig" if marked else "utf-8"))
    expected = [
        (f"{path}:{number}", json.loads(line.strip()))
        for number, line in enumerate(rows, start=1)
        if line.strip()
    ]
    if expected:
        with Cache(None) as cache:
            records = read(SourceSection(path=str(path), limit=limit), cache)
        assert [(each.origin, each.values) for each in records] == expected[:limit]


ONE_OBJECT = "one JSON object per line is expected, but this line is not valid JSON"
NO_ROW = "is empty; at least one row is needed"


@pytest.mark.parametrize(
    ("kind", "content", "said"),
    [
        ("jsonl", '{"a": 1}\n\n{"a": }\n', f"data.jsonl:3: {ONE_OBJECT} (Expecting value at column 7)"),  # noqa: E501
        ("jsonl", '{"a": "\tb"}\n', "not valid JSON (Invalid control character at column 8)"),
        ("jsonl", '{"a": 1}\n[1]\n', "data.jsonl:2: a JSON object is expected, found a list"),
        ("jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "data.jsonl:2: not UTF-8 at byte 16 of the file (0xff)"),  # noqa: E501
        ("jsonl", '{"a": 1}'.encode("utf-16"), "it seems to be UTF-16; save the file as UTF-8"),
        ("jsonl", "[" * 100_000 + "\n", f"data.jsonl:1: {ONE_OBJECT} (nested too deeply)"),
        ("jsonl", " \n\n", NO_ROW),
        ("jsonl", "", NO_ROW),
        ("json", '{"rows": [1]}', "a list of objects is expected at the top, found an object with the keys 'rows'"),  # noqa: E501
        ("json", '{\n"rows": [1]}', "found an object with the keys 'rows'"),
        ("json", '\n{"a": 1, "a": 2}', "data.json: the key 'a' is written twice in one object"),
        ("json", "[1]", "data.json[0]: a JSON object is expected, found a number"),
        ("json", '[{"a": 1},\n{"a" 2}]', "data.json:2: not valid JSON"),
        ("json", "[]", "holds an empty list; at least one row is needed"),
        ("json", " ", NO_ROW),
        ("json", b'[{"a":\n"\xff"}]', "data.json:2: not UTF-8 at byte 8"),
        ("json", '{"a": 1}\n{"a": }\n', f"data.json:2: {ONE_OBJECT}"),
        ("csv", "a,b\n1,2\n3\n", "data.csv cannot be read: CSV parse error: Row #3: Expected 2 columns, got 1"),  # noqa: E501
        ("csv", b"\xff,b\n1,2\n", "data.csv cannot be read: 'utf-8' codec can't decode byte 0xff"),
        ("csv", "a,a\n1,2\n", "the header names the column 'a' more than once"),
        ("csv", b"a,b\n1,\xff\n", "data.csv cannot be read: "),
        ("csv", "a,b\n", NO_ROW),
        ("csv", "", NO_ROW),
        ("txt", "\n\n", NO_ROW),
        ("parquet", b"PAR1", "data.parquet cannot be read: "),
        ("arrow", b"{}", "data.arrow cannot be read: "),
        ("jsonl.gz", gz(b"{}\n" * 999)[:-9], "data.jsonl.gz cannot be read: "),
        ("jsonl.gz", b"{}", "data.jsonl.gz cannot be read: Not a gzipped file"),
        ("csv.xz", b"a,b\n", "data.csv.xz cannot be read: "),
        ("json.zst", b"[]", "data.json.zst cannot be read: "),
        ("txt.zst", zstd(b"one\n" * 99)[:-2], "data.txt.zst cannot be read: "),
        ("jsonl.gz", gz(b'{"a": 1}\nno'), f"data.jsonl.gz:2: {ONE_OBJECT}"),
        ("xlsx", "x", "data.train.path takes .json, .jsonl, .csv, .parquet, .arrow, .txt, these compressed (.gz, .zst, ...), or the name of a data set on the hub"),  # noqa: E501
    ],
)  # fmt: skip
def test_malformed_files(source, cache, kind, content, said):
    with pytest.raises(DataError) as caught:
        read(source(content, name=f"data.{kind}"), cache)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_limit_leaves_the_rest_unread(source, cache):
    records = read(source('{"a": 1}\n{"a": 2}\nno json\n', limit=2), cache)
    assert values(records) == [{"a": 1}, {"a": 2}]


def test_a_file_that_changes_while_it_is_read(source, tokenizer, monkeypatch):
    section = source([{"text": "a"}, {"text": "b"}])
    module = sys.modules[prepare.__module__]
    write = module.write_table

    def changing(*given):
        source([{"text": "a"}, {"text": "b"}, {"text": "c"}])
        return write(*given)

    monkeypatch.setattr(module, "write_table", changing)
    data = DataSection(train=section, max_length=64, cache="off")
    with pytest.raises(DataError, match=r"data\.jsonl changed while it was being read; start"):
        prepare(data, tokenizer, seed=0)


def test_a_stream_of_a_file_that_changes(source):
    opened = open_source(source([{"text": "a"}] * 9), "data.train")
    rows = opened.rows(0)
    next(rows)
    source([{"text": "a"}] * 10)
    for again in (rows, opened.rows(0)):
        with pytest.raises(DataError, match=r"data\.jsonl changed while it was being read; start"):
            list(again)


VIEW = pa.string_view()
WORD = pa.dictionary(pa.int32(), pa.string())
TURNS = pa.list_(pa.struct([("role", WORD), ("content", pa.string())]))


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (TURNS, [[{"role": "user", "content": "hi"}, {"role": "assistant"}], [], None]),
        (TURNS, [[{"role": "user"}], [{"role": "tool"}], [{"role": "assistant"}]]),
        (WORD, ["a", "b", "c", None]),
        (VIEW, ["one", None]),
        (pa.list_(VIEW), [["one"], ["two", None]]),
        (pa.list_(VIEW, 1), [["one"], ["two"]]),
        (pa.struct([("a", VIEW)]), [{"a": "one"}, {"a": "two"}]),
        (pa.map_(pa.string(), VIEW), [[("k", "one")], []]),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 256])
def test_parquet_of_any_type(kind, rows, batch, tmp_path, cache, monkeypatch):
    """A field that is null was not written."""
    monkeypatch.setattr(readers, "BATCH", batch)
    path = str(tmp_path / "data.parquet")
    parquet.write_table(pa.table({"a": pa.array(rows, kind)}), path, row_group_size=2)
    records = read(SourceSection(path=path), cache)
    assert [(one.origin, one.values["a"]) for one in records] == [
        (f"{path}[{number}]", row) for number, row in enumerate(rows)
    ]


@pytest.mark.parametrize("write", [pa.ipc.new_file, pa.ipc.new_stream])
def test_both_layouts_of_arrow(write, tmp_path, cache):
    rows, path = pa.table({"a": ["x", "007", None], "n": [[{"b": 1}], [], None]}), "data.arrow"
    with write(str(tmp_path / path), rows.schema) as writer:
        writer.write_table(rows, max_chunksize=2)
    records = read(SourceSection(path=str(tmp_path / path)), cache)
    assert values(records) == rows.to_pylist()
    assert records[2].origin.endswith("data.arrow[2]")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".txt", ".csv", ".parquet"])
def test_a_file_that_is_not_there(tmp_path, cache, suffix):
    (tmp_path / f"nowhere1{suffix}").touch()
    with pytest.raises(DataError, match=rf"nowhere.*: no such file .*mean 'nowhere1{suffix}'"):
        read(SourceSection(path=str(tmp_path / f"nowhere{suffix}")), cache)


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
    with pytest.raises(DataError) as caught:
        for record in read(section, cache):
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
    with pytest.raises(readers.DoubleKeyError, match="the key '999' is written twice"):
        readers.plain_object([(key, None) for key in keys])
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
    half = "é" * (formats.MOST_TEXT // 4)
    for form, row in (
        ("prompt_completion", {"prompt": half, "completion": half + "long!"}),
        ("messages", {"messages": [user(half), assistant(half)]}),
    ):
        said = r"^x\.jsonl:7: the row has 2,000,\d+ bytes of text, at most 2,000,000"
        with pytest.raises(DataError, match=said):
            parse(Record(row, "x.jsonl:7"), form, SourceSection(path="x.jsonl"), "data.train")


def test_a_line_that_is_too_long_is_not_even_read(source, cache, monkeypatch):
    monkeypatch.setattr(readers, "MOST_LINE", 100)
    short, long = (json.dumps({"text": "x" * length}) for length in (10, 1000))
    section = source(f"{short}\n\n{long}\n{short}\n")
    said = r"jsonl:3: the row has more than 100 bytes, which is as many as are read; split it"
    with pytest.raises(DataError, match=said):
        read(section, cache)
    monkeypatch.setattr(readers, "_CSV_HEADER", 4)
    with pytest.raises(DataError, match=r"csv:1: the header cannot be read; .* at most 4 bytes"):
        read(source("one,two\n1,2\n", name="data.csv"), cache)


def test_texts_are_tokenized_as_many_at_once_as_memory_allows(tokenizer, monkeypatch):
    texts = ["one two", "", "three" * 9, "four", "five", "six"]
    together = encode_texts(tokenizer, texts)
    monkeypatch.setattr(loss_masks, "_AT_ONCE", 10)
    assert encode_texts(tokenizer, texts) == together
    assert [len(part) for part in loss_masks.bounded_parts(texts)] == [2, 1, 2, 1]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".txt"])
def test_a_pipe_is_no_file_of_rows(tmp_path, cache, suffix):
    path = tmp_path / f"rows{suffix}"
    os.mkfifo(path)
    with pytest.raises(DataError, match="cannot be read: it is a named pipe, not a regular file"):
        read(SourceSection(path=str(path)), cache)
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
        assert chat.tools == ({"type": "function", "function": tool_of(name)},)
    return [chat.turns[1]["tool_calls"][0]["function"]["arguments"] for chat in chats]


def of_hub(rows: list[dict[str, Any]], **options: Any) -> list[Record]:
    """Rows as a data set of the hub holds them."""
    from datasets import Dataset

    batches = Dataset.from_list(rows, **options).with_format("arrow").iter(2)
    return [row.parse("h[{}]") for row in readers.rows_of(readers.with_row_numbers(batches), 0)]


def test_a_table_gives_a_call_the_arguments_that_were_written(tmp_path, cache, tokenizer):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), path)
    records = read(SourceSection(path=str(path)), cache)
    # A null that was written cannot be told from one that the table filled in.
    for each in (records, of_hub(ROWS)):
        assert arguments_of(each) == [{"city": "Rome"}, CALLS[1], {}]
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls or [] | tojson }}{% endfor %}"
    chat = parse(records[0], "messages", SourceSection(path="x"), "data.train")
    text, _ = ChatTemplate(tokenizer, template).render(chat.turns, chat.tools)
    assert "Rome" in text and "unit" not in text and "amounts" not in text


def test_a_null_that_was_written_as_json_stays(source, tmp_path, cache):
    assert arguments_of(read(source(ROWS), cache)) == CALLS
    # In a column of text too, whatever the file is.
    texts = [{**row, "messages": json.dumps(row["messages"])} for row in ROWS]
    parquet.write_table(pa.Table.from_pylist(texts), tmp_path / "texts.parquet")
    assert arguments_of(read(SourceSection(path=str(tmp_path / "texts.parquet")), cache)) == CALLS
    mixed = [{"a": [{"b": None}, 3, "007"]}, {"a": None}]
    assert [record.values for record in of_hub(mixed, on_mixed_types="use_json")] == mixed
