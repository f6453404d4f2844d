"""``--set strategy=WORD`` alone: what would run on Gaudi, what is refused before a rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gaudi import standin_environment, standin_site
from tests.helpers.runs import TINY, anygauge, called, run_file

COMPILED = "backend_options.mode=compile"  # lazy mode refuses what FSDP2 runs

WORDS = {
    "zero": ("strategy=zero", "strategy.reentrant=true"),  # DeepSpeed from 0.19.6 on has another
    "ddp": ("strategy=ddp",),
    "fsdp": ("strategy=fsdp", COMPILED),
    "mics": ("strategy=mics", COMPILED),
    "tensor": ("strategy=tensor",),
    "pipeline": ("strategy=pipeline",),
    "sequences": ("strategy=fsdp", "strategy.cp=2", COMPILED),
    "auto": ("strategy=auto",),
}


def sets(*overrides: str) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


USUAL = ("tensor", "fsdp")


@pytest.mark.parametrize(
    "word", [*USUAL, *(pytest.param(w, marks=pytest.mark.slow) for w in WORDS if w not in USUAL)]
)
def test_a_dry_run_on_the_stand_in_for_gaudi(word: str, tmp_path: Path) -> None:
    site = standin_site(tmp_path)
    done = anygauge(
        [
            *("train", run_file(tmp_path, train={"micro_batch_size": 1}), "--dry-run"),
            *("--backend", "hpu", "--devices", "2"),
            *sets(*WORDS[word]),
        ],
        environment=standin_environment(site, tmp_path / "record"),
    )
    assert done.returncode == 0, done.stderr
    named = {
        "tensor": "ddp",
        "pipeline": "ddp",
        "mics": "fsdp",
        "sequences": "fsdp",
        "auto": "auto (the ranks decide once their devices are open)",
    }
    assert f"strategy {named.get(word, word)}, 1 x 2 ranks" in done.stdout
    assert "PT_HPU_LAZY_MODE" in done.stdout
    assert not (tmp_path / "out").exists()


REFUSED: list[tuple[int, tuple[str, ...], dict[str, Any], str]] = [
    (3, ("strategy=tensor",), {}, "3 ranks cannot share 4 attention heads evenly"),
    (3, ("strategy=ddp", "strategy.tp=2"), {}, "not a multiple of 2. Set strategy.tp to"),
    (2, ("strategy=pipeline",), {"train": {"micro_batch_size": 4}}, "at least 2 micro-batches"),
    (
        2,
        ("strategy=pipeline", "strategy.schedule=interleaved"),
        {},
        "4 stages, but the model has only 2 layers",
    ),
    (2, ("strategy=tensor",), {"adapter": {"dora": True}}, "Leave it out, or use strategy.name"),
    (
        2,
        ("strategy=tensor",),
        {"train": {"optimizer": {"name": "adafactor"}}},
        "Use train.optimizer.name: adamw_8bit",
    ),
    (
        2,
        ("strategy=tensor",),
        {"model": {"config": {**TINY, "model_type": "gpt2"}}},
        "describes how to divide the layers of gpt2 models",
    ),
]


@pytest.mark.parametrize(("devices", "words", "changes", "said"), REFUSED)
def test_what_cannot_be_is_refused_before_a_rank_starts(
    devices: int, words: tuple[str, ...], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    fields = {"train": {"micro_batch_size": 1}, **changes}
    if "model" in fields:
        fields["model"] = {**fields["model"], "tokenizer": str(tmp_path / "tokenizer")}
    done = called(["train", run_file(tmp_path, **fields), "--devices", str(devices), *sets(*words)])
    assert done.returncode in (1, 2), done.stdout
    assert said in " ".join(done.stderr.split()), done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "out").glob("*/logs/*")), "no rank was started"
