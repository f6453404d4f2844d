"""Parts that train: anygauge and its peers in alternation, each figure beside its prediction."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.entrants import ENTRANTS, run_file
from benchmarks.gpu.context import Clock, Context
from benchmarks.gpu.predict import Prediction, predict
from benchmarks.gpu.result import Report, SkipPartError
from benchmarks.measure import RunOutcome
from benchmarks.plan import ContenderPlan, Dtype
from benchmarks.ratios import paired, rotated
from benchmarks.session import prepare, run_once
from benchmarks.table import Figure, TableRow

Groups = Mapping[str, Sequence[str]]

MOST_ROUNDS = 5
WATCHED = 4
"""Last steps of each run: half of them in torch's mode that warns of waits, half profiled."""
RESERVE = 1.2
"""A round is begun where the longest so far, times this, is left."""


Size = Mapping[str, Any]
"""Fields of a plan: a Llama, and what it is given in a step; rows that differ have at most `length`
tokens."""
_SIZE = {"steps": 14, "warmup": 4, "checkpointing": False}
_LARGE = {**_SIZE, "checkpointing": True, "length": 2048, "classes": 128_256, "kv_heads": 8}
TINY: Size = {
    **{"layers": 2, "hidden": 32, "intermediate": 64, "heads": 2, "vocabulary": 400},
    **{"length": 32, "micro_batch": 1, "steps": 8, "warmup": 2, "checkpointing": False},
}
HALF_B: Size = _SIZE | {
    **{"layers": 14, "hidden": 1536, "intermediate": 4096, "heads": 12, "kv_heads": 4},
    **{"classes": 32_000, "length": 1024, "micro_batch": 8},
}
THREE_B: Size = _LARGE | {
    **{"layers": 28, "hidden": 3072, "intermediate": 8192, "heads": 24, "micro_batch": 4}
}
EIGHT_B: Size = _LARGE | {
    **{"layers": 32, "hidden": 4096, "intermediate": 14_336, "heads": 32, "micro_batch": 2}
}


def parameters(size: Size) -> int:
    """About; norms are not counted."""
    attention = int((2 + 2 * size["kv_heads"] / size["heads"]) * size["hidden"] ** 2)
    layer = attention + 3 * size["hidden"] * size["intermediate"]
    return int(size["layers"] * layer + 2 * size["classes"] * size["hidden"])


def one_device(context: Context, report: Report) -> None:
    """`single` beside HF Trainer: rows of one length; rows that differ, padded and packed."""
    clock = Clock(context.seconds)
    peers = [] if context.tiny else ["trainer-single"]
    first = {"unsharded": ["anygauge-single", "trainer-single"]}
    compare(context, report, first, HALF_B, kept=0.6 * context.seconds)
    groups = {"padded": ["anygauge-single", *peers], "packed": ["anygauge-single-packed"]}
    rest = replace(context, seconds=clock.left)
    compare(rest, report, groups, HALF_B, workload="generated")


def compiled(context: Context, report: Report) -> None:
    """HF Trainer compiles the model with torch.compile; anygauge compiles no model on CUDA."""
    compare(context, report, {"unsharded": ["anygauge-single", "trainer-compiled"]}, HALF_B)


def trl(context: Context, report: Report) -> None:
    """Rows of different length: padded, grouped by length, packed."""
    groups = {"padded": ["anygauge", "trl"]}
    if not context.tiny:
        groups |= {
            "grouped": ["anygauge-grouped", "trl-grouped"],
            "packed": ["anygauge-packed", "trl-packed"],
        }
    compare(context, report, groups, HALF_B, workload="generated")


def sharded(context: Context, report: Report) -> None:
    """`ddp`, `fsdp` and `zero` on several devices; on several machines, anygauge alone.

    Raises:
        SkipPartError: there is one device.
    """
    if context.gpus * context.nodes < 2:
        raise SkipPartError("there is one device: GPUS=n or HOSTS=file asks for more")
    groups = {"DDP": ["anygauge-ddp", "ddp"]}
    if not context.tiny:
        groups |= {
            "FSDP": ["anygauge-fsdp", "fsdp"],
            "ZeRO-3": ["anygauge", "deepspeed", "trainer"],
        }
    if context.nodes > 1:
        groups = {case: list(filter(_ours, names)) for case, names in groups.items()}
        report.note("Peers run on one machine only: on several, anygauge is measured alone.")
    compare(context, report, groups, HALF_B, ranks=context.gpus * context.nodes)


def llama_3b(context: Context, report: Report) -> None:
    """LoRA on 3B parameters with recomputed activations."""
    _large(context, report, THREE_B)


def llama_8b(context: Context, report: Report) -> None:
    """LoRA on 8B parameters with recomputed activations."""
    _large(context, report, EIGHT_B)


def _large(context: Context, report: Report, size: Size) -> None:
    free, needed = shutil.disk_usage(context.path).free, 3 * parameters(size)
    if not context.tiny and free < needed:
        raise SkipPartError(
            f"the model's file needs {needed / 2**30:.0f} GiB where the results are written "
            f"({context.path}), and {free / 2**30:.0f} GiB are free: --output names another place"
        )
    ranks = context.gpus * context.nodes
    if ranks == 1:
        compare(context, report, {"unsharded": ["anygauge-single", "trainer-single"]}, size)
        return
    groups = {"ZeRO-3": ["anygauge", "trainer"], "FSDP": ["anygauge-fsdp", "fsdp"]}
    if context.nodes > 1:
        groups = {case: list(filter(_ours, names)) for case, names in groups.items()}
    compare(context, report, groups, size, ranks=ranks)


def compare(
    context: Context,
    report: Report,
    groups: Groups,
    size: Size,
    *,
    ranks: int = 1,
    workload: str = "full",
    kept: float = 0.0,
) -> None:
    """Run contenders in alternation until the time is over, each at least once where it lasts.

    Args:
        groups: case -> contenders that are compared with its first.
        kept: seconds that rounds after the first leave to others.

    Raises:
        RuntimeError: a contender of ours failed.
    """
    clock = Clock(context.seconds)
    names = [name for group in groups.values() for name in group]
    size = TINY if context.tiny else size
    plan = plan_of(context, size, ranks)
    if context.machine:
        foresee(context, report, groups, plan)
        return
    before = list(report.rows)
    rows, plan, about = prepare(workload, plan)
    report.note(f"{about[:1].upper()}{about[1:]}. LoRA r16 on all linear layers.")
    outcomes: list[RunOutcome] = []
    predictions = {
        name: predict(context, our_run(name, replace(plan, output=context.folder)))
        for name in names
        if _ours(name)
    }
    rounds = 1 if context.tiny else MOST_ROUNDS
    longest = 0.0
    for round_ in range(rounds):
        for name in rotated(names, round_):
            if round_ and clock.left - kept < RESERVE * longest:
                break
            outcome = run_once(
                ENTRANTS[name],
                replace(plan, timeout_s=max(1.0, clock.left)),
                rows,
                folder=context.path / workload / f"round{round_ + 1}" / name,
                round_=round_ + 1,
            )
            print(f"round {round_ + 1}, {name}: {outcome.status} {outcome.problem}", flush=True)
            print("\n".join(outcome.log), flush=True)
            outcomes.append(outcome)
            longest = max(longest, outcome.wall_seconds or 0.0)
            report.rows[:] = before
            for each in table(groups, outcomes, predictions):
                report.add(each)
    _notes(report, predictions, context)
    failed = [o for o in outcomes if o.status == "failed" and _ours(o.name)]
    if failed:
        raise RuntimeError("; ".join(f"{o.name}: {o.problem}" for o in failed))


def foresee(context: Context, report: Report, groups: Groups, plan: ContenderPlan) -> None:
    """What the planner predicts of our contenders on a machine that is not at hand."""
    config = {
        "model_type": "llama",
        "vocab_size": plan.classes or plan.vocabulary,
        "hidden_size": plan.hidden,
        "intermediate_size": plan.intermediate,
        "num_hidden_layers": plan.layers,
        "num_attention_heads": plan.heads,
        "num_key_value_heads": plan.kv_heads or plan.heads,
        "max_position_embeddings": plan.length,
        "tie_word_embeddings": False,
    }
    there = replace(plan, rows="rows.jsonl", max_length=plan.length)
    for case, names in groups.items():
        for name in filter(_ours, names):
            run = {**our_run(name, there), "model": {"config": config, "tokenizer": "none"}}
            found = predict(context, run)
            title = ENTRANTS[name].title
            report.add(TableRow(case=case, name=title, predicted=found.figures, note=found.problem))


def plan_of(context: Context, size: Size, ranks: int) -> ContenderPlan:
    """What every contender gets here."""
    dtype: Dtype = "float32" if context.tiny else "bfloat16"
    return ContenderPlan(
        **size,
        ranks=ranks,
        max_length=96 if context.tiny else size["length"],
        dtype=dtype,
        stored=dtype,
        lr=1e-4,
        timeout_s=context.seconds,
        output=context.folder,
        device=context.device,
        watched=WATCHED,
        hostfile=context.hostfile,
        nodes=context.nodes,
    )


def our_run(name: str, plan: ContenderPlan) -> dict[str, Any]:
    """The run file of a contender of ours."""
    entrant = ENTRANTS[name]
    return run_file(replace(plan, layout=entrant.layout), entrant.strategy)


def table(
    groups: Groups, outcomes: Sequence[RunOutcome], predictions: Mapping[str, Prediction]
) -> list[TableRow]:
    """A row for each contender that has run: medians of its rounds."""
    rows = []
    counted = [each for each in predictions.values() if each.flops_per_token and each.peak]
    for case, names in groups.items():
        for name in names:
            runs = [o for o in outcomes if o.name == name]
            if not runs:
                continue
            done = [o for o in runs if o.status == "ok" and o.tokens_per_s]
            figures: dict[str, Figure] = {}
            if done:
                first = [o for o in outcomes if o.name == names[0] and o.tokens_per_s]
                figures = _figures(done, first, counted[0] if counted else None)
            rows.append(
                TableRow(
                    case=case,
                    name=ENTRANTS[name].title,
                    figures=figures,
                    predicted=predictions[name].figures if name in predictions else {},
                    note=_note(runs),
                )
            )
    return rows


def _figures(
    done: Sequence[RunOutcome], first: Sequence[RunOutcome], counted: Prediction | None
) -> dict[str, Figure]:
    """Of a contender's rounds, beside those of its group's first."""
    speeds = {o.round: o.tokens_per_s or 0.0 for o in done}
    firsts = {o.round: o.tokens_per_s or 0.0 for o in first}
    both = [round_ for round_ in speeds if round_ in firsts]
    ratio = paired([firsts[r] for r in both], [speeds[r] for r in both]) if both else None
    watched = next((o.watched for o in reversed(done) if o.watched), {})
    speed = median(speeds.values())
    return {
        "tokens/s": speed,
        "first / this": ratio.median if ratio else None,
        # By one count of operations for all, whoever trains.
        "MFU": speed * counted.flops_per_token / counted.peak if counted else None,
        "peak memory, GiB": median((o.peak_memory or 0) / 2**30 for o in done),
        "host waits per step": watched.get("host_waits"),
        "device busy": watched.get("busy"),
        "operations per step": watched.get("operations"),
        "last loss": done[-1].final_loss,
        "rounds": len(done),
    }


def _note(runs: Sequence[RunOutcome]) -> str:
    """What went wrong first: with a run, or with watching it."""
    problems = [o.problem for o in runs if o.status != "ok"]
    for each in runs:
        if each.watched and "problem" in each.watched:
            problems.append(f"not watched to the end: {each.watched['problem']}")
    return problems[0] if problems else ""


def _notes(report: Report, predictions: Mapping[str, Prediction], context: Context) -> None:
    for name, prediction in predictions.items():
        if prediction.problem:
            report.note(f"No prediction of {ENTRANTS[name].title}: {prediction.problem}")
    if context.device == "cpu":
        report.note("Host waits are counted on a GPU only; `device busy` is then the GPU's.")


def _ours(name: str) -> bool:
    return ENTRANTS[name].module is None
