"""Preferences: the published formulas, the same on every strategy that holds whole sequences."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.config.load import load_run_file
from anygauge.data import prepare
from anygauge.interface import PairScores, RunFileError
from anygauge.models.pair_loss import HARMLESS, objective_of
from anygauge.models.tokenizer import load_tokenizer
from anygauge.registry import installed_plugins
from anygauge.training.build_strategy import check_objective
from tests.helpers.forked import RunPart, finished
from tests.helpers.runs import Run, anygauge, called, run_file, save_tiny, trained_here

WORDS = ["gauge", "train", "rail", "track", "signal", "engine", "steam", "brake", "wheel"]
PAIRS = [
    {
        "prompt": " ".join(WORDS[n % 7 :][:2]),
        "chosen": " ".join(WORDS[n % 5 :][: 1 + n % 4]),
        "rejected": " ".join(reversed(WORDS[n % 3 :][: 2 + n % 5])),
    }
    for n in range(14)
]
ALONE = {"strategy": {"name": "single"}}
TRAIN = {"steps": None, "micro_batch_size": 2, "optimizer": {"lr": 5e-3}}


def file_of(folder: Path, **changes: Any) -> Path:
    """A run file over pairs, of which 3 are held out."""
    rows = folder / "pairs.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in PAIRS))
    data = {"train": {"path": str(rows)}, "eval_fraction": 0.2}
    given = {"objective": "dpo", "precision": {"param_dtype": "float32"}, "data": data}
    return run_file(folder, **{**given, "train": TRAIN, **changes})


def log_probs(model: Any, ids: list[int], loss_mask: list[bool]) -> tuple[torch.Tensor, int]:
    """The sum over an answer's tokens, of plain logits; and how many there are."""
    tokens = torch.tensor([ids])
    every = model(input_ids=tokens).logits[0, :-1].float().log_softmax(-1)
    found = every.gather(1, tokens[0, 1:, None]).squeeze(1)[torch.tensor(loss_mask[1:])]
    return found.sum(), len(found)


def published(run: Run, path: Path) -> float:
    """The evaluation's loss by transformers and peft, pair by pair, of the saved adapter.

    As `DPOTrainer` of TRL 1.16 has it (``sigmoid``), and `ORPOTrainer`'s odds ratio; the odds in
    float64. The reference is the base as its folder has it.
    """
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    asked = load_run_file(path)
    rows = prepare(asked.data, load_tokenizer(asked.model), asked.train.seed, pairs=True).eval
    assert rows is not None and asked.model.name is not None
    reference, model = (AutoModelForCausalLM.from_pretrained(asked.model.name) for _ in range(2))
    model = PeftModel.from_pretrained(model, str(run.folder / "adapter")).eval()
    beta, losses = asked.objective_options["beta"], []
    for first in range(0, len(rows), 2):
        pair = [rows.tokens(index) for index in (first, first + 1)]
        with torch.no_grad():
            scores, base = (
                [log_probs(each, one.ids.tolist(), one.loss_mask.tolist()) for one in pair]
                for each in (model, reference.eval())
            )
        if asked.objective == "dpo":
            chosen, rejected = (float(s[0] - b[0]) for s, b in zip(scores, base, strict=True))
            losses.append(math.log1p(math.exp(-beta * (chosen - rejected))))
        else:
            chosen, rejected = (float(total) / count for total, count in scores)
            odds = chosen - rejected - math.log1p(-math.exp(chosen))
            odds += math.log1p(-math.exp(rejected))
            losses.append(-chosen + beta * math.log1p(math.exp(-odds)))
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("objective", "adapter"),
    [
        ("dpo", {"targets": ["q_proj", "lm_head"]}),
        ("dpo", {"targets": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
        ("orpo", {"targets": ["q_proj", "lm_head"]}),
    ],
    ids=["dpo", "dpo, whole embeddings", "orpo"],
)
def test_an_evaluation_has_the_published_loss(
    objective: str, adapter: dict[str, Any], tmp_path: Path
) -> None:
    path = file_of(
        tmp_path,
        **ALONE,
        model={"name": str(save_tiny(tmp_path / "base"))},
        adapter={"r": 4, "dropout": 0.1, **adapter},
        objective=objective,
        objective_options={"beta": 0.5},
    )
    run = trained_here(path)
    (evaluation,) = (record for record in run.records if "eval_loss" in record)
    assert evaluation["eval_pairs"] == 3, "the fourth place of its two micro-batches is a dummy"
    assert "perplexity" not in evaluation
    assert evaluation["eval_loss"] == pytest.approx(published(run, path), abs=1e-5)
    assert run.steps("num_pairs") == [4, 4, 3], "the last step of an epoch is short"
    if objective == "dpo":
        assert run.steps("loss")[0] == pytest.approx(math.log(2), abs=1e-6)
        assert "3 pairs)" in (run.folder / "adapter/README.md").read_text()


def test_every_strategy_agrees_and_resumes_what_another_began(tmp_path: Path) -> None:
    options = {
        "objective_options": {"beta": 0.5},
        "checkpoint": {"every": 2},
        "model": {"name": str(save_tiny(tmp_path / "base")), "new_tokens": WORDS[:2]},
    }
    two = {"launch": {"devices": 2}, "train": {**TRAIN, "micro_batch_size": 1}, **options}
    from_first = {"resume": str(tmp_path / "out/first/checkpoints/step-00000002")}
    cases: dict[str, dict[str, Any]] = {
        "first": {**ALONE, **options},
        "ddp": {"strategy": {"name": "ddp"}, **two},
        "flat": {"strategy": {"name": "fsdp"}, **two},
        "layer": {"strategy": {"name": "fsdp", "gather": "layer"}, **two},
        "resumed": {"strategy": {"name": "fsdp"}, **two, "checkpoint": from_first},
        "zero": {"strategy": {"name": "zero", "stage": 3}, **two},
    }
    runs = finished(
        [RunPart(file=str(file_of(tmp_path, name=name, **each))) for name, each in cases.items()]
    )
    first, *others = runs
    assert first.steps("loss")[-1] != pytest.approx(math.log(2), abs=1e-4)
    for run in others:
        for metric in ("loss", "grad_norm"):
            wanted = first.steps(metric)[-len(run.steps(metric)) :]
            assert run.steps(metric) == pytest.approx(wanted, rel=1e-5), run.folder.name
        assert run.evaluations() == pytest.approx(first.evaluations(), rel=1e-5)
    done = anygauge(["evaluate", first.folder, "--rows", tmp_path / "pairs.jsonl", "--json"])
    found = json.loads(done.stdout)
    assert (found["objective"], found["pairs"]) == ("dpo", len(PAIRS))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"adapter": None}, "objective: dpo compares the model with itself without its adapter"),
        ({"adapter": {"init": "pissa"}}, "adapter.init: pissa takes the first factors out"),
        ({"data": {"packing": True}}, "data.packing: objective dpo: a sequence holds one answer"),
        ({"data": {"streaming": True}}, "data.streaming: objective dpo: pairs are tokenized"),
        ({"objective_options": {"bta": 1}}, "objective_options.bta: the dpo objective has no such"),
        ({"objective_options": {"beta": 0}}, "objective_options.beta: 0: input should be greater"),
        ({"objective": "dpoo"}, "there is no objective named 'dpoo'; did you mean 'dpo'?"),
    ],
)
def test_what_does_not_go_together_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(RunFileError) as refused:
        check_objective(
            load_run_file(run_file(tmp_path, **{"objective": "dpo", **changes})), PLUGINS
        )
    assert said in str(refused.value)


PLUGINS = installed_plugins()


@pytest.mark.parametrize("field", ["cp", "tp", "pp"])
def test_divided_sequences_and_models_are_refused(field: str, tmp_path: Path) -> None:
    strategy = {"name": "ddp", field: 2}
    path = file_of(tmp_path, strategy=strategy, launch={"devices": 2})
    done = called(["train", path, "--dry-run"])
    assert done.returncode == 1 and f"under strategy.{field} no rank has them" in done.stderr


def test_orpo_needs_no_adapter_and_keeps_certainty_finite(tmp_path: Path) -> None:
    run = load_run_file(run_file(tmp_path, objective="orpo", adapter=None))
    check_objective(run, PLUGINS)
    objective = objective_of(run)
    assert objective is not None
    scores = torch.tensor([[0.0, -3.0], [HARMLESS, HARMLESS]], requires_grad=True)
    objective(PairScores(scores, torch.ones(2, 2)), None).sum().backward()
    assert scores.grad is not None and scores.grad.isfinite().all()
