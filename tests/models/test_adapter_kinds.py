"""Every kind of adapter: trained, loaded again by peft alone, and folded into its base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.cli import run as command
from anygauge.models.factory import dtype_name
from tests.helpers.runs import TINY, Run, run_file, trained_here
from tests.training.test_results import plain_loss

GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 512,
    "n_positions": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
BASES: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "tied": {**TINY, "tie_word_embeddings": True},
    "gpt2": GPT2,
}
KINDS: dict[str, tuple[str, dict[str, Any], int]] = {
    "rslora": ("llama", {"rslora": True, "dropout": 0.1}, 14),
    "dora": ("llama", {"dora": True}, 14),
    "groups": (
        "llama",
        {
            "targets": ["q_proj", "v_proj"],
            "groups": [
                {"targets": r"model\.layers\.1\..*_proj", "r": 2, "alpha": 8},
                {"targets": ["lm_head"], "alpha": 5.5},
            ],
        },
        10,
    ),
    "embeddings": ("llama", {"targets": ["embed_tokens", "lm_head"], "alpha": 128}, 2),
    "dora on everything": (
        "llama",
        {"dora": True, "rslora": True, "dropout": 0.1, "targets": ".*"},
        16,
    ),
    "tied embeddings": ("tied", {"targets": ["embed_tokens", "lm_head"], "alpha": 128}, 2),
    "embedding of a tied model": ("tied", {"targets": ["all-linear", "embed_tokens"]}, 15),
    "conv1d": ("gpt2", {}, 8),
    "dora on conv1d": ("gpt2", {"dora": True, "dropout": 0.1, "targets": ["c_fc", "wte"]}, 3),
}

UNTIED = {"tied embeddings", "embedding of a tied model", "dora on conv1d"}
"""Kinds that change one use of a tensor which their base has in two places."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a model of each architecture, one step from random."""
    folders = {}
    for name, config in BASES.items():
        folder = tmp_path_factory.mktemp(name)
        path = run_file(
            folder,
            model={"config": config, "tokenizer": str(folder / "tokenizer")},
            adapter=None,
            strategy={"name": "single"},
            train={"steps": 1},
        )
        folders[name] = trained_here(path).folder / "model"
    return folders


@pytest.fixture(scope="module", params=KINDS)
def kind(
    request: pytest.FixtureRequest,
    bases: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Run]:
    """An adapter of this kind, trained in one process."""
    base, adapter, _ = KINDS[request.param]
    folder = tmp_path_factory.mktemp("kind")
    path = run_file(
        folder,
        model={"name": str(bases[base])},
        adapter={"r": 4, **adapter},
        data={"eval_fraction": 0.2},
        train={"steps": 3, "eval_at_start": True, "optimizer": {"lr": 2.0e-2}},
        strategy={"name": "single"},
    )
    return request.param, trained_here(path)


def test_the_saved_adapter_gives_the_trained_logits(kind: tuple[str, Run]) -> None:
    report = json.loads((kind[1].folder / "report.json").read_text())["verified"]
    assert report["reloaded"] is True
    assert report["logits"] < 1e-5
    assert report["effect"] > 1e-3, "and these are not the base's"


def test_peft_alone_finds_the_base_and_gives_the_same_loss(kind: tuple[str, Run]) -> None:
    from peft import AutoPeftModelForCausalLM
    from peft.tuners.lora import LoraLayer

    name, run = kind
    config = json.loads((run.folder / "adapter" / "adapter_config.json").read_text())
    # Others read lora_alpha and the rank alone: llama.cpp, and what is built on it.
    assert (config["use_rslora"], config["alpha_pattern"]) == (False, {})
    model = AutoPeftModelForCausalLM.from_pretrained(run.folder / "adapter").eval()
    assert sum(isinstance(m, LoraLayer) for m in model.modules()) == KINDS[name][2]
    before, after = run.evaluations()[0], run.evaluations()[-1]
    assert plain_loss(model, run) == pytest.approx(after, rel=1e-5)
    assert after != pytest.approx(before, rel=1e-4), "the adapter does something"


def test_merged_it_gives_the_same_loss(
    kind: tuple[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    name, run = kind
    output = tmp_path / "merged"
    assert command(["merge", str(run.folder), "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert ("one tensor in the base" in said) == (name in UNTIED)
    merged = AutoModelForCausalLM.from_pretrained(output, **{dtype_name(): torch.float32}).eval()
    assert plain_loss(merged, run) == pytest.approx(run.evaluations()[-1], rel=1e-4)
    assert [p.name for p in tmp_path.iterdir()] == ["merged"]


def test_groups_have_their_own_rank_and_scale(bases: dict[str, Path], tmp_path: Path) -> None:
    _, adapter, _ = KINDS["groups"]
    path = run_file(
        tmp_path,
        model={"name": str(bases["llama"])},
        adapter={"r": 4, **adapter},
        strategy={"name": "single"},
        train={"steps": 1},
    )
    from safetensors.torch import load_file

    folder = trained_here(path).folder / "adapter"
    tensors = load_file(folder / "adapter_model.safetensors")
    inner = {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): len(tensor)
        for name, tensor in tensors.items()
        if name.endswith("lora_A.weight")
    }
    assert inner["model.layers.0.self_attn.q_proj"] == 4
    assert inner["model.layers.1.self_attn.q_proj"] == 2
    assert inner["model.layers.1.mlp.up_proj"] == 2
    assert inner["lm_head"] == 4
    assert "model.layers.0.mlp.up_proj" not in inner
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(bases["llama"])
    assert config["lora_alpha"] == 32
    # One step of AdamW moves each number of B alike; another alpha is multiplied in.
    moved = {n: t.abs().max() for n, t in tensors.items() if n.endswith("lora_B.weight")}
    usual = moved["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"]
    assert moved["base_model.model.lm_head.lora_B.weight"] / usual == pytest.approx(5.5 / 32, 1e-2)
