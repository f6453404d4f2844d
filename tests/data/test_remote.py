"""Rows of other machines: streamed as a file would be read, or copied; nothing left on the disk."""

from __future__ import annotations

import gzip
import io
import json
import socket
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from anygauge.config.load import load_run_file
from anygauge.config.resolved import run_json
from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import addresses, peek, prepare, remote_files
from anygauge.data.remote_files import open_remote, remote_identity
from anygauge.data.sources import Source, first_records, open_source
from anygauge.interface import DataAccessError, DataError
from anygauge.launch.prepare_call import prepare as prepare_run
from anygauge.launch.prepare_request import PrepareRequest
from anygauge.models.tokenizer import load_tokenizer
from tests.data.conftest import content, read
from tests.helpers.runs import run_file
from tests.standins.files import File, FileServer
from tests.standins.hub import TOKEN, Hub, Repository, use_hub

ROWS = [{"prompt": f"Count to {n}:", "completion": "é" * (n % 7 + 1)} for n in range(230)]
ALL = ("rows.jsonl", "lines.json", "list.json", "rows.csv", "rows.parquet", "rows.jsonl.zst")


def body(name: str, rows: list[dict[str, Any]], group: int = 20) -> bytes:
    """A file of rows; every fiftieth line of JSON is followed by an empty one."""
    if name.endswith(".parquet"):
        sink = io.BytesIO()
        parquet.write_table(pa.Table.from_pylist(rows), sink, row_group_size=group)
        return sink.getvalue()
    if name == "list.json":
        return json.dumps(rows).encode()
    if name.endswith(".csv"):
        cells = [",".join(line) for line in (rows[0], *(row.values() for row in rows))]
        return "\n".join([*cells, ""]).encode()
    ends = ["\n\n" if n % 50 == 7 else "\n" for n in range(len(rows))]
    lines = "".join(json.dumps(row) + end for row, end in zip(rows, ends, strict=True)).encode()
    packers = {".gz": gzip.compress, ".zst": lambda raw: pa.compress(raw, "zstd", asbytes=True)}
    return packers.get(name[name.rindex(".") :], bytes)(lines)


LINES = body("rows.jsonl", ROWS)
NAME = "owner/name"


@pytest.fixture
def server():
    with FileServer({name: File(body=body(name, ROWS)) for name in ALL}) as server:
        yield server


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(remote_files, "WAITS_S", (0.0,) * 5)


@pytest.fixture
def streamed(batches):
    """Batches of an address."""

    def make(path: str, *, steps: int | None = 60, limit: int | None = None, **fields: Any) -> Any:
        settings = {"global_batch_size": 8, "steps": steps, "epochs": 1.0}
        train = {"path": path, "limit": limit}
        return batches(train=train, shuffle_buffer=32, settings=settings, **fields)

    return make


def rows_from(source: Source, start: int) -> list[Any]:
    """The values of the first rows from a number on."""
    rows = islice(source.rows(start), 3)
    return [row.parse(source.origin).values for row in rows]


@pytest.mark.parametrize("name", ALL)
def test_a_streamed_row_is_that_of_the_same_file(name, server, tmp_path):
    (tmp_path / name).write_bytes(server.files[name].body)
    local = read(SourceSection(path=str(tmp_path / name)))
    there = read(SourceSection(path=server.address(name)))
    assert [record.values for record in there] == [record.values for record in local] == ROWS
    marks = [record.origin.removeprefix(str(tmp_path / name)) for record in local]
    assert [record.origin for record in there] == [server.address(name) + mark for mark in marks]
    source = open_source(SourceSection(path=server.address(name)), "f")
    assert source.count() == (len(ROWS) if name == "rows.parquet" else None)
    assert source.identity() == remote_identity(server.address(name))
    for start in (1, 19, 20, 21, 63, 229, 230, 400):
        assert rows_from(source, start) == ROWS[start : start + 3]


def test_what_is_read_over_the_network(server, streamed):
    rows = [{"text": str(np.random.default_rng(n).bytes(700).hex())} for n in range(4000)]
    server.files["big.parquet"] = File(body=body("big.parquet", rows, 100))
    source = open_source(SourceSection(path=server.address("big.parquet")), "f")
    server.sent = 0
    assert rows_from(source, 2050) == rows[2050:2053]
    assert server.sent < len(server.files["big.parquet"].body) / 8, "no rows before"
    for name in ("rows.jsonl", "rows.csv"):
        made, server.sent = streamed(server.address(name), steps=28), 0
        for index in range(28):
            made.step(index)
        assert server.sent == len(server.files[name].body), "once to train on"


FAILURES: dict[str, tuple[File | None, str]] = {
    "nowhere.jsonl": (None, r"nowhere\.jsonl: no such file there; a private or gat"),
    "secret.jsonl": (File(body=b"", status=403), r"may not be read: .* answers 403 .*A signed"),
    "odd.jsonl": (File(body=b"", status=451), r"cannot be read: the server answers 451 \("),
    "page.jsonl": (File(body=b"<html>", kind="text/html; charset=utf-8"), r"a web page .*/resolve"),
    "ftp.jsonl": (File(body=b"ftp://127.0.0.1/a", status=302), r"redirects to another protocol"),
    "loop.jsonl": (File(body=b"loop.jsonl", status=302), r"the server redirects again and again"),
    "cut.jsonl.gz": (File(body=gzip.compress(LINES)[:-9]), r"\.gz cannot be read: "),
    "empty.jsonl": (File(body=b""), r"empty\.jsonl is empty; at least one row is needed"),
    "odd.parquet": (File(body=b'{"a": 1}\n' * 9), r"odd\.parquet cannot be read: .*of the kind"),
    "nothing": (File(body=b"x"), r"this kind of file is not read; data\.train\.path takes"),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("streaming", [False, True])
def test_each_failure_has_its_message_at_once(name, streaming, server, monkeypatch):
    file, said = FAILURES[name]
    if file is not None:
        server.files[name] = file
    monkeypatch.setattr(remote_files, "WAITS_S", (60.0,) * 5)
    source = SourceSection(path=server.address(name) + "?signature=hidden")
    with pytest.raises(DataError, match=said) as caught:
        peek(DataSection(train=source, streaming=streaming))
        list(open_source(source, "data.train").rows(0))
    assert "\n" not in str(caught.value) and "hidden" not in str(caught.value)


def test_a_look_at_the_first_rows_fetches_a_beginning(server):
    server.files["long.jsonl"] = File(body=LINES * 200)
    assert len(first_records(SourceSection(path=server.address("long.jsonl")), 20, "f")) == 20
    assert server.sent <= 2 * remote_files.SMALL_BLOCK < len(server.files["long.jsonl"].body)


def test_addresses_that_nobody_answers_or_no_package_reads(impatient, monkeypatch):
    monkeypatch.setattr(remote_files, "SILENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        for address, error, said in (
            ("http://127.0.0.1:9", DataAccessError, r"read, after 6 tries: .*HTTPS_PROXY"),
            (f"http://127.0.0.1:{port}", DataAccessError, r"6 tries: .*then resume the run"),
            ("s3://bucket", DataError, r"needs a package that is not installed: .*s3fs"),
            ("nonsense://x", DataError, r"is not an address that can be read: "),
        ):
            with pytest.raises(error, match=said):
                open_remote(f"{address}/rows.jsonl")


@pytest.mark.parametrize("version", [True, False])
def test_a_server_of_whole_files_alone(version, server, impatient):
    file = File(body=LINES, ranges=False, version=version, cut=[9_000, 5_000])
    server.files["whole.jsonl"] = file
    assert open_remote(server.address("whole.jsonl"), 1_000).read() == file.body
    assert file.cut == []


def test_other_places_by_fsspec_and_redirects(server, monkeypatch):
    import fsspec
    from huggingface_hub import constants

    fsspec.filesystem("memory").pipe("/folder/rows.jsonl", LINES)
    server.files["old.jsonl"] = File(body=server.address("rows.jsonl").encode(), status=302)
    for address in ("memory://folder/rows.jsonl", server.address("old.jsonl")):
        records = first_records(SourceSection(path=address), 9, "f")
        assert [record.values for record in records] == ROWS[:9]
        assert records[8].origin == f"{address}:10"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"old\.jsonl: HF_HUB_OFFLINE is set, and this is read"):
        open_remote(server.address("old.jsonl"))


def test_a_connection_that_breaks_is_tried_again(server, impatient, streamed):
    file = server.files["rows.jsonl"]
    expected = [content(streamed(server.address("rows.jsonl")), index) for index in range(3)]
    file.cut, file.busy = [100, 0], 3
    broken = streamed(server.address("rows.jsonl"))
    assert [content(broken, index) for index in range(3)] == expected
    assert (file.cut, file.busy) == ([], 0), "a part that broke off is read again"
    file.cut = [100] * 6
    said = r"rows\.jsonl \(byte 0\) cannot be read, after 6 tries: .*then resume the run"
    with pytest.raises(DataAccessError, match=said) as failed:
        open_remote(server.address("rows.jsonl")).read()
    assert failed.value.exit_status == 1, "not what the run file names is wrong"


def test_a_file_that_changes_meanwhile_is_refused(server):
    address = server.address("rows.jsonl")
    before = remote_identity(address)
    assert remote_identity(address + "?signature=other") == before
    opened = open_remote(address, 100)
    opened.read(100)
    server.files["rows.jsonl"].body = LINES.upper()
    with pytest.raises(DataError, match="changed while it was being read; start again"):
        opened.read(100)
    assert remote_identity(address) != before


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "list.json"])
def test_without_streaming_a_remote_file_is_copied_once(name, server, tokenizer, tmp_path):
    section = DataSection(train={"path": server.address(name)}, cache=str(tmp_path))
    first = prepare(section, tokenizer, seed=0).train
    server.sent = 0
    again = prepare(section, tokenizer, seed=0).train
    assert server.sent == 0
    assert again.fingerprint() == first.fingerprint()
    assert first.report.rows == 230
    assert first.tokens(8).origin.startswith(server.address(name))
    (copy,) = tmp_path.glob(f"files/*/{name}")
    assert copy.read_bytes() == server.files[name].body


def test_what_the_fetch_has_copied_nobody_of_this_start_asks_for_again(tmp_path, impatient):
    with FileServer({"rows.jsonl": File(body=LINES)}) as server:
        data = {"train": {"path": server.address("rows.jsonl")}}
        run = load_run_file(run_file(tmp_path, data=data))
        request = PrepareRequest(
            copies=tuple(addresses(run.data)),
            stages=("check",),
            run=run_json(run),
            backend="cpu",
            id="this start",
        )
        found = prepare_run(request).found
        assert found.data.startswith("230 of 230 rows; ") and found.notes == []
    tokenizer, seed = load_tokenizer(run.model), run.train.seed
    rows = prepare(run.data, tokenizer, seed, run="this start").train
    assert rows.report.rows == 230, "as a rank reads them; the server is gone"
    with pytest.raises(DataAccessError, match=r"rows\.jsonl cannot be read"):
        prepare(run.data, tokenizer, seed, run="another")


def test_rows_to_evaluate_on_are_a_beginning(server, tokenizer, tmp_path):
    address = server.address("rows.jsonl")
    fields = {"train": {"path": address}, "streaming": True, "cache": str(tmp_path / "kept")}
    prepared = prepare(DataSection(**fields, eval={"path": address, "limit": 9}), tokenizer, seed=0)
    assert prepared.eval is not None and prepared.eval.report.rows == 9
    assert prepared.eval.tokens(8).origin == f"{address}:10"
    assert not list((tmp_path / "kept").glob("files"))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with Hub({}) as hub:
        use_hub(monkeypatch, hub, tmp_path)
        yield hub
    assert hub.strangers == []


def put(hub: Hub, files: Any, **fields: Any) -> None:
    hub.repositories[f"datasets/{NAME}"] = Repository(files=files, **fields)


def of_kind(kind: str) -> dict[str, bytes]:
    parts = {"train-0": ROWS[:150], "train-1": ROWS[150:], "test-0": ROWS[:5]}
    return {f"data/{name}.{kind}": body(f"rows.{kind}", rows) for name, rows in parts.items()}


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "csv"])
def test_a_data_set_of_the_hub_is_streamed(kind, hub, tmp_path, streamed):
    put(hub, of_kind(kind))
    source = open_source(SourceSection(path=NAME), "f")
    assert source.count() == (230 if kind == "parquet" else None)
    records = [row.parse(source.origin) for row in source.rows(0)]
    assert [record.values for record in records] == ROWS
    assert [record.origin for record in records[::229]] == [f"{NAME}[train][{n}]" for n in (0, 229)]
    for start in (1, 149, 150, 229, 300):
        assert rows_from(source, start) == ROWS[start : start + 3]
    assert len(first_records(SourceSection(path=NAME, split="test"), 9, "f", streaming=True)) == 5
    kept = sum(p.stat().st_size for p in (tmp_path / "hf").rglob("*") if p.is_file())
    assert kept < 1000, "names and notes, and no row"
    put(hub, of_kind(kind), commit="f00d" * 10)
    assert open_source(SourceSection(path=NAME), "f").identity() != source.identity()
    assert content(streamed(NAME, steps=30), 29) == content(streamed(NAME, steps=30), 29)


def test_a_data_set_of_the_hub_is_downloaded(hub, cache):
    put(hub, of_kind("parquet"), branches=("old",))
    source = SourceSection(path=NAME, split="test", revision="old")
    records = read(source, cache)
    assert [record.values for record in records] == ROWS[:5]
    assert records[4].origin == f"{NAME}[test][4]"
    assert len(read(source.model_copy(update={"limit": 1}), cache)) == 1
    said = r"^data\.train: the data set .*\(subset s, split 'test', .*check data\.train\.subset"
    with pytest.raises(DataError, match=said):
        read(source.model_copy(update={"subset": "s"}), cache)


def test_an_address_on_the_hub(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    put(hub, of_kind("jsonl"), access="private")
    of_hub = f"hf://datasets/{NAME}/data/test-0.jsonl"
    by_http = f"{hub.address}/datasets/{NAME}/resolve/main/data/test-0.jsonl"
    for address in (of_hub, by_http):
        records = first_records(SourceSection(path=address), 9, "f")
        assert [record.values for record in records] == ROWS[:5]
        assert records[4].origin == f"{address}:5"
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(DataError, match=r"may not be read: 401 .*gated repository .*\(hf auth log"):
        first_records(SourceSection(path=of_hub), 9, "f")


def test_wrong_rows_of_the_hub_are_named_with_their_file(hub):
    put(hub, {"train-0.jsonl": b'{"a": "1"}\n\n', "train-1.jsonl": b'{"a": "2"}\n\nno\n'})
    said = r"^owner/name\[train\]\[2\] \(train-1\.jsonl:3\): one JSON object per line"
    with pytest.raises(DataError, match=said):
        first_records(SourceSection(path=NAME), 9, "f", streaming=True)


@pytest.mark.parametrize(
    ("access", "fields", "said"),
    [
        ("private", {}, r"f\.path: 'owner/name' is not a file .*log in if it is private"),
        ("gated", {}, r"is a gated .*accept its terms at http.*/datasets/owner/name, "),
        ("broken", {}, r"f\.path: .*owner/name.*503"),
        ("public", {"split": "other"}, r"split 'other', .*: there is no split 'other', but t"),
        ("public", {"subset": "other"}, r"subset other, .*check f\.subset"),
        ("public", {"revision": "v9"}, r"f\.revision: 'owner/name' has no revision 'v9'; give a"),
    ],
)
def test_data_sets_that_cannot_be_read(access, fields, said, hub, impatient):
    put(hub, of_kind("jsonl"), access=access)
    with pytest.raises(DataError, match=said) as caught:
        first_records(SourceSection(path=NAME, **fields), 1, "f", streaming=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "streaming", "said"),
    [
        ("http://127.0.0.1:9", False, r"hub \(http://127\.0\.0\.1:9\) cannot be reached"),
        ("", False, r"the data set 'owner/name' \(subset default, split 'train'"),
        ("", True, r"data\.streaming reads 'owner/name' over the network, but HF_HUB_OFFLINE is s"),
    ],
    ids=["nobody answers", "switched off", "streaming"],
)
def test_a_hub_that_cannot_be_reached(address, streaming, said, tmp_path, monkeypatch):
    import datasets
    from huggingface_hub import constants

    use_hub(monkeypatch, SimpleNamespace(address=address or constants.ENDPOINT), tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", address)  # which messages name
    for module in () if address else (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=rf"^data\.train.*{said}"):
        peek(DataSection(train={"path": NAME}, streaming=streaming))
