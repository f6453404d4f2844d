"""``anygauge report RUN...``: one HTML page about runs, which opens without a network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from anygauge.cli.report_charts import MOST_RUNS, bar_chart, check_library, line_chart
from anygauge.cli.report_runs import RunRecord, differences, number, part, read_run, text, when
from anygauge.cli.shared_options import BackendOption
from anygauge.interface import UsageError
from anygauge.util.console import Console
from anygauge.util.files import write_text
from anygauge.util.text import format_bytes, format_time

MARK = "<!doctype html><!-- anygauge report -->"
"""Begins every page, so that no other file is overwritten."""
PAGE = "report.html"
TEMPLATE = Path(__file__).with_suffix(".jinja")
MOST_ROWS = 16
"""Of a table of numbers: evenly spaced steps, with the first and the last."""
GIB = float(2**30)
LINES = (
    ("loss", "Loss", "nats per loss token, or pair", 1.0),
    ("lr", "Learning rate", "of the step", 1.0),
    ("grad_norm", "Gradient norm", "before clipping", 1.0),
    ("tokens_per_s", "Tokens per second", "real tokens, all ranks", 1.0),
    ("mfu", "MFU", "share of the peak, 0 to 1", 1.0),
    ("peak_memory", "Peak memory", "GiB, rank 0", GIB),
)
"""Field of a step, title of its chart, what its values are, by what they are divided."""
NO_LINE = {"mfu": "Not known: no peak rate is published for these devices."}


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.", metavar="RUN...")],
    output: Annotated[
        Path | None,
        typer.Option(help=f"The page to write; default: {PAGE} in the first run's directory."),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Let base and result answer this, and show both; repeatable."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    backend: BackendOption = None,
) -> None:
    """Write one HTML page about runs, side by side."""
    if len(runs) > MOST_RUNS:
        raise UsageError(f"{len(runs)} runs: at most {MOST_RUNS} can be told apart on one page")
    found = [read_run(folder, label) for folder, label in zip(runs, _labels(runs), strict=True)]
    check_library()
    path = output or runs[0] / PAGE
    _refuse_other_file(path)
    answers = [
        sample
        for run in found
        for sample in (_samples(run, prompt, max_new_tokens, backend) if prompt else ())
    ]
    try:
        page = page_of(found, answers)
    except RecursionError:
        raise UsageError("a file of these runs is nested too deeply to be one of a run") from None
    write_text(path, page)
    Console().print(f"report: {path} ({format_bytes(len(page.encode()))})")


def _labels(folders: Sequence[Path]) -> list[str]:
    """A name for each run: its folder's, with that above it where two have one name."""
    whole = [folder.resolve() for folder in folders]
    names = [path.name for path in whole]
    return [
        text(path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}")
        for path in whole
    ]


def _refuse_other_file(path: Path) -> None:
    """Check that the page may be written.

    Raises:
        UsageError: something else is there.
    """
    if path.is_dir():
        raise UsageError(f"--output {path}: it is a folder; name a file, such as {path / PAGE}")
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(MARK)) != MARK.encode():
                raise UsageError(f"--output {path}: it exists and is not a report; name another")


# -- samples -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A prompt, and what a run's base and its result answer."""

    run: str
    prompt: str
    before: str
    after: str


def _samples(
    run: RunRecord, prompts: Sequence[str], max_new_tokens: int, backend: str | None
) -> list[Sample]:
    """Let the base and the result of a run answer, both always with the likeliest token.

    Raises:
        ModelError: the run has no result, or its base had random weights.
    """
    from anygauge.cli.trained import fetch_model, model_origin, question_ids
    from anygauge.config.load import load_run_file

    origin = model_origin(str(run.folder), None, None)
    base = origin.section
    if origin.adapter is None:
        base = load_run_file(run.folder / "run.yaml").model
    fetch_model(base)

    import anygauge
    from anygauge.config.schema import PrecisionSection, resolve_precision
    from anygauge.data.formats import user_chat
    from anygauge.models.generate import generate, load_for_inference
    from anygauge.models.source import quiet_libraries
    from anygauge.models.tokenizer import load_tokenizer
    from anygauge.strategies.shared.common import torch_dtype

    quiet_libraries()
    tokenizer = load_tokenizer(origin.section)
    questions, stop_ids = question_ids(origin, tokenizer, [*map(user_chat, prompts)])
    answers: list[list[str]] = []
    with anygauge.open_backend(backend or "auto") as opened:
        precision = resolve_precision(PrecisionSection(), opened.support)
        loading: dict[str, Any] = {
            "device": opened.placement.device,
            "dtype": torch_dtype(precision.param_dtype),
            "attention": opened.attention,
        }
        for section, adapter in ((base, None), (origin.section, origin.adapter)):
            model = load_for_inference(section, adapter=adapter, **loading)
            options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": 0.0}
            options |= {"stop_ids": stop_ids, "stream": False}
            answers.append([generate(model, tokenizer, ids, **options) for ids in questions])
            del model  # before the next one is loaded
    return [
        Sample(run=run.label, prompt=prompt, before=before, after=after)
        for prompt, before, after in zip(prompts, *answers, strict=True)
    ]


# -- the page ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart and, below it, the same as a table of texts.

    Attributes:
        note: of what is drawn; why nothing is, where `svg` is "".
    """

    title: str
    note: str
    svg: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def page_of(runs: Sequence[RunRecord], samples: Sequence[Sample] = ()) -> str:
    """The HTML of a report; every text of a run is escaped."""
    from jinja2 import ChainableUndefined, Environment
    from markupsafe import Markup, escape

    events = [(at, number, what) for number, run in enumerate(runs) for at, what in run.events()]
    environment = Environment(
        autoescape=True,
        undefined=ChainableUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else text(value),
    )
    environment.filters |= {
        "duration": lambda value: format_time(number(value) or 0.0),
        "fixed": lambda value, form: format(number(value) or 0.0, form),
        "when": when,
    }
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        runs=runs,
        differences=differences(runs),
        charts=[*(_line(runs, *each) for each in LINES), _memory(runs), _time(runs)],
        events=sorted(events),
        samples=samples,
        now=time.time(),
        whole=escape,
    )
    return f"{MARK}\n{page}\n"


def _line(runs: Sequence[RunRecord], field: str, title: str, unit: str, scale: float) -> Chart:
    lines = [(at, "line", points) for at, run in enumerate(runs) if (points := run.series(field))]
    columns = [runs[at].label for at, _, _ in lines]
    for at, run in enumerate(runs) if field == "loss" else ():
        for name, points in run.evaluated().items():
            lines.append((at, "dots", points))
            columns.append(f"{run.label}, {name}")
    if not lines:
        return Chart(title, NO_LINE.get(field, "No step was recorded."))
    steps = sorted({step for _, _, points in lines for step, _ in points})
    shown = {steps[round(at * (len(steps) - 1) / (MOST_ROWS - 1))] for at in range(MOST_ROWS)}
    tables = [dict(points) for _, _, points in lines]
    rows = [
        [f"{step:,}", *(f"{t[step] / scale:.4g}" if step in t else "" for t in tables)]
        for step in sorted(shown)
    ]
    note = "Lines: training. Dots: evaluation." if len(lines) > len(runs) else ""
    drawn = line_chart(field, lines, unit=unit, scale=scale)
    return Chart(title, note, drawn, ["step", *columns], rows)


def _memory(runs: Sequence[RunRecord]) -> Chart:
    """What was planned of each phase, beside what was measured."""
    title, kinds = "Memory beside the plan", ("measured", "planned")
    found = [
        (f"{run.label[:14]}: {phase}", at, values)
        for at, run in enumerate(runs)
        for phase, values in run.memory().items()
    ]
    if not found:
        return Chart(title, "No memory was measured or planned.")
    process = any(part(run.report, "memory", "counted") == "process" for run in runs)
    note = "Measured: the whole process; planned: tensors alone." if process else ""
    bars = [(row, at, {k: values.get(k, 0.0) / GIB for k in kinds}) for row, at, values in found]
    drawn = bar_chart("memory", bars, unit="GiB, rank 0", stacked=False)
    rows = [
        [row, *(format_bytes(values[k]) if k in values else "not known" for k in kinds)]
        for row, _, values in found
    ]
    return Chart(title, note, drawn, ["phase", *kinds], rows)


def _time(runs: Sequence[RunRecord]) -> Chart:
    """Where the time of each run's latest start went."""
    found = [(run.label[:20], at, run.time_split()) for at, run in enumerate(runs)]
    found = [each for each in found if each[2]]
    if not found:
        return Chart("Time", "No step was recorded.")
    note = "Warm-up: what the first steps took longer, mostly compilation."
    drawn = bar_chart("time", found, unit="seconds", stacked=True)
    rows = [[row, *(f"{seconds:,.1f} s" for seconds in split.values())] for row, _, split in found]
    return Chart("Time", note, drawn, ["run", *found[0][2]], rows)
