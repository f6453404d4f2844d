from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from anygauge.config.schema import SourceSection
from anygauge.data import Row, TokenizedRows, tokenize_rows
from tests.helpers.tokenizer import make_tokenizer

# A busy machine is no failure.
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


@pytest.fixture(scope="session")
def tokenized(tokenizer: Any) -> TokenizedRows:
    """Rows of many lengths: row i answers with i + 1 numbers."""
    rows = [
        Row(f"Count to {n}:\n", " ".join(map(str, range(n))), f"rows.jsonl:{n}")
        for n in range(1, 24)
    ]
    return tokenize_rows(rows, tokenizer, max_length=64)
