"""Workers: they make the table that one process makes; and what ends them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest

from anygauge.config.schema import DataSection
from anygauge.data import describe_rows, prepare, rows
from anygauge.data.readers import Record
from anygauge.data.rows import Tokenize, Workers, chunks_of, documents_of, records_of, usable_cores
from anygauge.data.template import render_unbounded
from anygauge.interface import DataAccessError, DataError
from tests.helpers.chats import assistant, user
from tests.helpers.masks import encoder

HANGS = (
    "{% for m in messages %}{{ m.content }}{% if 'hang' in m.content %}"
    + "{% for a in range(99999) %}" * 3
    + "{% endfor %}" * 3
    + "{% endif %}</s>{% endfor %}"
)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Ten workers would have work."""
    monkeypatch.setattr(rows, "CHUNK", 8)


def chats(*texts):
    return tuple(
        Record({"messages": [user(text), assistant("yes")]}, place=number)
        for number, text in enumerate(texts, start=1)
    )


@pytest.fixture
def work(tokenizer):
    return Tokenize(encoder=encoder(tokenizer, "messages", chat_template=HANGS), origin="x:{}")


def test_several_workers_make_the_same_table(source, tokenizer, tmp_path):
    section = source([{"prompt": f"{n}", "completion": "word " * (n % 9)} for n in range(50)])
    tables = []
    for workers in (1, 2):
        folder = tmp_path / str(workers)
        data = DataSection(train=section, max_length=16, cache=str(folder), workers=workers)
        prepare(data, tokenizer, seed=0)
        (file,) = folder.glob("rows/*/rows.arrow")
        tables.append(pa.ipc.open_file(str(file)).read_all())
    assert tables[0].equals(tables[1])
    assert tables[0]["record"].to_pylist() == list(range(50))


@pytest.mark.parametrize(
    ("count", "chunks", "of_workers"), [(24, [8] * 3, 0), (25, [8] * 3 + [1], 1)]
)
def test_without_a_number_workers_start_once_there_are_many_rows(
    work, monkeypatch, count, chunks, of_workers
):
    class Here(Workers):
        def submit(self, source, rows):
            asked.append(self._pool._max_workers)
            return work(rows)

        def result(self, found):
            return found

    asked = []
    monkeypatch.setattr(rows, "FEW_ROWS", 20)
    monkeypatch.setattr(rows, "Workers", Here)
    monkeypatch.setattr(rows, "usable_cores", lambda: 99)
    found = chunks_of(iter(chats(*["go"] * count)), work, None, render_unbounded)
    assert [records_of(chunk) for chunk in found] == chunks
    assert asked == [16] * of_workers
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


def test_of_several_workers_the_oldest_rendering_is_reported(work):
    """A row that hangs stays what is reported; who ends its worker is told so."""
    others = set(multiprocessing.active_children())
    given = chats(*["go"] * 3, "hang", *["go"] * 40)
    found, said = [], []

    def read():
        try:
            list(chunks_of(iter(given), work, 2, lambda *names: found.append(names)))
        except DataAccessError as error:
            said.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    quiet, before = time.monotonic(), 0
    while time.monotonic() - quiet < 1.0 or found[-1:] != [("data.chat_template", "x:4")]:
        if len(found) != before:
            quiet, before = time.monotonic(), len(found)
        time.sleep(0.05)
    for worker in set(multiprocessing.active_children()) - others:
        os.kill(worker.pid, signal.SIGKILL)
    thread.join(60)
    (message,) = said
    assert "was ended from outside; there may be too little memory. Set data.workers be" in message


def test_rows_of_a_stream_are_tokenized_by_a_process_within_limits(work, monkeypatch):
    before = multiprocessing.active_children()
    given = chats("one", "two")
    workers = Workers([work], memory=2**40)
    found = [documents_of(chunk, "x:{}") for chunk in (work(given), workers(0, given))]
    tokens = [[one.ids.tolist() for row in documents for one in row] for documents, _ in found]
    assert tokens[0] == tokens[1] and found[0][1] == found[1][1]
    with pytest.raises(DataError, match=r"^x:9: column 'messages' holds null"):
        workers(0, (Record({"messages": None}, place=9),))
    (worker,) = set(multiprocessing.active_children()) - set(before)
    monkeypatch.setattr(rows, "SILENCE_S", 1.0)
    said = r"data\.chat_template took more than 1 s for x:2\. Correct the template or the row"
    with pytest.raises(DataError, match=said):
        workers(0, chats("go", "hang"))
    worker.join(60)
    # Not its exit code: the pool may have taken that a moment ago.
    assert not Path(f"/proc/{worker.pid}").exists(), "it would keep this process from ending"
    with pytest.raises(DataAccessError, match="was ended from outside"):
        workers(0, given)


@pytest.mark.parametrize("workers", [1, 2])
def test_wrong_rows_that_are_skipped_are_counted_and_named(source, tokenizer, tmp_path, workers):
    lines = ['{"text": 5}' if number % 4 == 0 else '{"text": "a"}' for number in range(1, 31)]
    lines[3] = "no json"
    fields = {"cache": str(tmp_path / "cache"), "workers": workers, "on_bad_row": "skip"}
    data = DataSection(train=source("\n".join(lines)), **fields)
    first, again = (prepare(data, tokenizer, seed=0) for _ in range(2))
    for found in (first.train, again.train):
        assert (found.report.rows, found.report.used, found.report.skipped) == (30, 23, 7)
        assert len(found) == 23
        bad = [text.partition(": ")[0].rpartition(":")[2] for text in found.bad]
        assert bad == ["4", "8", "12", "16", "20"]
    assert "7 skipped as bad; the first that were skipped: " in describe_rows(first.train)
    held = prepare(data.model_copy(update={"eval_fraction": 0.5}), tokenizer, seed=0)
    assert held.train.report.skipped + held.eval.report.skipped == 7
    before = multiprocessing.active_children()
    strict = data.model_copy(update={"on_bad_row": "raise"})
    with pytest.raises(DataError, match=r"data\.jsonl:4: one JSON object per line is expected"):
        prepare(strict, tokenizer, seed=0)
    assert set(multiprocessing.active_children()) <= set(before)


def test_rows_are_read_no_further_than_workers_need_them(work):
    given = iter(chats(*["go"] * 400))
    list(islice(chunks_of(given, work, 2, render_unbounded), 2))
    assert len(list(given)) >= 400 - 8 * 9
