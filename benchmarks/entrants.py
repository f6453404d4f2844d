"""The contenders: how each is started, how it lays out rows, what it needs installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import typer
import yaml

from benchmarks.contender_plan import ContenderPlan, Layout
from benchmarks.contender_processes import SHARED, Processes, identities, settings_of_accelerate


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrant:
    """One contender.

    Attributes:
        module: script of its ranks, which is given the plan and the name; None is anygauge's own
            command.
        independent: its ranks share nothing, so each has a speed of its own.
        alone: it runs on one rank.
        deepspeed, compiled: see `ContenderPlan`.
        strategy: of anygauge's own command.
        checkout: of an older commit, whose code runs in this environment; None for this one's.
    """

    name: str
    title: str
    module: str | None
    layout: Layout = "padded"
    independent: bool = False
    alone: bool = False
    deepspeed: bool = True
    compiled: bool = False
    strategy: Mapping[str, Any] = field(default_factory=dict)
    checkout: Path | None = None


_ZERO: Mapping[str, Any] = {"name": "zero", "stage": 3}
_FSDP: Mapping[str, Any] = {"name": "fsdp"}
_SINGLE: Mapping[str, Any] = {"name": "single"}
_ALONE = {"alone": True, "deepspeed": False}


def _ours(name: str, title: str, strategy: Mapping[str, Any], layout: Layout = "padded") -> Entrant:
    fields: dict[str, Any] = {"alone": strategy is _SINGLE, "strategy": strategy}
    return Entrant(name=name, title=title, module=None, layout=layout, **fields)


def _peer(name: str, title: str, script: str, **more: Any) -> Entrant:
    return Entrant(name=name, title=title, module=f"benchmarks.contenders.{script}", **more)


ENTRANTS: Mapping[str, Entrant] = {
    entrant.name: entrant
    for entrant in (
        _ours("anygauge", "anygauge", _ZERO),
        _ours("anygauge-grouped", "anygauge, group_by_length", _ZERO, "grouped"),
        _ours("anygauge-packed", "anygauge, packing", _ZERO, "packed"),
        _ours("anygauge-ddp", "anygauge, ddp", {"name": "ddp"}),
        _peer("ddp", "DDP, by hand", "loops"),
        _ours("anygauge-fsdp", "anygauge, fsdp", _FSDP),
        _ours("anygauge-fsdp-grouped", "anygauge, fsdp, group_by_length", _FSDP, "grouped"),
        _ours("anygauge-fsdp-packed", "anygauge, fsdp, packing", _FSDP, "packed"),
        _peer("fsdp", "FSDP2, by hand", "loops"),
        _peer("deepspeed", "DeepSpeed, by hand", "loops"),
        _peer("trainer", "HF Trainer + DeepSpeed", "trainers"),
        _peer("trl", "TRL SFTTrainer + DeepSpeed", "trainers"),
        _peer("trl-grouped", "TRL, group_by_length", "trainers", layout="grouped"),
        _peer("trl-packed", "TRL, packing", "trainers", layout="packed"),
        _ours("anygauge-single", "anygauge, single", _SINGLE),
        _ours("anygauge-single-packed", "anygauge, single, packing", _SINGLE, "packed"),
        _peer("trainer-single", "HF Trainer", "trainers", **_ALONE),
        _peer("trainer-compiled", "HF Trainer, torch.compile", "trainers", **_ALONE,
              compiled=True),
        _peer("accelerate", "Accelerate + DeepSpeed", "loops"),
        _peer("unsharded", "unsharded, no communication (bound)", "loops",
              independent=True),
        _peer("sharded-bound", "unsharded, layers gathered in place (bound)", "loops"),
    )
}  # fmt: skip

OF_A_CHECKOUT = ("benchmarks/shim", "", "kernels", "backends", "launchers")
"""Its folders of import packages. Its own shim knows how its ranks begin and end."""


def chosen(listed: str, before: Path | None = None) -> list[Entrant]:
    """Contenders by name, comma-separated; each of ours also as it is in an older checkout."""
    found = []
    for name in dict.fromkeys(name.strip() for name in listed.split(",")):
        if name not in ENTRANTS:
            raise typer.BadParameter(f"{name!r}: choose from {', '.join(ENTRANTS)}")
        found.append(entrant := ENTRANTS[name])
        if before is not None and entrant.module is None:
            older: dict[str, Any] = {"name": f"before-{name}", "title": f"before: {entrant.title}"}
            found.append(replace(entrant, checkout=before.resolve(), **older))
    return found


def processes(entrant: Entrant, plan: ContenderPlan, environment: Mapping[str, str]) -> Processes:
    """What to start for one run of a contender; writes the file that tells it what to do.

    Args:
        environment: variables for every process of every contender.
    """
    output = Path(plan.output)
    if entrant.checkout is not None:
        _, *rest = environment["PYTHONPATH"].split(os.pathsep)
        folders = [str(entrant.checkout / part) for part in OF_A_CHECKOUT]
        # Safe: or the folder that it is started in comes first.
        path = {"PYTHONPATH": os.pathsep.join([*folders, *rest]), "PYTHONSAFEPATH": "1"}
        environment = {**environment, **path}
    if entrant.module is None:
        path = output / "run.yaml"
        text = yaml.safe_dump(run_file(plan, entrant.strategy), sort_keys=False)
        path.write_text(text, encoding="utf-8")
        argv = [sys.executable, "-m", "anygauge.cli", "train", str(path)]
        argv += [] if plan.plans_memory else ["--no-plan"]
        logs = [output / "anygauge.log"]
        return Processes(argv=argv, environments=[dict(environment)], logs=logs)
    path = output / "plan.json"
    plan.save(path)
    script = ["-m", entrant.module, str(path), entrant.name]
    if plan.launched:
        own = {**environment, **settings_of_accelerate(plan)}
        torchrun = [*_TORCHRUN, str(plan.ranks), *script]
        return Processes(argv=torchrun, environments=[own], logs=[output / "rank0.log"])
    return Processes(
        argv=[sys.executable, *script],
        environments=[{**environment, **identity} for identity in identities(plan)],
        logs=[output / f"rank{rank}.log" for rank in range(plan.ranks)],
        bound=True,
    )


_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def run_file(plan: ContenderPlan, strategy: Mapping[str, Any]) -> dict[str, Any]:
    """The plan as a run file; what is not named has its default."""
    source: dict[str, Any] = {"path": plan.rows}
    if plan.has_prompts:
        source |= {"format": "prompt_completion", "template": "{prompt}"}
    else:
        source |= {"format": "text"}
    launch: dict[str, Any] = {"nodes": plan.nodes, "devices": plan.ranks // plan.nodes}
    if plan.hostfile:
        launch |= {"launcher": "ssh", "options": {"hostfile": plan.hostfile}}
        launch["pass_environment"] = list(SHARED)
    return {
        "name": "run",
        "output": plan.output,
        "backend": plan.device,
        "model": {"name": plan.model},
        "adapter": {
            "r": plan.lora_rank,
            "alpha": plan.lora_alpha,
            "targets": "all-linear",
            "verify": plan.verifies,
        },
        "data": {
            "train": source,
            **({"eval": source} if plan.evaluates else {}),
            "max_length": plan.max_length,
            "packing": plan.layout == "packed",
            "group_by_length": plan.layout == "grouped",
            "cache": "off",
        },
        "train": {
            "steps": plan.steps,
            "global_batch_size": plan.global_batch,
            "micro_batch_size": plan.micro_batch,
            "optimizer": {"lr": plan.lr},
            "schedule": {"name": "constant"},
            "max_grad_norm": plan.max_norm,
            "gradient_checkpointing": plan.checkpointing,
            "seed": plan.seed,
        },
        "precision": {"param_dtype": plan.dtype},
        "strategy": dict(strategy),
        "launch": launch,
    }
