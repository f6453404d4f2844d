"""Each kind of file: its records, in any order, and what is said where it is malformed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from anygauge.config.schema import SourceSection
from anygauge.data import hub as hub_module
from anygauge.data import lines as lines_module
from anygauge.data.cache import Cache
from anygauge.data.sources import content_digest, first_records, open_reader, source_name
from anygauge.interface import DataError


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def read(source, cache, indices=None):
    """Records by number, checked against what else says the same about them."""
    reader = open_reader(source, cache, "data.train")
    numbers = np.arange(len(reader)) if indices is None else np.array(indices)
    records = reader.records(numbers)
    places = reader.places(numbers).tolist()
    assert [record.origin for record in records] == [
        source_name(source) + reader.mark.format(place) for place in places
    ]
    if indices is None:
        first = first_records(source, 3, "data.train")
        assert first == records[: len(first)]
        assert len(first) == min(3, len(records))
    return records


def values(records):
    return [dict(record.values) for record in records]


def places(records):
    return [record.origin.rpartition("/")[2] for record in records]


def failure(source, cache):
    with pytest.raises(DataError) as caught:
        read(source, cache)
    return str(caught.value)


def test_json_lines(source, cache):
    content = "\ufeff" + '{"a": 1}\r\n\n   \n{"a": {"b": null}}\n\t{"a": "é\u2028"}\n\n'
    records = read(source(content), cache)
    assert values(records) == [{"a": 1}, {"a": {"b": None}}, {"a": "é\u2028"}]
    assert places(records) == ["data.jsonl:1", "data.jsonl:4", "data.jsonl:5"]
    again = read(source(content), cache, [2, 0, 2])
    assert places(again) == ["data.jsonl:5", "data.jsonl:1", "data.jsonl:5"]


@given(
    rows=st.lists(
        st.sampled_from(["", " \v", "\f", '{"a": 1}', ' {"b": "xyz"}', "\r"]), max_size=30
    ),
    block=st.integers(1, 40),
    limit=st.none() | st.integers(1, 9),
    ends=st.booleans(),
)
def test_lines_are_found_wherever_blocks_end(tmp_path_factory, rows, block, limit, ends):
    folder = tmp_path_factory.mktemp("lines")
    path = folder / "data.jsonl"
    path.write_bytes("\n".join([*rows, *([""] if ends else [])]).encode())
    expected = [
        (number, json.loads(line)) for number, line in enumerate(rows, start=1) if line.strip()
    ]
    if not expected:
        return
    with pytest.MonkeyPatch.context() as patch, Cache(None) as cache:
        patch.setattr(lines_module, "_BLOCK", block)
        source = SourceSection(path=str(path), limit=limit)
        records = read(source, cache)
    assert [(int(r.origin.rpartition(":")[2]), dict(r.values)) for r in records] == expected[:limit]


def test_no_key_is_added_to_a_row_because_another_has_it(source, cache):
    rows = [{"calls": [{"arguments": {"x": 1}}]}, {"calls": [{"arguments": {"y": 2}}]}]
    assert values(read(source(rows), cache)) == rows


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"a": 1}\n\n{"a": }\n', "data.jsonl:3: one JSON object per line is expected, but this line is not valid JSON (Expecting value at column 7)"),  # noqa: E501
        ('{"a": "\tb"}\n', "not valid JSON (Invalid control character at column 8)"),
        ('{"a": 1}\n[1]\n', "data.jsonl:2: a JSON object is expected, found a list"),
        (b'{"a": 1}\n{"a": "\xff"}\n', "data.jsonl:2: not UTF-8 at byte 16 of the file (0xff)"),
        ('{"a": 1}'.encode("utf-16"), "it seems to be UTF-16; save the file as UTF-8"),
        ("[" * 100_000 + "\n", "data.jsonl:1: one JSON object per line is expected, but this line is not valid JSON (nested too deeply)"),  # noqa: E501
        (" \n\n", "is empty; at least one row is needed"),
        ("", "is empty; at least one row is needed"),
    ],
)  # fmt: skip
def test_malformed_json_lines(source, cache, content, said):
    assert said in failure(source(content), cache)


def test_a_limit_leaves_the_rest_unread(source, cache):
    records = read(source('{"a": 1}\n{"a": 2}\nno json\n', limit=2), cache)
    assert values(records) == [{"a": 1}, {"a": 2}]
    table = source("a\n1\n2\n3\n", name="data.csv", limit=2)
    assert values(read(table, cache)) == [{"a": "1"}, {"a": "2"}]


def test_a_file_that_changes_while_it_is_read(source, cache):
    reader = open_reader(source([{"a": 1}, {"a": 2}]), cache, "data.train")
    source([{"a": 1}, {"a": 2}, {"a": 3}])
    with pytest.raises(DataError, match="changed while it was being read"):
        reader.records(np.array([0]))


@pytest.mark.parametrize(
    "content",
    ['[{"a": 1}, {"a": 2}]', '\n [\n {"a": 1},\n{"a": 2}]\n', '\ufeff[{"a": 1}, {"a": 2}]'],
)
def test_a_json_list(source, cache, content):
    records = read(source(content, name="data.json"), cache)
    assert values(records) == [{"a": 1}, {"a": 2}]
    assert places(records) == ["data.json[0]", "data.json[1]"]


def test_a_json_file_of_lines(source, cache):
    records = read(source('\ufeff{"a": 1}\n{"a": 2}\n', name="data.json"), cache)
    assert places(records) == ["data.json:1", "data.json:2"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"rows": [1]}', "a list of objects is expected at the top, found an object with the keys 'rows'"),  # noqa: E501
        ('{\n"rows": [1]}', "found an object with the keys 'rows'"),
        ("[1]", "data.json[0]: a JSON object is expected, found a number"),
        ('[{"a": 1},\n{"a" 2}]', "data.json:2: not valid JSON"),
        ("[]", "holds an empty list; at least one row is needed"),
        (" ", "is empty; at least one row is needed"),
        (b'[{"a":\n"\xff"}]', "data.json:2: not UTF-8 at byte 8"),
        ('{"a": 1}\n{"a": }\n', "data.json:2: one JSON object per line is expected"),
    ],
)  # fmt: skip
def test_malformed_json(source, cache, content, said):
    assert said in failure(source(content, name="data.json"), cache)


def test_plain_text(source, cache):
    text = "one\r\ntwo\r\n\r\n\r\nthree\n"
    records = read(source(text, name="data.txt", text="body"), cache)
    assert values(records) == [{"body": "one\ntwo"}, {"body": "three"}]
    assert places(records) == ["data.txt:1", "data.txt:5"]
    lines = read(source("\none\ntwo", name="data.txt"), cache)
    assert values(lines) == [{"text": "one"}, {"text": "two"}]
    assert "is empty; at least one line" in failure(source("\n\n", name="data.txt"), cache)


def test_csv_cells_are_text_as_written(source, cache):
    content = '\ufeffid,text,note\n007,"a ""b"", c",\n1e3,"two\nlines",NA\n,é,null\n'
    records = read(source(content, name="data.csv"), cache)
    assert values(records) == [
        {"id": "007", "text": 'a "b", c', "note": ""},
        {"id": "1e3", "text": "two\nlines", "note": "NA"},
        {"id": "", "text": "é", "note": "null"},
    ]
    assert places(records) == ["data.csv:2", "data.csv:3", "data.csv:4"]
    assert values(read(source(content, name="data.csv"), cache, [2, 0]))[0]["text"] == "é"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a,b\n1,2\n3\n", "not valid CSV (CSV parse error: Row #3: Expected 2 columns, got 1"),
        ("a,a\n1,2\n", "the header names the column 'a' more than once"),
        (b"a,b\n1,\xff\n", "not valid CSV"),
        ("a,b\n", "is empty; at least one row is needed"),
        ("", "is empty; at least one row is needed"),
    ],
)
def test_malformed_csv(source, cache, content, said):
    assert said in failure(source(content, name="data.csv"), cache)


def test_parquet_with_lists_of_structs(tmp_path, cache):
    rows = [
        {"turns": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]},
        {"turns": []},
        {"turns": None},
    ]
    path = tmp_path / "data.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    records = read(SourceSection(path=str(path)), cache)
    del rows[0]["turns"][1]["content"]  # a field that is null was not written
    assert values(records) == rows
    assert places(records) == ["data.parquet[0]", "data.parquet[1]", "data.parquet[2]"]
    path.write_bytes(path.read_bytes()[:-3])
    assert "data.parquet: not valid Parquet (" in failure(SourceSection(path=str(path)), cache)


def test_parquet_with_categories(tmp_path, cache):
    path = tmp_path / "data.parquet"
    words = pa.array(["a", "b", "c", None]).dictionary_encode()
    parquet.write_table(pa.table({"word": words}), path, row_group_size=1)
    records = read(SourceSection(path=str(path)), cache)
    assert [record.values["word"] for record in records] == ["a", "b", "c", None]


def test_parquet_with_categories_within_turns(tmp_path, cache):
    roles = pa.array(["user", "assistant"] * 3).dictionary_encode()
    turns = pa.StructArray.from_arrays([roles, pa.array([*"abcdef"])], names=["role", "content"])
    chats = pa.ListArray.from_arrays(pa.array([0, 2, 4, 6], pa.int32()), turns)
    parquet.write_table(pa.table({"chat": chats}), tmp_path / "data.parquet", row_group_size=1)
    records = read(SourceSection(path=str(tmp_path / "data.parquet")), cache)
    assert [turn["role"] for turn in records[2].values["chat"]] == ["user", "assistant"]
    assert [turn["content"] for record in records for turn in record.values["chat"]] == [*"abcdef"]


VIEW = pa.string_view()


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (VIEW, ["one", None]),
        (pa.list_(VIEW), [["one"], ["two", None]]),
        (pa.list_(VIEW, 1), [["one"], ["two"]]),
        (pa.struct([("a", VIEW)]), [{"a": "one"}, {"a": "two"}]),
        (pa.map_(pa.string(), VIEW), [[("k", "one")], []]),
    ],
    ids=str,
)
def test_parquet_with_views(kind, rows, tmp_path, cache):
    parquet.write_table(pa.table({"a": pa.array(rows, kind)}), tmp_path / "data.parquet")
    records = read(SourceSection(path=str(tmp_path / "data.parquet")), cache, [1, 0])
    assert [record.values["a"] for record in records] == rows[::-1]


def test_a_table_of_many_batches(tmp_path, cache):
    path = tmp_path / "data.parquet"
    parquet.write_table(pa.table({"n": np.arange(10_000)}), path, row_group_size=1500)
    wanted = [9_999, 0, 5_000, 4_096, 4_095, 0]
    records = read(SourceSection(path=str(path)), cache, wanted)
    assert [record.values["n"] for record in records] == wanted


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".txt", ".csv", ".parquet"])
def test_a_file_that_is_not_there(tmp_path, cache, suffix):
    source = SourceSection(path=str(tmp_path / f"nowhere{suffix}"))
    (tmp_path / f"nowhere1{suffix}").touch()
    for look in (open_reader, lambda source, *_: first_records(source, 1, "data.train")):
        with pytest.raises(DataError, match=rf"nowhere.*: no such file .*mean 'nowhere1{suffix}'"):
            look(source, cache, "data.train")


def test_other_kinds_of_files_are_refused(source, cache):
    said = failure(source("x", name="data.xlsx"), cache)
    assert said.endswith(
        "data.train.path takes .json, .jsonl, .csv, .parquet, .txt, or the name of a data set on "
        "the hub"
    )


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Two rows under the name owner/name, as if they had been downloaded; takes what was asked."""
    import datasets

    datasets.Dataset.from_dict({"a": ["x", "y"], "b": [[1], []]}).save_to_disk(tmp_path / "hub")
    asked = []

    def load_dataset(path, name, *, split, revision, streaming, cache_dir=None):
        asked.append((path, name, split, revision))
        if split == "broken":
            raise ValueError("Unknown split 'broken'")
        rows = datasets.load_from_disk(str(tmp_path / "hub"))
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(hub_module, "_check", lambda source, field: None)
    return asked


def test_a_data_set_of_the_hub(hub, cache):
    source = SourceSection(path="owner/name", subset="s", revision="r", split="test")
    records = read(source, cache)
    assert values(records) == [{"a": "x", "b": [1]}, {"a": "y", "b": []}]
    assert [record.origin for record in records] == ["owner/name[test][0]", "owner/name[test][1]"]
    assert set(hub) == {("owner/name", "s", "test", "r")}
    assert len(read(source.model_copy(update={"limit": 1}), cache)) == 1
    limited = source.model_copy(update={"limit": 1})
    digest = content_digest(source, cache, "data.train")
    assert content_digest(limited, cache, "data.train") == digest
    assert len(digest) == 64
    said = failure(source.model_copy(update={"split": "broken"}), cache)
    assert said.startswith("data.train: the data set 'owner/name' (subset s, split 'broken', ")
    assert "cannot be loaded: Unknown split 'broken'; check data.train.subset" in said


HUB = """
import sys
from anygauge.config.schema import DataSection
from anygauge.data import peek
from anygauge.interface import DataError
try:
    peek(DataSection(train={"path": "owner/name"}))
except DataError as error:
    sys.exit(f"said: {error}")
"""


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "hub (http://127.0.0.1:9) cannot be reached"),
        ({"HF_HUB_OFFLINE": "1"}, "the data set 'owner/name' (subset default, split 'train'"),
    ],
)
def test_a_hub_that_cannot_be_reached(tmp_path: Path, environment: dict[str, str], said: str):
    unset = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT")
    clean = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", HUB],
        env={**clean, **environment, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr.splitlines()[-1].startswith("said: data.train"), done.stderr
    assert said in done.stderr
