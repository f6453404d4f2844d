"""The end of a run: what was trained is gathered, written, verified and described."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anygauge.data import describe_rows
from anygauge.interface import HOST_DEVICE, PARAMETER, Job, StrategySpec, installed_version
from anygauge.models import card
from anygauge.models.adapter import load_adapter
from anygauge.models.curve import loss_curve
from anygauge.models.export import atomic_folder, check_whole, save_adapter, save_model
from anygauge.models.generate import load_for_inference
from anygauge.models.verify import Verification, failing_safely, no_room, verify
from anygauge.strategies.shared.common import torch_dtype
from anygauge.strategies.shared.materialize import materialize
from anygauge.training.checkpoints.checkpoint_files import Checkpoint
from anygauge.training.checkpoints.manager import checkpoint_folder
from anygauge.training.evaluation import EVAL
from anygauge.training.setup import PreparedRun, Rank, parameter_counts, trained_shapes
from anygauge.util.run_lock import check_lock

PACKAGES = (
    "anygauge",
    "torch",
    "transformers",
    "peft",
    "tokenizers",
    "safetensors",
    "datasets",
    "pyarrow",
)
METRICS = "metrics.jsonl"
NO_CHECKPOINTS = "none to resume from; set checkpoint.every to have them"


def save_result(job: Job, rank: Rank, prepared: PreparedRun) -> dict[str, Any]:
    """Write the adapter, or the whole model where all weights were trained; returns the summary.

    Every rank must call it: the strategy gathers, and the trained model answers a probe.

    Raises:
        VerificationError: what was saved does not give what was trained.
        ModelError: there is nothing sound to save.
    """
    run = prepared.run
    folder = Path(job.run_directory) / ("model" if run.adapter is None else "adapter")
    chosen = chosen_step(prepared, rank)
    logits: Tensor | None = None
    if chosen == prepared.logger.history.step:
        trained = prepared.engine.export_trained()
        # The same on every rank: all of them take part in a sharded model's forward.
        logits = prepared.probe() if prepared.probe else None
    elif rank.index == 0:
        kept = Checkpoint(checkpoint_folder(folder.parent, chosen))
        trained = {name: kept.tensor(name, PARAMETER) for name in kept.names()}
        logits = kept.logits() if prepared.probe else None
    if rank.index != 0:
        return {}
    compute = torch_dtype(prepared.precision.param_dtype)
    shapes = trained_shapes(prepared.engine)
    check_lock(folder.parent, rank.lock)
    with atomic_folder(folder) as part:
        if run.adapter is None:
            check_whole(trained, shapes)
            whole = {**untrained_weights(prepared, trained, compute), **trained}
            whole = prepared.factory.export(whole, compute)
            config, files = prepared.factory.config, prepared.result_files
            save_model(whole, config, part, dtype=compute, files=files)
        else:
            save_adapter(
                prepared.engine.model,
                trained,
                part,
                shapes=shapes,
                base=run.model,
                files=prepared.result_files,
                dtype=prepared.precision.param_dtype,
                first=prepared.factory.first_factors,
            )
        with failing_safely(folder.name):
            verified = _verify(prepared, logits, part, folder.name)
            best = {"result_step": chosen} if run.checkpoint.result == "best" else {}
            record = verified.record()
            summary = summary_of(job, prepared, saved=str(folder), **best, verified=record)
            card.write_card(part, run, card_facts(prepared, rank, summary))
    return summary


def untrained_weights(
    prepared: PreparedRun, trained: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The weights that a run left as they were, from where it had them; on the host."""
    model = prepared.factory.skeleton()
    if all(name in trained for name, _ in model.named_parameters()):
        return {}
    materialize(model, prepared.factory, device=torch.device(HOST_DEVICE), dtype=dtype)
    return {name: p.detach() for name, p in model.named_parameters() if name not in trained}


def chosen_step(prepared: PreparedRun, rank: Rank) -> int:
    """After which step a run's weights become its result; every rank calls it and gets the same."""
    history, checkpoints = prepared.logger.history, prepared.loop.checkpoints
    if prepared.run.checkpoint.result != "best":
        return history.step
    best = checkpoints.best()
    lowest = checkpoints.losses.get(best or 0)
    if best is None or lowest is None:
        rank.warn("checkpoint.result: no checkpoint has an evaluation loss; the last step is saved")
        return history.step
    lower = [each for each in history.evaluations if each["name"] == EVAL and each["step"]]
    if lower := [each["step"] for each in lower if each["eval_loss"] < lowest]:
        rank.warn(
            f"checkpoint.result: the loss was lower after step {lower[-1]}, of which this folder "
            f"has no sound checkpoint; that of step {best} is saved"
        )
    return best


def _verify(prepared: PreparedRun, logits: Tensor | None, part: Path, name: str) -> Verification:
    run = prepared.run
    if logits is None:
        lacking = "the model's configuration has no vocab_size, or its checkpoint no logits"
        why = lacking if prepared.probe else "adapter.verify is false"
        return Verification(reloaded=False, why=f"not compared: {why}")
    dtype = torch_dtype(prepared.precision.param_dtype)
    reason = no_room(parameter_counts(prepared.engine)[0], dtype)
    if reason:
        return Verification(reloaded=False, why=reason)

    def reload() -> Any:
        host = torch.device(HOST_DEVICE)
        if run.adapter is not None and run.model.name is None:
            # No files hold random weights: seed and configuration make them again, for the host,
            # where a device's attention may not run.
            factory = prepared.factory.with_kernels("eager", None)
            model: Any = factory.skeleton()
            materialize(model, factory, device=host, dtype=dtype)
            return load_adapter(model, part).eval()
        adapter = None if run.adapter is None else part
        section = (
            run.model.model_copy(update={"name": str(part), "config": None, "revision": None})
            if adapter is None
            else run.model
        )
        return load_for_inference(
            section, adapter=adapter, device=host, dtype=dtype, attention="eager"
        )

    vocabulary = prepared.factory.config.get_text_config().vocab_size
    return verify(logits, reload, dtype=dtype, name=name, vocabulary=vocabulary)


def summary_of(job: Job, prepared: PreparedRun, **result: Any) -> dict[str, Any]:
    """What a run came to, for its report; `result` says what was saved."""
    history = prepared.logger.history
    return {
        "steps": history.step,
        "first_loss": history.first_loss,
        "final_loss": history.last_loss,
        "evaluations": history.evaluations,
        "tokens": history.tokens,
        **history.speed(),
        "memory": prepared.logger.memory(job.expected_memory),
        "step_s": prepared.logger.step_seconds(job.expected_step_s),
        **result,
        **({} if prepared.loop.checkpoints.losses else {"checkpoints": NO_CHECKPOINTS}),
        "data": describe_rows(prepared.data.train),
        "backend": job.backend,
        "strategy": prepared.strategy.description,
        "choices": dict(prepared.choices),
    }


def losses_of(metrics: Path) -> dict[str, list[tuple[int, float]]]:
    """The losses that a run has written: ``train`` and the evaluations -> (step, loss)."""
    lines: dict[str, list[tuple[int, float]]] = {"train": []}
    with metrics.open(encoding="utf-8") as file:
        for text in file:
            try:
                record = json.loads(text)
            except ValueError:
                continue  # a full disk cut it
            for name, field in (("train", "loss"), (record.get("name"), "eval_loss")):
                if record.get(field) is not None:
                    lines.setdefault(name, []).append((record["step"], record[field]))
    return lines


def card_facts(prepared: PreparedRun, rank: Rank, summary: dict[str, Any]) -> card.Facts:
    """Return what a model card states beyond the run file."""
    return card.Facts(
        device=str(prepared.loop.backend.placement.device),
        backend=summary["backend"],
        strategy=summary["strategy"],
        ranks=rank.world_size,
        precision=f"{prepared.precision.param_dtype}, gradients {prepared.precision.reduce_dtype}, "
        "masters float32",
        data=summary["data"],
        steps=summary["steps"],
        result_step=summary.get("result_step"),
        tokens=summary["tokens"],
        first_loss=summary["first_loss"],
        final_loss=summary["final_loss"],
        evaluations=summary["evaluations"],
        curve=loss_curve(losses_of(Path(summary["saved"]).with_name(METRICS))),
        verified=summary["verified"],
        versions=used_versions(prepared.spec),
    )


def used_versions(strategy: StrategySpec) -> dict[str, str]:
    """Python, and the packages that decide a result: those of the strategy, too."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in (*PACKAGES, *strategy.distributions):
        found[package] = installed_version(package) or "not installed"
    found["torch"] = torch.__version__  # with the build, which an index leaves out of its metadata
    return found
