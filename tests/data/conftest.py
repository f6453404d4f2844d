from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, settings

from anygauge.config.schema import DataSection, SourceSection, TrainSection
from anygauge.data import Layout, prepare, training_batches
from anygauge.data.cache import Cache
from anygauge.data.sources import first_records, open_source
from anygauge.interface import ShapePolicy, Share
from tests.helpers.chats import make_chat_tokenizer
from tests.helpers.tiny_tokenizer import make_tokenizer

# A busy machine is not a failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

DYNAMIC = ShapePolicy()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    """A tokenizer with the tokens of chat templates, and without a template."""
    return make_chat_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def cache(tmp_path):
    with Cache(tmp_path / "cache") as cache:
        yield cache


@pytest.fixture
def source(tmp_path):
    """Writes a file and returns a source section for it."""

    def make(content, name="data.jsonl", **fields):
        if not isinstance(content, (bytes, str)):
            content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        raw = content.encode("utf-8") if isinstance(content, str) else content
        (tmp_path / name).write_bytes(raw)
        return SourceSection(path=str(tmp_path / name), **fields)

    return make


@pytest.fixture(scope="session")
def counting(tmp_path_factory):
    """A file of 23 rows of many lengths: row n answers with n numbers."""
    path = tmp_path_factory.mktemp("counting") / "rows.jsonl"
    rows = [
        {"prompt": f"Count to {n}:", "completion": " ".join(map(str, range(n)))}
        for n in range(1, 24)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def tokenized(tokenizer, counting):
    """The rows of `counting`."""
    data = DataSection(train=SourceSection(path=str(counting)), max_length=64, cache="off")
    return prepare(data, tokenizer, seed=0).train


@pytest.fixture
def batches(tokenizer, counting):
    """Batches of the counting rows, streamed or prepared; `settings` of the section train."""

    def make(*, streaming=True, world=1, rank=0, micro=2, shapes=DYNAMIC, settings=None, **fields):
        train = SourceSection(path=str(counting), limit=23)
        data = {"train": train, "max_length": 64, "cache": "off"}
        section = DataSection(**{**data, **fields}, streaming=streaming)
        training = TrainSection(**{"global_batch_size": 4, "seed": 5, **(settings or {})})
        layout = Layout(
            micro_batch=micro,
            share=Share(rank, world),
            max_length=section.max_length,
            pad_id=2,
            packing=section.packs,
            shapes=shapes,
        )
        rows = prepare(section, tokenizer, seed=5).train
        made = training_batches(rows, section, training, layout)
        made.rows = rows
        return made

    return make


def read(source, cache=None):
    """The records of a source; looked at from the beginning, and read from elsewhere, as well."""
    opened = open_source(source, "data.train", cache)
    records = [row.parse(opened.origin) for row in opened.rows(0)]
    assert first_records(source, 3, "data.train") == records[:3]
    for start in {1, len(records) // 2, len(records)} - {0}:
        assert [row.parse(opened.origin) for row in opened.rows(start)] == records[start:]
    assert opened.count() in (None, len(records), source.limit)
    return records


def content(batches, index):
    """Of each micro-batch of a step: its tokens, labels and origins."""
    return [(b.input_ids.tolist(), b.shift_labels.tolist(), b.origins) for b in batches.step(index)]


def origins(batches, index):
    """Where the rows of a step came from, of this rank."""
    return [origin for batch in batches.step(index) for origin in batch.origins]
