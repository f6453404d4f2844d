"""The contenders: how each is started, how it lays out rows, what it needs installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

import yaml

from benchmarks.plan import ContenderPlan, Layout
from benchmarks.processes import SHARED, Processes, identities


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrant:
    """One contender.

    Attributes:
        module: script of its ranks; None is anygauge's own command.
        independent: its ranks share nothing, so each has a speed of its own.
        alone: it runs on one rank.
        deepspeed, compiled: see `ContenderPlan`.
        strategy: of anygauge's own command.
    """

    name: str
    title: str
    module: str | None
    layout: Layout = "padded"
    needs: Sequence[str] = ()
    independent: bool = False
    alone: bool = False
    deepspeed: bool = True
    compiled: bool = False
    strategy: Mapping[str, Any] = field(default_factory=lambda: {"name": "zero", "stage": 3})

    @property
    def missing(self) -> list[str]:
        """Packages that it needs and that are not installed."""
        return [package for package in self.needs if util.find_spec(package) is None]


_SCRIPTS = "benchmarks.contenders."
_TORCH = ("torch", "transformers", "peft")
_ENGINE = (*_TORCH, "deepspeed")
_TRL = (*_ENGINE, "accelerate", "trl", "datasets")

ENTRANTS: Mapping[str, Entrant] = {
    entrant.name: entrant
    for entrant in (
        Entrant(name="anygauge", title="anygauge", module=None, needs=_ENGINE),
        Entrant(
            name="anygauge-grouped",
            title="anygauge, group_by_length",
            module=None,
            layout="grouped",
            needs=_ENGINE,
        ),
        Entrant(
            name="anygauge-packed",
            title="anygauge, packing",
            module=None,
            layout="packed",
            needs=_ENGINE,
        ),
        Entrant(
            name="anygauge-ddp",
            title="anygauge, ddp",
            module=None,
            needs=_TORCH,
            strategy={"name": "ddp"},
        ),
        Entrant(name="ddp", title="DDP, by hand", module=_SCRIPTS + "ddp_loop", needs=_TORCH),
        Entrant(
            name="anygauge-fsdp",
            title="anygauge, fsdp",
            module=None,
            needs=_TORCH,
            strategy={"name": "fsdp"},
        ),
        Entrant(
            name="anygauge-fsdp-grouped",
            title="anygauge, fsdp, group_by_length",
            module=None,
            layout="grouped",
            needs=_TORCH,
            strategy={"name": "fsdp"},
        ),
        Entrant(
            name="anygauge-fsdp-packed",
            title="anygauge, fsdp, packing",
            module=None,
            layout="packed",
            needs=_TORCH,
            strategy={"name": "fsdp"},
        ),
        Entrant(name="fsdp", title="FSDP2, by hand", module=_SCRIPTS + "fsdp_loop", needs=_TORCH),
        Entrant(
            name="deepspeed",
            title="DeepSpeed, by hand",
            module=_SCRIPTS + "deepspeed_loop",
            needs=_ENGINE,
        ),
        Entrant(
            name="trainer",
            title="HF Trainer + DeepSpeed",
            module=_SCRIPTS + "hf_trainer",
            needs=(*_ENGINE, "accelerate"),
        ),
        Entrant(
            name="trl", title="TRL SFTTrainer + DeepSpeed", module=_SCRIPTS + "trl_sft", needs=_TRL
        ),
        Entrant(
            name="trl-grouped",
            title="TRL, group_by_length",
            module=_SCRIPTS + "trl_sft",
            layout="grouped",
            needs=_TRL,
        ),
        Entrant(
            name="trl-packed",
            title="TRL, packing",
            module=_SCRIPTS + "trl_sft",
            layout="packed",
            needs=_TRL,
        ),
        Entrant(
            name="anygauge-single",
            title="anygauge, single",
            module=None,
            needs=_TORCH,
            alone=True,
            strategy={"name": "single"},
        ),
        Entrant(
            name="anygauge-single-packed",
            title="anygauge, single, packing",
            module=None,
            layout="packed",
            needs=_TORCH,
            alone=True,
            strategy={"name": "single"},
        ),
        Entrant(
            name="trainer-single",
            title="HF Trainer",
            module=_SCRIPTS + "hf_trainer",
            needs=(*_TORCH, "accelerate"),
            alone=True,
            deepspeed=False,
        ),
        Entrant(
            name="trainer-compiled",
            title="HF Trainer, torch.compile",
            module=_SCRIPTS + "hf_trainer",
            needs=(*_TORCH, "accelerate"),
            alone=True,
            deepspeed=False,
            compiled=True,
        ),
        Entrant(
            name="accelerate",
            title="Accelerate + DeepSpeed",
            module=_SCRIPTS + "accelerate_loop",
            needs=(*_ENGINE, "accelerate"),
        ),
        Entrant(
            name="unsharded",
            title="unsharded, no communication (bound)",
            module=_SCRIPTS + "unsharded",
            needs=_TORCH,
            independent=True,
        ),
        Entrant(
            name="sharded-bound",
            title="unsharded, layers gathered in place (bound)",
            module=_SCRIPTS + "sharded_bound",
            needs=_TORCH,
        ),
    )
}


def processes(entrant: Entrant, plan: ContenderPlan, environment: Mapping[str, str]) -> Processes:
    """What to start for one run of a contender; writes the file that tells it what to do.

    Args:
        environment: variables for every process of every contender.
    """
    output = Path(plan.output)
    if entrant.module is None:
        path = output / "run.yaml"
        path.write_text(
            yaml.safe_dump(run_file(plan, entrant.strategy), sort_keys=False), encoding="utf-8"
        )
        argv = [sys.executable, "-m", "anygauge.cli", "train", str(path)]
        return Processes(
            argv=argv, environments=[dict(environment)], logs=[output / "anygauge.log"]
        )
    path = output / "plan.json"
    plan.save(path)
    return Processes(
        argv=[sys.executable, "-m", entrant.module, str(path)],
        environments=[{**environment, **identity} for identity in identities(plan)],
        logs=[output / f"rank{rank}.log" for rank in range(plan.ranks)],
        bound=True,
    )


def run_file(plan: ContenderPlan, strategy: Mapping[str, Any]) -> dict[str, Any]:
    """The plan as a run file; what is not named has its default."""
    source: dict[str, Any] = {"path": plan.rows}
    if plan.has_prompts:
        source |= {"format": "prompt_completion", "template": "{prompt}"}
    else:
        source |= {"format": "text"}
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
        "launch": launch(plan),
    }


def launch(plan: ContenderPlan) -> dict[str, Any]:
    """The ranks of this machine, or of all that the host file lists."""
    found: dict[str, Any] = {"nodes": plan.nodes, "devices": plan.ranks // plan.nodes}
    if plan.hostfile:
        found |= {
            "launcher": "ssh",
            "options": {"hostfile": plan.hostfile},
            "pass_environment": list(SHARED),
        }
    return found
