"""Parts that train: the same run on the device and on the host, step by step; then anygauge and its
peers in alternation, each figure beside its prediction: what ``anygauge plan --json`` says of a run
before it is measured."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from anygauge.planning.machines import Hardware, measured_files
from anygauge.registry import Registry
from benchmarks.contender_plan import ContenderPlan, Dtype
from benchmarks.contender_processes import Processes, cause, last_lines, started, wait
from benchmarks.entrants import ENTRANTS, run_file
from benchmarks.gpu.part import FAILED, LATE, SKIPPED, Clock, Context, PartError, Report
from benchmarks.measure import Figure, RunOutcome, TableRow, rotated, speed_ratio
from benchmarks.session import make_model, prepare_rows, run_once

ALLOWED: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 3e-2}
"""Relative difference of a step's loss that is not a fault: rounding that grows with the steps."""
NORMS = 3.0
"""Gradients' norms may differ by this multiple of it."""
PARITY = ContenderPlan(
    layers=4, hidden=128, intermediate=344, heads=4, kv_heads=2, vocabulary=400, max_length=96,
    steps=6, ranks=1, micro_batch=2, accumulation=2, checkpointing=False,
)  # fmt: skip
"""A small Llama with random weights, all of them trained on one rank."""


def parity(context: Context, report: Report) -> None:
    """Losses and norms of gradients, in float32 and, where the device has it, bfloat16.

    All runs are started at once: what a run of this size needs is the time to begin.
    """
    clock = Clock(context.seconds)
    _, plan, _ = prepare_rows("generated", replace(PARITY, output=context.folder))
    dtypes = ("float32",) if context.tiny else tuple(ALLOWED)
    problems: dict[str, list[str]] = {FAILED: [], LATE: []}
    devices = tuple(dict.fromkeys((context.device, "cpu")))
    with ExitStack() as stack:
        running = {
            each: stack.enter_context(started(parity_run(context.path, plan, *each)))
            for each in itertools.product(dtypes, devices)
        }
        for dtype in dtypes:
            found = {}
            for device in devices:
                name = f"{device}-{dtype}"
                ended = wait(running[dtype, device], clock.left)
                if ended.problem is None:
                    lines = (context.path / name / "metrics.jsonl").read_text(encoding="utf-8")
                    records = map(json.loads, lines.splitlines())
                    found[device] = [record for record in records if "loss" in record]
                    continue
                log = last_lines(context.path / name)
                print(name, *log, sep="\n", flush=True)
                said = LATE if ended.status is None else cause(log) or ended.problem
                report.add(TableRow(case=dtype, name=f"run on {device}", note=said))
                problems[LATE if ended.status is None else FAILED].append(f"{name}: {said}")
            if len(found) == len(devices):
                problems[FAILED] += compare_steps(report, dtype, context.device, found)
    for status, all_of in problems.items():
        if all_of:
            raise PartError(status, "; ".join(all_of))


def parity_run(folder: Path, plan: ContenderPlan, dtype: Any, device: str) -> Processes:
    """One run, in a folder of its own; writes its run file."""
    name = f"{device}-{dtype}"
    fields = run_file(replace(plan, device=device, dtype=dtype), {"name": "single"})
    fields |= {
        "name": name,
        "model": {"config": plan.llama, "tokenizer": plan.model},
        "adapter": None,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(fields, sort_keys=False), encoding="utf-8")
    argv = [sys.executable, "-m", "anygauge.cli", "train", str(path), "--no-plan"]
    # One thread: several runs share the host's processors, and the model is small.
    threads = {"OMP_NUM_THREADS": "1"}
    return Processes(argv=argv, environments=[threads], logs=[folder / f"{name}.log"])


def compare_steps(
    report: Report, dtype: str, device: str, found: Mapping[str, list[dict[str, Any]]]
) -> list[str]:
    """Add a row for each figure; returns what differs by more than is allowed."""
    mine, host = found[device], found["cpu"]
    differ = []
    for figure in ("loss", "grad_norm"):
        allowed = ALLOWED[dtype] * (NORMS if figure == "grad_norm" else 1.0)
        off = max(abs(a[figure] / b[figure] - 1) for a, b in zip(mine, host, strict=True))
        figures = {
            f"first on {device}": mine[0][figure],
            "first on the host": host[0][figure],
            f"last on {device}": mine[-1][figure],
            "last on the host": host[-1][figure],
            "largest difference": off,
            "allowed": allowed,
        }
        report.add(TableRow(case=dtype, name=figure, figures=figures))
        if not off <= allowed:
            differ.append(f"{dtype}, {figure} differs by {off:.1e} of {allowed:.0e}")
    return differ


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Of one run.

    Attributes:
        figures: heading of a training part's table -> what is predicted of it.
        flops_per_token: operations of the model for a token, forward and backward.
        peak: operations per second of all cards together; 0 where it is not known.
        problem: why there is no prediction of the time, or none at all.
    """

    figures: Mapping[str, Any] = field(default_factory=dict)
    flops_per_token: float = 0.0
    peak: float = 0.0
    problem: str = ""


def planner(
    context: Context, name: str, run: Mapping[str, Any], stack: ExitStack
) -> Callable[[float], Prediction]:
    """Begin ``anygauge plan`` of one run, for this machine or the one that `context.machine` names;
    returns what waits for it so many seconds at most.

    Args:
        name: of its files.
        run: a run file's fields.
        stack: ends it at the latest.
    """
    log, machine = context.path / f"plan-{name}.json", context.machine
    if context.card:
        known = Hardware.load(Registry.load(), measured_files()).of_devices([context.card])
        if known is None:
            unknown = f"no description of {context.card} is known (docs/hardware.md)"
            return lambda timeout_s: Prediction(problem=unknown)
        machine = f"{known.name}:{context.gpus}"
    path = context.path / f"plan-{name}.yaml"
    path.write_text(yaml.safe_dump(dict(run), sort_keys=False), encoding="utf-8")
    argv = [sys.executable, "-m", "anygauge.cli", "plan", str(path), "--json"]
    argv += ["--machine", machine] if machine else []
    processes = Processes(argv=argv, environments=[{}], logs=[log])
    running = stack.enter_context(started(processes))

    def read(timeout_s: float) -> Prediction:
        ended = wait(running, timeout_s)
        if ended.problem is not None and ended.status is None:
            return Prediction(problem=f"anygauge plan was not done after {timeout_s:.0f} s")
        text = log.read_text(encoding="utf-8", errors="replace").strip()
        try:
            return prediction(json.JSONDecoder().raw_decode(text, text.index("{"))[0])
        except ValueError:
            last = (text.splitlines() or ["it printed nothing"])[-1]
            return Prediction(problem=f"anygauge plan ended with {ended.status}: {last}")

    return read


def prediction(plan: Mapping[str, Any]) -> Prediction:
    """From the JSON of a plan."""
    largest = max((phase["total"] for phase in plan["device"].values()), default=0)
    figures = {"peak memory, GiB": largest * plan["ranks"] / 2**30} if largest else {}
    if not (time := plan.get("time")):
        return Prediction(figures=figures, problem=plan.get("untimed") or "its time is not known")
    return Prediction(
        figures={**figures, "tokens/s": time["tokens_per_s"], "MFU": time["mfu"]},
        flops_per_token=time["flops"] / time["tokens"],
        peak=time["peak"] or 0.0,
    )


MOST_ROUNDS = 5
WATCHED = 2
"""Last steps of each run: half of them in torch's mode that warns of waits, half profiled."""
RESERVE = 1.2
"""A run is begun where what it took before, times this, is left."""


@dataclass(frozen=True, slots=True)
class TrainingCase:
    """Contenders, by name, that are compared with the first of them on the same rows."""

    name: str
    contenders: tuple[str, ...]
    workload: str = "full"


Entry = tuple[TrainingCase, str]
"""A contender in a case."""
Size = Mapping[str, Any]
"""Fields of a plan: a Llama, and what it is given in a step; rows that differ have at most `length`
tokens."""
_SIZE = {"steps": 14, "warmup": 4, "checkpointing": False}
_LARGE = {**_SIZE, "checkpointing": True, "length": 2048, "classes": 128_256, "kv_heads": 8}
TINY: Size = {
    **{"layers": 2, "hidden": 32, "intermediate": 64, "heads": 2, "vocabulary": 400},
    **{"length": 32, "micro_batch": 1, "steps": 6, "warmup": 2, "checkpointing": False},
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
    peers = () if context.tiny else ("trainer-single",)
    cases = [
        TrainingCase("unsharded", ("anygauge-single", "trainer-single")),
        TrainingCase("padded", ("anygauge-single", *peers), "generated"),
        TrainingCase("packed", ("anygauge-single-packed",), "generated"),
    ]
    compare(context, report, cases, HALF_B)


def compiled(context: Context, report: Report) -> None:
    """HF Trainer compiles the model with torch.compile; anygauge compiles no model on CUDA."""
    case = TrainingCase("unsharded", ("anygauge-single", "trainer-compiled"))
    compare(context, report, [case], HALF_B)


def trl(context: Context, report: Report) -> None:
    """Rows of different length: padded, grouped by length, packed."""
    cases = [TrainingCase("padded", ("anygauge", "trl"), "generated")]
    for layout in () if context.tiny else ("grouped", "packed"):
        names = (f"anygauge-{layout}", f"trl-{layout}")
        cases.append(TrainingCase(layout, names, "generated"))
    compare(context, report, cases, HALF_B)


def sharded(context: Context, report: Report) -> None:
    """`ddp`, `fsdp` and `zero` on several devices; on several machines, anygauge alone."""
    if context.ranks < 2:
        raise PartError(SKIPPED, "there is one device: GPUS=n or HOSTS=file asks for more")
    cases = [TrainingCase("DDP", ("anygauge-ddp", "ddp"))]
    if not context.tiny:
        cases.append(TrainingCase("FSDP", ("anygauge-fsdp", "fsdp")))
        cases.append(TrainingCase("ZeRO-3", ("anygauge", "deepspeed", "trainer")))
    compare(context, report, cases, HALF_B, ranks=context.ranks)


def large(context: Context, report: Report, size: Size) -> None:
    """LoRA with recomputed activations."""
    free, needed = shutil.disk_usage(context.path).free, 3 * parameters(size)
    if not context.machine and not context.tiny and free < needed:
        raise PartError(
            SKIPPED,
            f"the model's file needs {needed / 2**30:.0f} GiB where the results are written "
            f"({context.path}), and {free / 2**30:.0f} GiB are free: --output names another place",
        )
    cases = [TrainingCase("unsharded", ("anygauge-single", "trainer-single"))]
    if context.ranks > 1:
        cases = [
            TrainingCase("ZeRO-3", ("anygauge", "trainer")),
            TrainingCase("FSDP", ("anygauge-fsdp", "fsdp")),
        ]
    compare(context, report, cases, size, ranks=context.ranks)


llama_3b, llama_8b = partial(large, size=THREE_B), partial(large, size=EIGHT_B)


def compare(
    context: Context, report: Report, cases: Sequence[TrainingCase], size: Size, *, ranks: int = 1
) -> None:
    """Run contenders in alternation until the time is over: each case once before any twice. On a
    machine that is not at hand, only say what the planner predicts of ours.
    """
    clock = Clock(context.seconds)
    if context.nodes > 1 and ranks > 1:
        cases = [replace(case, contenders=tuple(filter(_ours, case.contenders))) for case in cases]
        report.note("Peers run on one machine only: on several, anygauge is measured alone.")
    plan = plan_of(context, TINY if context.tiny else size, ranks)
    entries = [(case, name) for case in cases for name in case.contenders]
    outcomes: dict[Entry, list[RunOutcome]] = {entry: [] for entry in entries}
    if context.machine:
        plan = replace(plan, rows="rows.jsonl", max_length=plan.length)
        with planners(context, entries, {case.workload: plan for case in cases}) as planned:
            for entry, read in planned.items():
                for row in table(cases, outcomes, {entry: read(clock.left)}):
                    report.add(row)
        return
    written = {case.workload: prepare_rows(case.workload, plan) for case in cases}
    plans = {workload: on_rows for workload, (_, on_rows, _) in written.items()}
    with planners(context, entries, plans) as planned:
        # Weights are drawn in the meantime.
        for _, on_rows, about in written.values():
            about = f"{about}; model of {make_model(on_rows):,} parameters"
            report.note(f"{about[:1].upper()}{about[1:]}. LoRA r16 on all linear layers.")
        predictions = {entry: read(clock.left / 2) for entry, read in planned.items()}
    for (_, name), prediction in predictions.items():
        if prediction.problem:
            report.note(f"No prediction of {ENTRANTS[name].title}: {prediction.problem}")
    if context.device == "cpu":
        report.note("Host waits are counted on a GPU only; `device busy` is then the GPU's.")
    longest: dict[str, float] = {}
    for round_ in range(1 if context.tiny else MOST_ROUNDS):
        for case, name in rotated(entries, round_):
            # As long as this one's, or any other's.
            needed = RESERVE * longest.get(name, max(longest.values(), default=0.0))
            if clock.left < max(1.0, needed):
                continue
            rows, on_rows, _ = written[case.workload]
            on_rows = replace(on_rows, timeout_s=clock.left)
            folder = context.path / case.workload / f"round{round_ + 1}" / name
            outcome = run_once(ENTRANTS[name], on_rows, rows, folder=folder, round_=round_ + 1)
            print(f"round {round_ + 1}, {name}: {outcome.status} {outcome.problem}", flush=True)
            print("\n".join(outcome.log), flush=True)
            outcomes[case, name].append(outcome)
            longest[name] = max(longest.get(name, 0.0), outcome.wall_seconds or 0.0)
            report.rows = table(cases, outcomes, predictions)
            report.save()
    problems = [
        f"{name}: {outcome.problem}"
        for (_, name), runs in outcomes.items()
        for outcome in runs
        if outcome.status == "failed" and _ours(name)
    ]
    if problems:
        raise PartError(FAILED, "; ".join(problems))
    left_out = [f"{case.name}: {ENTRANTS[name].title}" for case, name in entries
                if not outcomes[case, name]]  # fmt: skip
    if left_out:
        raise PartError(LATE, f"no time was left for {'; '.join(left_out)}")


@contextmanager
def planners(
    context: Context, entries: Sequence[Entry], plans: Mapping[str, ContenderPlan]
) -> Iterator[dict[Entry, Callable[[float], Prediction]]]:
    """The planners of our contenders, which draw no weights, side by side.

    Args:
        plans: by workload.
    """
    with ExitStack() as stack:
        found = {}
        for case, name in filter(lambda entry: _ours(entry[1]), entries):
            entrant = ENTRANTS[name]
            plan = replace(plans[case.workload], layout=entrant.layout)
            run = run_file(plan, entrant.strategy)
            run["model"] = {"config": plan.llama, "tokenizer": plan.model or "none"}
            found[case, name] = planner(context, f"{case.workload}-{name}", run, stack)
        yield found


def plan_of(context: Context, size: Size, ranks: int) -> ContenderPlan:
    """What every contender gets here."""
    dtype: Dtype = "float32" if context.tiny else "bfloat16"
    return ContenderPlan(
        **size,
        ranks=ranks,
        max_length=96 if context.tiny else size["length"],
        plans_memory=False,  # the planner has been asked already
        dtype=dtype,
        stored=dtype,
        lr=1e-4,
        timeout_s=context.seconds,
        output=context.folder,
        device=context.device,
        watched=WATCHED,
        hostfile=context.hostfile if ranks > 1 else "",
        nodes=context.nodes if ranks > 1 else 1,
    )


def table(
    cases: Sequence[TrainingCase],
    outcomes: Mapping[Entry, Sequence[RunOutcome]],
    predictions: Mapping[Entry, Prediction],
) -> list[TableRow]:
    """A row for each contender that has run, or is only predicted: medians of its rounds. One that
    failed after it had trained has figures, too."""
    rows = []
    for case in cases:
        counted = [p for (other, _), p in predictions.items()
                   if other.workload == case.workload and p.flops_per_token and p.peak]  # fmt: skip
        first = outcomes[case, case.contenders[0]]
        for name in case.contenders:
            runs, prediction = outcomes[case, name], predictions.get((case, name), Prediction())
            if runs or ((case, name) in predictions and not any(outcomes.values())):
                figures = _figures(runs, first, counted[0] if counted else None)
                note = _note(runs) if runs else prediction.problem
                row = TableRow(case=case.name, name=ENTRANTS[name].title, figures=figures)
                rows.append(replace(row, predicted=prediction.figures, note=note))
    return rows


def _figures(
    runs: Sequence[RunOutcome], first: Sequence[RunOutcome], counted: Prediction | None
) -> dict[str, Figure]:
    """Of a contender's rounds, beside those of its group's first."""
    done = [each for each in runs if each.tokens_per_s]
    if not done:
        return {}
    ratio = speed_ratio(first, done)
    watched = next((o.watched for o in reversed(done) if o.watched), {})
    speed = median(o.tokens_per_s or 0.0 for o in done)
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
    problems += [f"not watched to the end: {o.watched['problem']}" for o in runs
                 if o.watched and "problem" in o.watched]  # fmt: skip
    return problems[0] if problems else ""


def _ours(name: str) -> bool:
    return ENTRANTS[name].module is None
