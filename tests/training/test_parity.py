"""One run file, tried with every strategy by a word on the command line: one gradient, one result.

Whatever the ranks, the accumulation, the strategy or the way in which rows are read. Real ranks on
ragged rows, so that they hold different numbers of tokens; float32 without dropout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anygauge.models.factors import changes_base
from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import Run, run_file, save_tiny
from tests.helpers.tiny_tokenizer import VOCABULARY
from tests.models.test_new_tokens import MODEL, rows_of_text

TOLERANCE = 2e-5
"""Relative; float32 sums in another order. A rank counted wrongly moves losses by percents."""
STREAMED = "data.streaming=true"
WORDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ("strategy=single", "train.micro_batch_size=4")),
    "accumulation": (1, ("strategy=single",)),
    "zero": (2, ("strategy=zero",)),
    "zero in one piece": (2, ("strategy=zero", "train.micro_batch_size=2")),
    "ddp": (2, ("strategy=ddp",)),
    "fsdp": (2, ("strategy=fsdp",)),
    "tensor": (2, ("strategy=tensor",)),
    "pipeline": (2, ("strategy=pipeline",)),
    "mics": (2, ("strategy=mics",)),
    "auto": (2, ("strategy=auto",)),
    "zero on one rank": (1, ("strategy=zero",)),
    "not recomputed": (2, ("strategy=zero", "train.gradient_checkpointing=false")),
    **{f"zero{n}": (2, ("strategy=zero", f"strategy.stage={n}")) for n in (0, 1, 2)},
    "cp": (2, ("strategy=fsdp", "strategy.cp=2")),
    "hsdp": (4, ("strategy=fsdp", "strategy.dp_replicate=2")),
    "tensor x fsdp": (4, ("strategy=fsdp", "strategy.tp=2")),
    "tensor, alone in its group": (2, ("strategy=fsdp", "strategy.tp=2")),
    "pipeline x ddp": (
        4,
        (
            "strategy=ddp",
            "strategy.pp=2",
            "strategy.schedule=zero_bubble",
            "train.gradient_checkpointing=false",
        ),
    ),
    "tensor x pipeline x ddp": (8, ("strategy=ddp", "strategy.tp=2", "strategy.pp=2")),
    **{
        f"{name}, streamed": (2, (f"strategy={name}", STREAMED))
        for name in ("ddp", "fsdp", "tensor", "pipeline")
    },
    "ulysses": (2, ("strategy=fsdp", "strategy.cp=2", "strategy.cp_method=ulysses", STREAMED)),
}
USUAL = ("accumulation", "zero", "zero in one piece", "ddp", "fsdp", "tensor", "pipeline")
SLOW = [word for word in WORDS if word not in (*USUAL, "single")]
CLIPPED, RATE = 0.05, 5.0
CLOSE = TOLERANCE * CLIPPED * RATE
"""Of factors: as near as losses are, beside what a step moves them by."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Whether the embedding is the output layer, too -> a model with no row to spare, in files."""
    sizes = {"num_hidden_layers": 4, "vocab_size": VOCABULARY}
    return {
        tied: save_tiny(tmp_path_factory.mktemp("base"), {**sizes, "tie_word_embeddings": tied})
        for tied in (True, False)
    }


def trained(file: Path, words: Sequence[str]) -> list[Run]:
    """By `single` with the whole batch in one forward, and by each word."""
    given = [WORDS[word] for word in ("single", *words)]
    parts = [
        RunPart(file=str(file), overrides=(f"launch.devices={devices}", *overrides))
        for devices, overrides in given
    ]
    return finished(parts, timeout_s=1200)


def result_of(run: Run) -> dict[str, torch.Tensor]:
    (file,) = run.folder.glob("*/*model.safetensors")
    return load_file(file)


@pytest.mark.parametrize(
    "words", [USUAL, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["usual", "slow"]
)
def test_the_adapter_is_that_of_single(
    words: list[str], bases: dict[bool, Path], tmp_path: Path
) -> None:
    base = bases[True]
    train = {"optimizer": {"name": "sgd", "lr": RATE}, "micro_batch_size": 1}
    # A stream has an order of its own.
    fields = {"model": {"name": str(base)}, "data": {"shuffle": False}}
    file = run_file(tmp_path, train={**train, "max_grad_norm": CLIPPED}, **fields)
    alone, *runs = trained(file, words)
    wanted = result_of(alone)
    ids = torch.arange(1, 60)[None]
    logits = in_peft(base, alone.folder / "adapter", ids)
    assert not torch.allclose(logits, in_peft(base, None, ids), atol=1e-3), "it did learn"
    assert min(alone.steps("grad_norm")) > CLIPPED, "every step was clipped"
    for word, run in zip(words, runs, strict=True):
        assert run.steps("loss") == pytest.approx(alone.steps("loss"), rel=TOLERANCE), word
        assert run.steps("grad_norm") == pytest.approx(alone.steps("grad_norm"), rel=1e-3), word
        assert run.steps("num_loss_tokens") == alone.steps("num_loss_tokens"), word
        found = result_of(run)
        assert found.keys() == wanted.keys(), word
        for name, value in wanted.items():
            assert found[name].shape == value.shape, (word, name)
            torch.testing.assert_close(found[name], value, atol=CLOSE, rtol=0, msg=f"{word} {name}")
        of_peft = in_peft(base, run.folder / "adapter", ids)
        torch.testing.assert_close(of_peft, logits, atol=10 * CLOSE, rtol=0, msg=word)


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


LAST = r"model\.layers\.3\..*"
SHARDED = ("ddp", "fsdp", "zero")
DIVIDED = (*SHARDED, "zero2", "tensor", "pipeline")
CASES: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    **{
        f"init {init}": (
            {"adapter": {"r": 4, "init": init}},
            ("ddp", "zero") if changes_base(init) else SHARDED,
        )
        for init in ("gaussian", "orthogonal", False, "pissa", "olora")
    },
    "the last layer": ({"adapter": None, "train": {"trainable": [LAST]}}, DIVIDED),
    "all but the last layer": (
        {"adapter": None, "train": {"frozen": [LAST, r".*embed_tokens.*"]}},
        DIVIDED,
    ),
    "new tokens": ({"model": MODEL}, SHARDED),
    "new tokens, all weights": (
        {"adapter": None, "model": MODEL},
        (*SHARDED, "tensor", "pipeline"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_learn_what_one_learns(
    case: str, tied: bool, bases: dict[bool, Path], tmp_path: Path
) -> None:
    changes, words = CASES[case]
    words = [word for word in words if not (word == "pipeline" and tied)]
    base = bases[tied]
    given = {"precision": {"param_dtype": "float32"}, **changes}
    given["model"] = {"name": str(base), **changes.get("model", {})}
    if "model" in changes:
        given["data"] = {"train": {"path": rows_of_text(tmp_path)}, "max_length": 64}
    alone, *runs = trained(run_file(tmp_path, **given), words)
    report = json.loads((alone.folder / "report.json").read_text())
    assert report["verified"]["logits"] < 1e-3
    before, expected = load_file(base / "model.safetensors"), result_of(alone)

    def changed(found: dict[str, torch.Tensor]) -> set[str]:
        return {name for name, was in before.items() if not same(found.get(name), was)}

    def same(found: torch.Tensor | None, was: torch.Tensor) -> bool:
        return found is not None and found.shape == was.shape and torch.equal(found, was)

    for word, run in zip(words, runs, strict=True):
        assert run.steps("loss") == pytest.approx(alone.steps("loss"), abs=1e-5), word
        found = result_of(run)
        assert found.keys() == expected.keys() and changed(found) == changed(expected), word
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize("gather", ["flat", "layer"])
def test_a_checkpoint_after_an_evaluation_leaves_ranks_alike(gather: str, tmp_path: Path) -> None:
    # peft asks whole modules for their state where rank 0 saves, upon which FSDP2 reshards there.
    changes: dict[str, Any] = {
        "model": {"name": str(save_tiny(tmp_path / "base"))},
        "adapter": {"r": 4, "modules_to_save": ["embed_tokens"]},
        "data": {"eval_fraction": 0.25},
        "train": {"steps": 2, "eval_every": 1, "optimizer": {"lr": 5e-3}},
        "checkpoint": {"every": 1},
        "precision": {"param_dtype": "float32"},
    }
    two = {"strategy": {"name": "fsdp", "gather": gather}, "launch": {"devices": 2}}
    files = [
        run_file(tmp_path, **changes, **each, name=name)
        for name, each in (("one", {"strategy": {"name": "single"}}), ("two", two))
    ]
    one, other = finished([RunPart(file=str(file)) for file in files], timeout_s=120)
    assert other.steps("loss") == pytest.approx(one.steps("loss"), rel=TOLERANCE)
    assert other.evaluations() == pytest.approx(one.evaluations(), rel=TOLERANCE)
