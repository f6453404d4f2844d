"""The run files in examples/ are read as they stand, and train where a tiny model takes the place
of theirs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from anygauge.launch.request import read_request
from tests.docs.pages import ROOT
from tests.helpers.chats import assistant, make_chat_tokenizer, template, user
from tests.helpers.runs import Run, called, save_tiny, tiny_model, trained_here

EXAMPLES = ROOT / "examples"
QUESTIONS = [
    {"question": f"What is {n} + 2?", "answer": f"{n} + 2 = {n + 2}.", "source": "none"}
    for n in range(40)
]
CHATS = [
    {"messages": [user(row["question"]), assistant(row["answer"]), user("And 1?"), assistant("1")]}
    for row in QUESTIONS
]
MIXTURE: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 8},
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_they_are_read_as_they_stand(path: Path, tmp_path: Path) -> None:
    # Their rows are on the hub. This row has the columns of each.
    rows = [{**QUESTIONS[0], **CHATS[0], "instruction": "Add 1.", "output": "1"}]
    rows[0] |= {"chosen": "1", "rejected": "2"}
    at = write_rows(tmp_path, rows * 40)
    overrides = [f"data.train.path={at}", "backend_options=null"]
    request = read_request(path, overrides, {"backend": "cpu"}, need_device=False)
    assert request.run.name in (path.stem, "llama2-70b-lora")


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "rows.jsonl"


def trained(name: str, folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Run:
    """Three steps of an example on the CPU, with a model and rows of this test's own."""
    write_rows(folder, rows)
    over = {
        "extends": str(EXAMPLES / f"{name}.yaml"),
        "output": str(folder / "runs"),
        "backend": "cpu",
        "data": {"train": {"path": "rows.jsonl"}, "max_length": 96, "cache": str(folder / "cache")},
        "train": {"steps": 3, "global_batch_size": 4, "micro_batch_size": 2},
        **changes,
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump({**over, "model": {"name": "model"}}))
    run = trained_here(folder / "tiny.yaml")
    assert len(run.steps("loss")) == 3
    assert json.loads((run.folder / "report.json").read_text())["verified"]["reloaded"]
    return run


def test_first_trains(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    run = trained("first", tmp_path, QUESTIONS)
    assert (run.folder / "adapter" / "adapter_model.safetensors").exists()
    assert len(run.evaluations()) == 1


def test_qlora_trains(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    run = trained("qlora", tmp_path, QUESTIONS)
    record = json.loads((run.folder / "adapter" / "quantized_base.json").read_text())
    assert "nf4" in json.dumps(record)


def save_chat_model(folder: Path) -> None:
    tiny_model().save_pretrained(folder)
    tokenizer = make_chat_tokenizer(folder)
    tokenizer.chat_template = template("chatml")
    tokenizer.save_pretrained(folder)


def test_chat_trains(tmp_path: Path) -> None:
    save_chat_model(tmp_path / "model")
    run = trained("chat", tmp_path, CHATS)
    assert all(tokens > 0 for tokens in run.steps("num_loss_tokens"))


def test_dpo_trains(tmp_path: Path) -> None:
    save_chat_model(tmp_path / "model")
    rows = [
        {"chosen": row["messages"], "rejected": [*row["messages"][:3], assistant("2")]}
        for row in CHATS
    ]
    run = trained("dpo", tmp_path, rows)
    assert run.steps("num_pairs") == [4, 4, 4]
    assert run.evaluations()[0] == pytest.approx(math.log(2), abs=1e-3)


def test_moe_trains_on_one_device(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", MIXTURE)
    run = trained("moe", tmp_path, QUESTIONS, strategy="single", launch={"devices": 1})
    config = json.loads((run.folder / "adapter" / "adapter_config.json").read_text())
    assert config["target_parameters"]


def test_two_nodes_says_what_it_would_start(tmp_path: Path) -> None:
    rows = write_rows(tmp_path, QUESTIONS)
    arguments = ["launch", EXAMPLES / "two-nodes.yaml", "--render", tmp_path / "plan"]
    changes = ["--backend", "cpu", "--set", f"data.train.path={rows}"]
    done = called([*arguments, *changes], prepare_with=None)
    assert done.returncode == 0, done.stderr
    plan = "".join(path.read_text() for path in (tmp_path / "plan").iterdir())
    assert "node1" in plan
    assert "node2" in plan
