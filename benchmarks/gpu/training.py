"""Parts that train: anygauge and its peers in alternation, each figure beside its prediction."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from benchmarks.entrants import ENTRANTS, run_file
from benchmarks.gpu.context import Clock, Context
from benchmarks.gpu.predict import Prediction, predict
from benchmarks.gpu.result import Figure, Report, SkipPartError, TableRow
from benchmarks.measure import RunOutcome
from benchmarks.plan import ContenderPlan, Dtype
from benchmarks.ratios import paired, rotated
from benchmarks.session import SessionSettings, prepare, run_once

Groups = Mapping[str, Sequence[str]]

MOST_ROUNDS = 5
WATCHED = 4
"""Last steps of each run: half of them in torch's mode that warns of waits, half profiled."""
RESERVE = 1.2
"""A round is begun where the longest so far, times this, is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Of a Llama, and of what it is given in a step.

    Attributes:
        kv_heads: of keys and values; 0: as many as heads.
        classes: of its output.
        length: tokens of a row; the most of one where rows differ.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int = 0
    classes: int
    length: int
    micro_batch: int
    steps: int = 14
    warmup: int = 4
    checkpointing: bool = False

    @property
    def parameters(self) -> int:
        """About; norms are not counted."""
        shared = (self.kv_heads or self.heads) / self.heads
        attention = int((2 + 2 * shared) * self.hidden**2)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + 2 * self.classes * self.hidden


TINY = Size(
    layers=2, hidden=32, intermediate=64, heads=2, classes=0, length=32, micro_batch=1, steps=8,
    warmup=2,
)  # fmt: skip
HALF_B = Size(
    layers=14, hidden=1536, intermediate=4096, heads=12, kv_heads=4, classes=32_000, length=1024,
    micro_batch=8,
)  # fmt: skip
THREE_B = Size(
    layers=28, hidden=3072, intermediate=8192, heads=24, kv_heads=8, classes=128_256,
    length=2048, micro_batch=4, checkpointing=True,
)  # fmt: skip
EIGHT_B = Size(
    layers=32, hidden=4096, intermediate=14_336, heads=32, kv_heads=8, classes=128_256,
    length=2048, micro_batch=2, checkpointing=True,
)  # fmt: skip


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
    free, needed = shutil.disk_usage(context.path).free, 3 * size.parameters
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
    settings = settings_of(context, size, ranks)
    if context.machine:
        foresee(context, report, groups, settings)
        return
    before = list(report.rows)
    rows, plan, about = prepare(workload, settings)
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
                plan,
                rows,
                replace(settings, timeout_s=max(1.0, clock.left)),
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


def foresee(context: Context, report: Report, groups: Groups, settings: SessionSettings) -> None:
    """What the planner predicts of our contenders on a machine that is not at hand."""
    plan = settings.plan(
        model="",
        rows="rows.jsonl",
        has_prompts=False,
        output=context.folder,
        max_length=settings.length,
    )
    config = {
        "model_type": "llama",
        "vocab_size": settings.classes or settings.vocabulary,
        "hidden_size": settings.hidden,
        "intermediate_size": settings.intermediate,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads or settings.heads,
        "max_position_embeddings": settings.length,
        "tie_word_embeddings": False,
    }
    for case, names in groups.items():
        for name in filter(_ours, names):
            run = {**our_run(name, plan), "model": {"config": config, "tokenizer": "none"}}
            found = predict(context, run)
            title = ENTRANTS[name].title
            report.add(TableRow(case=case, name=title, predicted=found.figures, note=found.problem))


def settings_of(context: Context, size: Size, ranks: int) -> SessionSettings:
    """What `benchmarks.session` is asked for."""
    dtype: Dtype = "float32" if context.tiny else "bfloat16"
    return SessionSettings(
        **asdict(size),
        ranks=ranks,
        vocabulary=400 if context.tiny else 4096,
        max_length=96 if context.tiny else size.length,
        dtype=dtype,
        lr=1e-4,
        timeout_s=context.seconds,
        output=context.path,
        device=context.device,
        stored=dtype,
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
