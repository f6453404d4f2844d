"""Workloads: rows of the right length, tokenized alike whether prompt and answer are joined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.contender_plan import BenchmarkError, ContenderPlan
from benchmarks.workload_rows import WrittenRows, texts, write_rows


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.workload_rows.GENERATED_TEXTS", 300)


def written(folder: Path, workload: str, **changes: Any) -> WrittenRows:
    given: dict[str, Any] = {"steps": 6, "micro_batch": 1, "vocabulary": 400, "seed": 1}
    plan = ContenderPlan(**{**given, "length": 48, "max_length": 128, **changes})
    return write_rows(workload, folder, plan)


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sizes(folder: Path, texts: list[str]) -> list[int]:
    """Tokens of each."""
    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    return [len(tokenizer.encode(text).ids) for text in texts]


def test_full_rows_have_exactly_the_length(tmp_path: Path) -> None:
    rows = written(tmp_path, "full")
    assert set(sizes(tmp_path, [row["text"] for row in read(rows.exact)])) == {47}  # and its end
    assert rows.tokens == 12 * 48


def test_ragged_rows_count_the_same_joined_and_apart(tmp_path: Path) -> None:
    rows = written(tmp_path, "generated")
    found, pool = read(rows.exact), read(rows.pool)
    joined = sizes(tmp_path, [row["prompt"] + row["completion"] for row in found])
    prompts = sizes(tmp_path, [row["prompt"] for row in found])
    answers = sizes(tmp_path, [row["completion"] for row in found])
    assert joined == [a + b for a, b in zip(prompts, answers, strict=True)]
    assert len(found) == 12 and sum(joined) + 12 == rows.tokens
    assert max(joined) < 128 and "; 0 longer" not in rows.about
    assert rows.about.startswith(f"{min(joined) + 1} to {max(joined) + 1} tokens a row")
    # The pool for packing begins with them.
    assert pool[:12] == found and len(pool) > 12


def test_the_same_seed_writes_the_same_rows(tmp_path: Path) -> None:
    first, again, other = (
        written(tmp_path / str(run), "generated", seed=seed).exact.read_bytes()
        for run, seed in enumerate((1, 1, 2))
    )
    assert first == again != other


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"the run reads 5000: lower --steps"):
        written(tmp_path, "generated", steps=2500)


def test_a_workload_of_files_asks_for_them(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="set ANYGAUGE_DATA"):
        texts("gsm8k", None, 0)
    with pytest.raises(BenchmarkError, match="no such file"):
        texts("alpaca", tmp_path, 0)


def test_prompts_end_where_a_token_ends(tmp_path: Path) -> None:
    (tmp_path / "gsm8k_train.jsonl").write_text(
        json.dumps({"question": " How many? ", "answer": "\n3\n"}) + "\n"
    )
    (tmp_path / "alpaca_en_demo.json").write_text(
        json.dumps([{"instruction": "Add.", "input": "1, 2", "output": "3"}])
    )
    (question,) = texts("gsm8k", tmp_path, 0)
    assert (question.prompt, question.completion) == ("How many?\n", "3")
    (task,) = texts("alpaca", tmp_path, 0)
    assert (task.prompt, task.completion) == ("Add.\n1, 2\n", "3")
