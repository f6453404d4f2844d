"""Parts that are tests of the project: the conformance kit, and the kernels' own tests.

Pytest is interrupted shortly before the part's time is over: its report then has all that was
tried until then, and says what was not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from benchmarks.contender_processes import ROOT
from benchmarks.gpu.part import FAILED, SKIPPED, Context, PartError, Report
from benchmarks.measure import TableRow

QUICK_TESTS = "not (test_masks_scales_and_offsets and float16 and not bfloat16)"
"""`make gpu` leaves out masks in the type that runs take only where there is no bfloat16."""
CLOSING_S = 60.0
"""Most that a test under way and the report may take after the interrupt."""


def kit(context: Context, report: Report) -> None:
    """The kit for backends on this device; what fails is a row of its own."""
    pages = [context.path / f"conformance{suffix}" for suffix in (".md", ".json")]
    status = pytest(
        context, report,
        "-m", "slow or not slow",
        "--anygauge-backend", context.device,
        *(f"--anygauge-report={page}" for page in pages),
        *(("-k", "test_on_paper and options") if context.tiny else ()),
    )  # fmt: skip
    if not pages[1].is_file():
        raise PartError(FAILED, f"the kit ended with status {status} and wrote no report")
    found = json.loads(pages[1].read_text(encoding="utf-8"))
    parts: dict[str, Counter[str]] = {}
    for check in found["checks"]:
        parts.setdefault(check["part"], Counter())[check["result"]] += 1
    for part, counts in parts.items():
        report.add(TableRow(case="checks", name=part, figures=dict(counts)))
    for check in found["checks"]:
        if check["result"] == "failed":
            report.add(TableRow(case="failed", name=check["title"], note=check["why"][:300]))
    report.note(f"The whole report is `{context.path.name}/{pages[0].name}`.")
    if found["not_tried"]:
        report.note(f"{len(found['not_tried'])} checks were not tried.")
    if any(check["result"] == "failed" for check in found["checks"]):
        raise PartError(FAILED, "the backend does not conform: see the rows `failed`")


def kernels(context: Context, report: Report) -> None:
    """The tests of kernels in Triton against float64; on a card they are compiled for it."""
    if find_spec("triton") is None:
        raise PartError(SKIPPED, "Triton is not installed; it comes with the CUDA builds of torch")
    results = context.path / "tests.xml"
    chosen = "other_dimensions" if context.tiny else "" if context.full else QUICK_TESTS
    status = pytest(
        context, report,
        "tests/kernels/test_triton.py",
        f"--junit-xml={results}",
        "-m", "slow or not slow" if context.full else "not slow",
        "-k", chosen,
        **({} if context.device != "cpu" else {"TRITON_INTERPRET": "1"}),
    )  # fmt: skip
    if not results.is_file():
        raise PartError(FAILED, f"pytest ended with status {status} and wrote no results")
    counts = outcomes(results)
    for name, count in counts.items():
        report.add(TableRow(case="tests/kernels/test_triton.py", name=name, figures=dict(count)))
    if context.device == "cpu":
        report.note("On a host, Triton's interpreter runs the kernels: nothing was compiled.")
    elif chosen:
        report.note(f"Of these tests `-k '{chosen}'` ran; `make gpu-full` has all.")
    if not counts:
        raise PartError(FAILED, f"pytest ended with status {status}, and no test ran")
    failed = [name for name, count in counts.items() if count["failed"]]
    if failed:
        raise PartError(FAILED, f"{', '.join(failed)}; see {context.path.name}/log.txt")


def pytest(context: Context, report: Report, *arguments: str, **variables: str) -> int:
    """Run pytest in its own process, interrupted in time; returns its exit status."""
    if find_spec("pytest") is None:
        raise PartError(SKIPPED, "pytest is not installed: pip install 'anygauge[testing]'")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        # A run in the background ignores it, and what it starts would, too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    closing = min(CLOSING_S, context.seconds / 8)
    try:
        return process.wait(context.seconds - closing)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        report.note("These tests were interrupted at the end of their time.")
        return process.wait(closing)
    finally:
        process.kill()


def outcomes(results: Path) -> Mapping[str, Counter[str]]:
    """Test function -> how many of its cases passed, failed or were skipped (pytest's XML)."""
    found: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        name, tags = case.get("name", "").partition("[")[0], {child.tag for child in case}
        failed = "failed" if tags & {"failure", "error"} else "passed"
        found.setdefault(name, Counter())["skipped" if "skipped" in tags else failed] += 1
    return found
