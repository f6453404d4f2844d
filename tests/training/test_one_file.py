"""One run file, tried with every strategy by a word on the command line: one adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import TINY, Run, run_file

WORDS = {
    "zero": (2, ("strategy=zero",)),
    "ddp": (2, ("strategy=ddp",)),
    "fsdp": (2, ("strategy=fsdp",)),
    "tensor": (2, ("strategy=tensor",)),
    "pipeline": (2, ("strategy=pipeline",)),
    "mics": (2, ("strategy=mics",)),
    "auto": (2, ("strategy=auto",)),
    "cp": (2, ("strategy=fsdp", "strategy.cp=2")),
    "hsdp": (4, ("strategy=fsdp", "strategy.dp_replicate=2")),
    "tensor x fsdp": (4, ("strategy=fsdp", "strategy.tp=2")),
    "pipeline x ddp": (4, ("strategy=ddp", "strategy.pp=2", "strategy.schedule=zero_bubble")),
}
USUAL = ("zero", "tensor", "pipeline")
SLOW = [word for word in WORDS if word not in USUAL]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights in files, from which each strategy reads its parts."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(3)
    fields = {**TINY, "num_hidden_layers": 4, "tie_word_embeddings": True}
    AutoModelForCausalLM.from_config(LlamaConfig(**fields)).save_pretrained(folder)
    return folder


def trained(folder: Path, base: Path, words: dict[str, tuple[int, tuple[str, ...]]]) -> list[Run]:
    file = run_file(
        folder,
        model={"name": str(base), "tokenizer": str(folder / "tokenizer")},
        train={"optimizer": {"name": "sgd", "lr": 0.5}, "micro_batch_size": 1},
    )
    return finished(
        [
            RunPart(file=str(file), overrides=(f"launch.devices={devices}", *overrides))
            for devices, overrides in words.values()
        ],
        timeout_s=1200,
    )


@pytest.mark.parametrize(
    "words", [USUAL, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["usual", "slow"]
)
def test_the_adapter_is_that_of_single(words: list[str], base: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"single": (1, ("strategy=single",))}
    alone, *runs = trained(tmp_path, base, asked | {word: WORDS[word] for word in words})
    wanted = load_file(alone.folder / "adapter" / "adapter_model.safetensors")
    ids = torch.arange(1, 60)[None]
    logits = in_peft(base, alone.folder / "adapter", ids)
    assert not torch.allclose(logits, in_peft(base, None, ids), atol=1e-3), "it did learn"
    for word, run in zip(words, runs, strict=True):
        assert run.steps("loss") == pytest.approx(alone.steps("loss"), rel=1e-5), word
        found = load_file(run.folder / "adapter" / "adapter_model.safetensors")
        assert found.keys() == wanted.keys(), word
        for name, value in wanted.items():
            assert found[name].shape == value.shape, (word, name)
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0, msg=f"{word} {name}")
        of_peft = in_peft(base, run.folder / "adapter", ids)
        torch.testing.assert_close(of_peft, logits, atol=1e-5, rtol=0, msg=word)


def in_peft(base: Path, adapter: Path | None, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the model with an adapter, by transformers and peft alone."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits
    return logits
