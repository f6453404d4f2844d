"""Each kind of file: its records as they were written, and what is said where it is malformed."""

from __future__ import annotations

import bz2
import functools
import gzip
import json
import lzma
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import prepare
from anygauge.data.cache import Cache
from anygauge.data.sources import first_records, open_source
from anygauge.interface import DataError
from tests.data.conftest import read


def values(records):
    return [dict(record.values) for record in records]


def places(records):
    return [record.origin.rpartition("/")[2] for record in records]


def failure(source, cache):
    with pytest.raises(DataError) as caught:
        read(source, cache)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
        ("data.json", '[{"a": 1}, {"a": 2}]', {"[0]": {"a": 1}, "[1]": {"a": 2}}),
        ("data.json", '\n [\n {"a": 1},\n{"a": 2}]\n', {"[0]": {"a": 1}, "[1]": {"a": 2}}),
        ("data.json", '\ufeff[{"a": 1}]', {"[0]": {"a": 1}}),
        ("data.json", '\ufeff{"a": 1}\n{"a": 2}\n', {":1": {"a": 1}, ":2": {"a": 2}}),
        (
            "data.txt",
            "one\r\ntwo\r\n\r\n\r\nthree\n",
            {":1": {"body": "one\ntwo"}, ":5": {"body": "three"}},
        ),
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
    packed = PACKERS[suffix](content.encode())
    records = read(source(packed, name=name + suffix, **column), cache)
    assert values(records) == list(rows.values())
    assert places(records) == [name + suffix + mark for mark in rows]


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
        (number, json.loads(line.strip()))
        for number, line in enumerate(rows, start=1)
        if line.strip()
    ]
    if expected:
        with Cache(None) as cache:
            records = read(SourceSection(path=str(path), limit=limit), cache)
        found = [(int(r.origin.rpartition(":")[2]), dict(r.values)) for r in records]
        assert found == expected[:limit]


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
        ("csv", "a,b\n1,2\n3\n", "not valid CSV (CSV parse error: Row #3: Expected 2 columns, got 1"),  # noqa: E501
        ("csv", "a,a\n1,2\n", "the header names the column 'a' more than once"),
        ("csv", b"a,b\n1,\xff\n", "not valid CSV"),
        ("csv", "a,b\n", NO_ROW),
        ("csv", "", NO_ROW),
        ("txt", "\n\n", NO_ROW),
        ("parquet", b"PAR1", "data.parquet: not valid Parquet ("),
        ("arrow", b"{}", "data.arrow: not valid Arrow ("),
        ("jsonl.gz", gz(b"{}\n" * 999)[:-9], "data.jsonl.gz cannot be unpacked: "),
        ("jsonl.gz", b"{}", "data.jsonl.gz cannot be unpacked: Not a gzipped file"),
        ("csv.xz", b"a,b\n", "data.csv.xz cannot be unpacked: "),
        ("json.zst", b"[]", "data.json.zst cannot be unpacked: "),
        ("txt.zst", zstd(b"one\n" * 99)[:-2], "data.txt.zst cannot be unpacked: "),
        ("jsonl.gz", gz(b'{"a": 1}\nno'), f"data.jsonl.gz:2: {ONE_OBJECT}"),
        ("xlsx", "x", "data.train.path takes .json, .jsonl, .csv, .parquet, .arrow, .txt, these compressed (.gz, .zst, ...), or the name of a data set on the hub"),  # noqa: E501
    ],
)  # fmt: skip
def test_malformed_files(source, cache, kind, content, said):
    assert said in failure(source(content, name=f"data.{kind}"), cache)


def test_a_limit_leaves_the_rest_unread(source, cache):
    records = read(source('{"a": 1}\n{"a": 2}\nno json\n', limit=2), cache)
    assert values(records) == [{"a": 1}, {"a": 2}]
    table = source("a\n1\n2\n3\n", name="data.csv", limit=2)
    assert values(read(table, cache)) == [{"a": "1"}, {"a": "2"}]


def test_a_file_that_changes_while_it_is_read(source, tokenizer, monkeypatch):
    section = source([{"text": "a"}, {"text": "b"}])
    module = sys.modules[prepare.__module__]
    write = module.write_table

    def changing(folder, chunks):
        source([{"text": "a"}, {"text": "b"}, {"text": "c"}])
        return write(folder, chunks)

    monkeypatch.setattr(module, "write_table", changing)
    data = DataSection(train=section, max_length=64, cache="off")
    with pytest.raises(DataError, match=r"data\.jsonl changed while it was being read; start"):
        prepare(data, tokenizer, seed=0)


def put_table(tmp_path, group=2, **columns):
    parquet.write_table(pa.table(columns), tmp_path / "data.parquet", row_group_size=group)
    return SourceSection(path=str(tmp_path / "data.parquet"))


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
def test_parquet_of_any_type(kind, rows, tmp_path, cache):
    """A field that is null was not written."""
    source = put_table(tmp_path, a=pa.array(rows, kind))
    assert [record.values["a"] for record in read(source, cache)] == rows
    assert places(read(source, cache))[:2] == ["data.parquet[0]", "data.parquet[1]"]


def test_a_table_of_many_batches(tmp_path, cache):
    opened = open_source(put_table(tmp_path, 1500, n=np.arange(10_000)), "data.train", cache)
    assert opened.count() == 10_000
    for start in (0, 1499, 4_096, 9_999, 10_000):
        rows = [(row.place, row.value["n"]) for row in opened.rows(start)]
        assert rows == [(number, number) for number in range(start, 10_000)]


@pytest.mark.parametrize("write", [pa.ipc.new_file, pa.ipc.new_stream])
def test_both_layouts_of_arrow(write, tmp_path, cache):
    rows = pa.table({"a": ["x", "007", None], "n": [[{"b": 1}], [], None]})
    with write(str(tmp_path / "data.arrow"), rows.schema) as writer:
        writer.write_table(rows, max_chunksize=2)
    records = read(SourceSection(path=str(tmp_path / "data.arrow")), cache)
    assert values(records) == rows.to_pylist()
    assert places(records) == ["data.arrow[0]", "data.arrow[1]", "data.arrow[2]"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".txt", ".csv", ".parquet"])
def test_a_file_that_is_not_there(tmp_path, cache, suffix):
    source = SourceSection(path=str(tmp_path / f"nowhere{suffix}"))
    (tmp_path / f"nowhere1{suffix}").touch()
    for look in (read, lambda source, _: first_records(source, 1, "data.train")):
        with pytest.raises(DataError, match=rf"nowhere.*: no such file .*mean 'nowhere1{suffix}'"):
            look(source, cache)
