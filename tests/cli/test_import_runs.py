"""Imported run files train: one of each tool; Axolotl's with the losses of the same by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.chats import make_chat_tokenizer
from tests.helpers.runs import called, merged, save_tiny, trained_here
from tests.helpers.tiny_tokenizer import FIXTURES

ROWS = [json.loads(line) for line in (FIXTURES / "rows.jsonl").read_text().splitlines()]
CHATML = "chatml"

Files = dict[str, Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A tiny base, and rows in the layouts of several tools, in one folder."""
    folder = tmp_path_factory.mktemp("imported")
    save_tiny(folder / "base", {"vocab_size": 512})
    make_chat_tokenizer(folder / "base")
    pairs = [(row["prompt"], row["completion"]) for row in ROWS]
    layouts: dict[str, list[dict[str, Any]]] = {
        "chats": [
            {"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]}
            for a, b in pairs
        ],
        "texts": [{"body": f"{a} {b}"} for a, b in pairs],
        "alpaca": [{"instruction": a, "input": "", "output": b} for a, b in pairs],
        "pairs": [{"prompt": a, "completion": b} for a, b in pairs],
    }
    for name, rows in layouts.items():
        text = "\n".join(map(json.dumps, rows))
        (folder / f"{name}.jsonl").write_text(text + "\n")
    (folder / "sets.json").write_text(json.dumps({"mine": {"file_name": "alpaca.jsonl"}}))
    return {name: folder / name for name in ("base", "sets.json", *(f"{n}.jsonl" for n in layouts))}


def shared(files: Files) -> dict[str, Any]:
    return {
        "base_model": str(files["base"]),
        "adapter": "lora",
        "lora_r": 4,
        "lora_alpha": 8,
        "lora_target_linear": True,
        "sequence_len": 256,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine",
        "learning_rate": 1.0e-3,
        "warmup_steps": 2,
        "bf16": False,
        "seed": 7,
    }


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chat": (
        {
            "chat_template": CHATML,
            "datasets": [
                {
                    "path": "chats.jsonl",
                    "type": "chat_template",
                    "field_messages": "conversations",
                    "message_property_mappings": {"role": "from", "content": "value"},
                }
            ],
        },
        {"train": {"path": "chats.jsonl"}, "chat_template": CHATML},
    ),
    "completion": (
        {"datasets": [{"path": "texts.jsonl", "type": "completion", "field": "body"}]},
        {"train": {"path": "texts.jsonl", "text": "body"}},
    ),
    "packed": (
        {"sample_packing": True, "datasets": [{"path": "alpaca.jsonl", "type": "alpaca"}]},
        {"train": {"path": "alpaca.jsonl"}, "packing": True},
    ),
}
"""Axolotl's keys; the section `data` as one would write it."""


@pytest.mark.parametrize("name", CASES)
def test_an_axolotl_file_trains_as_the_same_by_hand(
    name: str, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, data = CASES[name]
    monkeypatch.chdir(files["base"].parent)  # their paths are relative to it
    losses = []
    source, run = tmp_path / "axolotl.yaml", tmp_path / "imported.yaml"
    values = {**shared(files), **theirs, "output_dir": str(tmp_path / "a")}
    source.write_text(yaml.safe_dump(values))
    done = called(["import", source, "--output", run])
    assert done.returncode == 0, done.stderr
    by_hand = {
        "name": "hand",
        "output": str(tmp_path),
        "model": {"name": str(files["base"])},
        "adapter": {"r": 4, "alpha": 8},
        "data": merged(
            {"max_length": 256, "too_long": "drop"},
            {**data, "train": {**data["train"], "path": str(files[data["train"]["path"]])}},
        ),
        "train": {
            "steps": 4,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "optimizer": {"lr": 1.0e-3},
            "schedule": {"warmup_steps": 2},
            "gradient_checkpointing": False,
            "seed": 7,
        },
        "precision": {"param_dtype": "float32"},
    }
    hand = tmp_path / "hand.yaml"
    hand.write_text(yaml.safe_dump(by_hand))
    for path in (run, hand):
        losses.append(trained_here(path, backend="cpu").steps("loss"))
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4


def tool_files(files: Files, folder: Path) -> dict[str, tuple[Path, list[Any]]]:
    """Tool -> its file, and what is given to import beside it."""
    base = str(files["base"])
    common = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1.0e-3}
    llamafactory = {
        **common,
        "model_name_or_path": base,
        "finetuning_type": "lora",
        "stage": "sft",
        "dataset": "mine",
        "cutoff_len": 96,
    }
    trl = {**common, "model_name_or_path": base, "dataset_name": str(files["pairs.jsonl"])}
    trl |= {"max_length": 96, "completion_only_loss": True, "use_peft": True, "lora_r": 4}
    shell = f"PT_HPU_LAZY_MODE=1 python run_lora_clm.py --model_name_or_path {base} " + " ".join(
        f"--{name} {value}" for name, value in {**common, "max_seq_length": 96}.items()
    )
    shell += f" --train_file {files['alpaca.jsonl']} --use_habana --use_lazy_mode --do_train"
    texts = {
        "llamafactory.yaml": yaml.safe_dump(llamafactory),
        "trl.yaml": yaml.safe_dump(trl),
        "trainer.json": json.dumps(common),
        "habana.sh": shell,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    template = ["--set", f"data.chat_template={CHATML}"]
    rows = ["--set", f"model.name={base}", "--set", f"data.train.path={files['pairs.jsonl']}"]
    return {
        "LLaMA-Factory": (folder / "llamafactory.yaml", [files["sets.json"], *template]),
        "TRL": (folder / "trl.yaml", []),
        "Trainer": (folder / "trainer.json", [*rows, "--set", "data.max_length=96"]),
        "optimum-habana": (folder / "habana.sh", []),
    }


@pytest.mark.parametrize("tool", ["LLaMA-Factory", "TRL", "Trainer", "optimum-habana"])
def test_a_file_of_each_tool_trains(tool: str, files: Files, tmp_path: Path) -> None:
    file, beside = tool_files(files, tmp_path)[tool]
    given = ["--set", f"output={tmp_path}", "--set", "name=theirs"]
    run = tmp_path / "imported.yaml"
    done = called(["import", file, *beside, *given, "--output", run])
    assert done.returncode == 0, done.stderr
    assert f"({tool})" in done.stdout
    here = tmp_path / "here.yaml"  # as on another device: docs/coming-from.md
    here.write_text("extends: imported.yaml\nbackend: cpu\nbackend_options: null\n")
    losses = trained_here(here).steps("loss")
    assert len(losses) == 2
    assert all(0 < loss < 10 for loss in losses)
