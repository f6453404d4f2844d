"""Run files and rows that nobody would write, and some that somebody might: a file is accepted, or
it is refused in words."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anygauge.config.describe import field_kind, sections
from anygauge.config.schema import DataSection, SourceSection
from anygauge.data import peek, prepare
from anygauge.interface import AnygaugeError
from anygauge.launch.request import read_request
from tests.helpers.runs import TINY
from tests.helpers.tiny_tokenizer import FIXTURES, make_tokenizer

PATHS = [
    (*path, name)
    for path, section in sections()
    for name, field in section.model_fields.items()
    if (not field_kind(field).sections and path[:1] != ("adapter",)) or path == ("adapter",)
]
"""Every field of a run file, sections left out."""
YAML = (
    "train: !!python/object/apply:os.system ['touch pwned']\n",
    "environment: !!set {a, b}\n",
    "environment: {A: !!binary aGVsbG8=, B: 2001-12-14t21:59:43.10-05:00, C: 0o17, yes: no}\n",
    "...\n%YAML 1.2\n---\na: 1\n",
    "? [a, b]\n: 1\n",
    "train: &t {steps: 2}\ntrain: *t\n",
    "backend_options: &a {a: *a}\n",
    "kernels: {<<: [1, 2]}\n",
    "environment: {yes: *nothing}\n",
    "extends: run.yaml\n",
    "extends: /dev/zero\n",
    'environment: {"\\ud800": "\\udfff"}\n',
    "\tname: tabs\n",
    "train: {seed: 0x" + "f" * 10_000 + "}\n",
    "backend_options: " + "[" * 2000 + "\n",
    "environment:\n" + "".join(f"  A{n}: x\n" for n in range(3000)),
)
"""What YAML can do and nobody needs."""
LINES = (
    b'{"prompt": 5, "completion": NaN}',
    b'{"prompt": "a", "prompt": "b", "completion": "c"}',
    b'{"prompt": "a", "completion": "b"',
    b'{"prompt": "\\ud800", "completion": "c"}',
    b'{"prompt": "\xff", "completion": "c"}',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"1" * 10_000,
    b'{"prompt": ' + b"9" * 10_000 + b', "completion": "c"}',
    b"\0" * 1000,
    b"\x1f\x8b\x08\x00rest of an archive",
    b" " * 100_000,
)
"""Lines that are not rows."""

NUMBERS = st.sampled_from((0, 1, -1, 512, 10**6, 2**31, 2**63, 2**70, 0.5, 1e-300, 1e300)) | (
    st.floats()
)
TEXTS = st.text(max_size=30) | st.sampled_from(
    (
        *("auto", "none", "~", "$HOME", "${", "../..", "/dev/zero", "--help", "\x1b[31mred"),
        *("a\0b", "\u202eabc", "a" * 5000, "%s", "{0}", "{{ 7*7 }}", "$(touch pwned)"),
    )
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    NUMBERS | TEXTS | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "What is 2 + 2?", "completion": "4"},
    {"instruction": "Add.", "input": "2, 2", "output": "é 東京"},
    {
        "messages": [
            {"role": "user", "content": "Hello?"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "Good morning."},
        ],
        "tools": [{"name": "f", "parameters": {"type": "object", "properties": {}}}],
    },
)


@st.composite
def damaged(draw: Callable[..., Any], sound: Any) -> Any:
    """A value with something else somewhere in it."""
    if not isinstance(sound, dict | list) or not sound or draw(st.booleans()):
        return draw(VALUES)
    whole = copy.deepcopy(sound)
    key = draw(st.sampled_from(sorted(sound) if isinstance(sound, dict) else range(len(sound))))
    whole[key] = draw(damaged(sound[key]))
    return whole


@st.composite
def changed_bytes(draw: Callable[..., Any], data: bytes) -> bytes:
    """Bytes of which some are others."""
    begin = draw(st.integers(0, len(data)))
    end = draw(st.integers(begin, min(len(data), begin + 20)))
    return data[:begin] + draw(st.binary(max_size=4)) + data[end:]


@st.composite
def generated(draw: Callable[..., Any], sound: dict[str, Any] | None = None) -> bytes:
    """A file of rows; of a run that is sound, a run file."""
    if sound is None:
        row = draw(st.sampled_from(ROWS))
        rows = draw(st.lists(st.just(row) | damaged(row), min_size=1, max_size=4))
        lines = [json.dumps(each).encode() for each in rows]
        if draw(st.booleans()):
            lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(LINES)))
        data = draw(st.sampled_from((b"", b"\xef\xbb\xbf"))) + b"\n".join(lines)
        data = draw(st.sampled_from((data, b"[" + b",".join(lines) + b"]")))
    else:
        fields = copy.deepcopy(sound)
        for _ in range(draw(st.integers(0, 3))):
            *way, name = draw(st.sampled_from(PATHS))[: draw(st.sampled_from((1, 9, 9)))]
            place = fields
            for step in way:
                place[step] = place[step] if isinstance(place.get(step), dict) else {}
                place = place[step]
            name += draw(st.sampled_from(("", "", "", "s")))
            place[name] = draw(VALUES)
        text = yaml.safe_dump(fields, allow_unicode=draw(st.booleans()))
        text += draw(st.sampled_from(("", "", *YAML)))
        data = text.encode("utf-8", "surrogatepass")
    return draw(st.just(data) | changed_bytes(data))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("generated")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(found)
        yield found
    assert not list(found.rglob("pwned")), "a program was run"


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return make_tokenizer(folder / "tokenizer")


def accepted(work: Callable[[], object]) -> bool:
    """Whether it is; an error that is not for the user fails the test."""
    try:
        work()
    except AnygaugeError as error:
        assert len(str(error)) > 20, f"says too little: {error}"
        return False
    return True


EXAMPLES = (60, pytest.param(5000, marks=pytest.mark.slow))


def each(check: Callable[[Any], None], count: int) -> None:
    """Check many examples, the same ones each time where they are few."""
    quiet = settings(
        deadline=None,
        derandomize=count < 1000,
        max_examples=count,
        suppress_health_check=list(HealthCheck),
    )
    quiet(given(st.data())(check))()


@pytest.mark.parametrize("count", EXAMPLES)
def test_a_run_file_is_accepted_or_refused_in_words(
    count: int, folder: Path, tokenizer: Any
) -> None:
    rows = {"path": str(FIXTURES / "rows.jsonl")}
    sound = {
        "name": "tiny",
        "output": "out",
        "backend": "cpu",
        "model": {"config": TINY, "tokenizer": "tokenizer"},
        "data": {"train": rows, "max_length": 96, "cache": "off"},
        "train": {"steps": 2, "global_batch_size": 4, "micro_batch_size": 2},
        "strategy": {"name": "single"},
    }
    path = folder / "run.yaml"
    (folder / "base.yaml").write_text(yaml.safe_dump(sound))
    found = set()

    def check(data: Any) -> None:
        path.write_bytes(data.draw(generated(sound)))
        found.add(accepted(lambda: read_request(path, [], {}, need_device=False)))

    each(check, count)
    assert found == {True, False}


@pytest.mark.parametrize("count", EXAMPLES)
def test_rows_are_accepted_or_refused_in_words(count: int, folder: Path, tokenizer: Any) -> None:
    found = set()

    def check(data: Any) -> None:
        written = data.draw(generated())
        path = folder / ("rows.json" if written.lstrip().startswith(b"[") else "rows.jsonl")
        path.write_bytes(written)
        section = DataSection(train=SourceSection(path=str(path)), max_length=96, cache="off")
        found.add(accepted(lambda: (peek(section), prepare(section, tokenizer, seed=0))))

    each(check, count)
    assert found == {True, False}
