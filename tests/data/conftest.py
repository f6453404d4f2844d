from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import Prepared, TokenizedRows, prepare
from tests.helpers.tokenizer import make_tokenizer

# A busy machine is not a failure.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., SourceSection]:
    """Writes a file and returns a source section for it."""

    def make(content: bytes | str | Iterable[Any], name: str = "data.jsonl", **fields: Any) -> Any:
        if not isinstance(content, (bytes, str)):
            content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        raw = content.encode("utf-8") if isinstance(content, str) else content
        (tmp_path / name).write_bytes(raw)
        return SourceSection(path=str(tmp_path / name), **fields)

    return make


@pytest.fixture
def prepared(tokenizer: Any, source: Callable[..., SourceSection]) -> Callable[..., Prepared]:
    """Prepares rows, given as (prompt, completion), without a cache; origins end in their line."""

    def make(rows: Iterable[tuple[str, str]], **fields: Any) -> Prepared:
        content = [{"prompt": prompt, "completion": answer} for prompt, answer in rows]
        defaults: dict[str, Any] = {"max_length": 64, "cache": "off"}
        train = source(content, template="{prompt}")
        return prepare(DataSection(train=train, **{**defaults, **fields}), tokenizer, seed=0)

    return make


@pytest.fixture(scope="session")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 23 rows of many lengths: row n answers with n numbers."""
    path = tmp_path_factory.mktemp("counting") / "rows.jsonl"
    rows = [
        {"prompt": f"Count to {n}:", "completion": " ".join(map(str, range(n)))}
        for n in range(1, 24)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def tokenized(tokenizer: Any, counting: Path) -> TokenizedRows:
    """The rows of `counting`."""
    data = DataSection(train=SourceSection(path=str(counting)), max_length=64, cache="off")
    rows = prepare(data, tokenizer, seed=0).train
    assert isinstance(rows, TokenizedRows)
    return rows
