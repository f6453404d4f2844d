"""Files of rows that a run may meet: sound ones, wrong ones, enormous ones; of a seed alone."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from random import Random
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet

from tests.generated.run_files import NUMBERS, TEXTS, junk

TEMPLATES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls|default('')|tojson }}"
    "{{ eos_token }}{% endfor %}{{ tools|default('')|tojson }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% endfor %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception('no') }}",
    "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "{% for m in messages %}",
)


def pair(source: Random) -> dict[str, Any]:
    return {"prompt": "What is 2 + 2?", "completion": source.choice(("4", "four", "é 東京"))}


def chat(source: Random) -> dict[str, Any]:
    arguments = {source.choice("abc"): source.choice((1, None, "x", [None], {"d": None}))}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Hello?"}]
    if source.random() < 0.4:
        turns += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    turns.append({"role": "assistant", "content": "Good morning."})
    row: dict[str, Any] = {"messages": turns}
    if source.random() < 0.4:
        row["tools"] = [{"name": "f", "parameters": {"type": "object", "properties": {}}}]
    return row


def damaged(source: Random, row: dict[str, Any]) -> dict[str, Any]:
    """The row with something else somewhere in it."""
    row = json.loads(json.dumps(row))
    place: Any = row
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return row
        key = source.choice(keys)
        if isinstance(place[key], (dict, list)) and place[key] and source.random() < 0.7:
            place = place[key]
            continue
        place[key] = source.choice((junk(source), source.choice(NUMBERS), source.choice(TEXTS)))
        return row


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def raw(source: Random, rows: list[dict[str, Any]]) -> bytes:
    """Lines of which one is not a row."""
    odd = source.choice(
        (
            b'{"prompt": 5, "completion": NaN}',
            b'{"prompt": "a", "prompt": "b", "completion": "c"}',
            b'{"prompt": "a", "completion": "b"',
            b'{"prompt": "\\ud800", "completion": "c"}',
            b'{"prompt": "\xff", "completion": "c"}',
            b"[" * 100_000,
            b'{"a":' * 50_000,
            b"[1, 2]",
            b"null",
            b"1" * 10_000,
            b'{"prompt": ' + b"9" * 10_000 + b', "completion": "c"}',
            b'{"prompt": "a\\u0000b", "completion": "c"}',
            b"\0" * 1000,
            b"\x1f\x8b\x08\x00rest of an archive",
            b" " * 100_000,
        )
    )
    parts = lines(rows).splitlines()
    parts.insert(source.randrange(len(parts) + 1), odd)
    start = source.choice((b"", b"", b"\xef\xbb\xbf", b"\xff\xfe"))
    return start + source.choice((b"\n", b"\r\n")).join(parts)


def alone(source: Random) -> bytes:
    """One object with a key twice, and no list around it."""
    return source.choice(
        (
            b'{"prompt": "a", "prompt": "[{", "completion": "c"}',
            b' {"data": [{"prompt": "a", "prompt": "b"}]}',
            b'{"prompt": "a", "prompt": "b"}',
        )
    )


def large(source: Random, rows: list[dict[str, Any]]) -> bytes:
    """A row that is long, in one way or another."""
    count = source.choice((10**5, 10**6, 1_900_000, 3_900_000, 2 * 10**7, 5 * 10**7))
    letter = source.choice(("x", "word ", "é", "東", "\n"))
    text = (letter * (count // len(letter.encode()) + 1))[: count // len(letter.encode())]
    if "messages" in rows[0]:
        rows[-1]["messages"][-1]["content"] = text
    else:
        rows[-1][source.choice(("prompt", "completion"))] = text
    return lines(rows)


def table(source: Random, rows: list[dict[str, Any]]) -> tuple[str, bytes]:
    """The rows as Parquet, or CSV where they are flat."""
    written = io.BytesIO()
    made = pa.Table.from_pylist(rows)
    if "messages" not in rows[0] and source.random() < 0.5:
        csv.write_csv(made, written)
        data = written.getvalue()
        return "csv", data if source.random() < 0.5 else data[: -source.randrange(1, 9)] + b'"x,\n'
    parquet.write_table(made, written)
    data = written.getvalue()
    return "parquet", data if source.random() < 0.7 else data[: source.randrange(len(data))]


Made = tuple[str, str, bytes, dict[str, Any]]


def file_of_rows(source: Random) -> Made:
    """Its kind, its name's ending, its bytes, and settings of the section `data`."""
    make: Callable[[Random], dict[str, Any]] = source.choice((pair, pair, chat))
    rows = [make(source) for _ in range(source.randrange(1, 5))]
    settings: dict[str, Any] = {}
    if make is chat:
        settings["chat_template"] = source.choice((*TEMPLATES[:2], *TEMPLATES))
    kind = source.choice(
        ("sound", "damaged", "damaged", "damaged", "raw", "alone", "large", "table")
    )
    if kind == "table":
        try:
            return kind, *table(source, rows), settings
        except pa.ArrowException:  # not all rows make a table
            kind = "sound"
    if kind == "raw":
        return kind, source.choice(("jsonl", "jsonl", "json", "txt")), raw(source, rows), settings
    if kind == "alone":
        return kind, "json", alone(source), settings
    if kind == "large":
        return kind, "jsonl", large(source, rows), settings
    if kind == "damaged":
        rows[-1] = damaged(source, rows[-1])
    if source.random() < 0.3:
        return kind, "json", json.dumps(rows).encode(), settings
    return kind, "jsonl", lines(rows), settings
