"""The kit's pytest plugin: ``--anygauge-backend``, and at the end one page on each backend.

Every pytest run loads it where anygauge is installed, so it imports little until it is used.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import API_VERSION
from anygauge.testing.check import BACKEND_VARIABLE, CHOSEN_STRATEGY, DECLARED, PROGRESS, SKIPPED

CONFORMANCE = Path(__file__).with_name("contract.py")
"""Collected by ``--anygauge-backend``; its `TestBackend` is the backend of that name."""
BACKEND, STRATEGY, REPORT = "--anygauge-backend", "--anygauge-strategy", "--anygauge-report"
KITS = {
    BACKEND: (CONFORMANCE, BACKEND_VARIABLE),
    STRATEGY: (CONFORMANCE.with_name("strategy_contract.py"), CHOSEN_STRATEGY),
}
"""Option -> the kit, and the variable in which it finds the name."""
PROPERTY = "anygauge_conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The kit's options."""
    add = parser.getgroup("anygauge", "anygauge: conformance of a backend").addoption
    backend = "run the conformance kit on the installed backend NAME"
    strategy = "run the kit of strategies on the installed strategy NAME, on the host"
    report = "write the report to FILE, as Markdown (.md) or JSON (.json); may be repeated"
    add(BACKEND, metavar="NAME", help=backend)
    add(STRATEGY, metavar="NAME", help=strategy)
    add(REPORT, metavar="FILE", action="append", default=[], help=report)


def pytest_configure(config: pytest.Config) -> None:
    """Collect the kit where a backend is named."""
    for name in config.getoption(REPORT):
        if Path(name).suffix not in (".md", ".json"):
            raise pytest.UsageError(f"{REPORT} {name}: the name must end in .md or .json")
    chosen = [option for option in KITS if config.getoption(option)]
    if len(chosen) > 1:
        raise pytest.UsageError(f"{' and '.join(chosen)}: a run of pytest takes one of them")
    if chosen or config.getoption(REPORT):
        reporter = _Reporter(config)
        config.pluginmanager.register(reporter, "anygauge-reporter")
        PROGRESS[:] = [reporter.show]
    for option in chosen:
        _choose(config, option, config.getoption(option))


def _choose(config: pytest.Config, option: str, name: str) -> None:
    """Have pytest collect the kit, for the backend or strategy of that name."""
    from anygauge.interface import AnygaugeError
    from anygauge.registry import Registry

    kit, variable = KITS[option]
    registry = Registry.load()
    try:
        (registry.find_backend if option == BACKEND else registry.find_strategy)(name)
    except AnygaugeError as error:
        raise pytest.UsageError(f"{option}: {error}") from error
    os.environ[variable] = name
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(kit)]
    for given in config.args:
        path = config.invocation_params.dir / given.split("::")[0]
        if path.resolve() != kit.resolve():
            raise pytest.UsageError(
                f"{option} {name} runs the kit and takes no other tests: leave out {given}, or "
                f"{option} if a class there derives from BackendContract"
            )


class _Reporter:
    """Collects the results of `BackendContract`'s tests, also from other processes (xdist)."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._began = config, time.monotonic()
        self._reports: dict[str, ConformanceReport] = {}

    def show(self, text: str) -> None:
        """A line on the terminal as the kit goes, with the seconds since it began."""
        terminal = self._config.pluginmanager.getplugin("terminalreporter")
        capture = self._config.pluginmanager.getplugin("capturemanager")
        if terminal is None:  # a process of xdist
            return
        with contextlib.nullcontext() if capture is None else capture.global_and_fixture_disabled():
            terminal.write_line(f"{time.monotonic() - self._began:6.0f} s  {text}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        outcome = yield
        contract: Any = getattr(item, "cls", None)
        # A test ends with its call, or earlier where it was skipped or could not start.
        ended = call.when == "call" or (call.when == "setup" and not outcome.passed)
        if hasattr(contract, "rank_counts") and ended:
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            part, title = heading(item.function, parameters)
            result, why = _line_of(outcome, call)
            line = Line(part=part, name=item.name, title=title, result=result, why=why)
            # What the loop's runs have found so far.
            figures = getattr(item.funcargs.get("runs"), "figures", {})
            found = {"backend": contract.backend, "figures": figures, "line": asdict(line)}
            outcome.user_properties.append((PROPERTY, found))
        return outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        given: Any = dict(report.user_properties).get(PROPERTY)
        if given is None:
            return
        from anygauge.registry import Registry
        from anygauge.testing.contract import BackendContract

        name = given["backend"]
        if name not in self._reports:
            origin, whole = Registry.load().find_backend(name).origin, contents(BackendContract)
            self._reports[name] = ConformanceReport(name, origin, whole)
        page = self._reports[name]
        page.figures |= given["figures"]
        page.lines.append(Line(**given["line"]))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A report that was requested and cannot be written is a failure."""
        # A process of xdist may have run none of the tests; the one that started it has all.
        asking = not hasattr(session.config, "workerinput")
        if asking and session.config.getoption(REPORT) and not self._reports:
            session.exitstatus = session.exitstatus or pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """The page, and the requested files."""
        from anygauge.util.files import write_text

        reports = list(self._reports.values())
        for report in reports:
            terminalreporter.section(f"anygauge conformance: {report.backend}")
            for line in report.terminal():
                terminalreporter.write_line(line)
        for name in config.getoption(REPORT):
            if reports:
                write_text(Path(name), render(reports, Path(name).suffix))
                terminalreporter.write_line(f"written: {name}")
            else:
                missing = f"{REPORT} {name} was not written: no test of a BackendContract was run"
                terminalreporter.write_line(f"ERROR: {missing}", red=True)


def _line_of(outcome: pytest.TestReport, call: Any) -> tuple[str, str]:
    """(Result of the line, why) of a test that is over."""
    raised = call.excinfo.value if call.excinfo else None
    said = " ".join(str(raised).split()) if raised else str(outcome.longrepr)
    if outcome.passed:
        return "passed", ""
    if hasattr(outcome, "wasxfail"):
        if isinstance(raised, pytest.xfail.Exception):
            return "untried", f"marked as an expected failure: {outcome.wasxfail}"
        # An expected failure is still a failure.
        return "failed", f"{said} (marked as an expected failure: {outcome.wasxfail})"
    if outcome.failed:
        return "failed", said
    result, _, why = said.partition(": ")
    return (result, why) if result in (DECLARED, SKIPPED) else ("untried", said)


RESULTS = {
    "passed": ("pass", "passed"),
    "declared": ("not supported", "not supported as declared"),
    "skipped": ("skipped", "skipped"),
    "untried": ("not tried", "not tried"),
    "failed": ("FAIL", "FAILED"),
}
"""What becomes of a test: its mark in a table, and its word in a count."""
PARTS = {
    "test_on_paper": "on paper",
    "test_on_device": "on a device",
    "test_operators": "torch's operators",
    "test_on_ranks": "on several ranks",
}
"""Part of the report by the contract's test; all others are of the loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One check of the report.

    Attributes:
        name: the test's, as pytest has it.
        result: one of `RESULTS`: ``declared`` is not supported, as declared; ``skipped`` has no
            meaning for this backend; ``untried`` could not be asked here.
        why: empty for what passed.
    """

    part: str
    name: str
    title: str
    result: str
    why: str = ""


@dataclass(slots=True)
class ConformanceReport:
    """What the kit found out about one backend.

    Attributes:
        contents: every test of the contract, by name: (part, title).
    """

    backend: str
    distribution: str
    contents: Mapping[str, tuple[str, str]]
    lines: list[Line] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)

    @property
    def not_tried(self) -> Sequence[str]:
        """Tests of the contract that were left out, or could not run here."""
        tried = {line.name for line in self.lines if line.result != "untried"}
        return [name for name in self.contents if name not in tried]

    @property
    def verdict(self) -> str:
        """``conforms``, ``does NOT conform`` or ``is not fully tried``."""
        if any(line.result == "failed" for line in self.lines):
            return "does NOT conform"
        return "is not fully tried" if self.not_tried else "conforms"

    def gaps(self) -> str:
        """``14 of 60 checks were not tried: on several ranks (all 14)``; empty if none."""
        missing = Counter(self.contents[name][0] for name in self.not_tried)
        whole = Counter(part for part, _ in self.contents.values())
        found = [
            f"{part} ({f'all {count}' if count == whole[part] else f'{count} of {whole[part]}'})"
            for part, count in missing.items()
        ]
        counts = f"{missing.total()} of {whole.total()} checks were not tried"
        return f"{counts}: {', '.join(found)}" if found else ""

    def counts(self) -> str:
        """``31 passed, 2 not supported as declared, 1 FAILED``."""
        found = Counter(line.result for line in self.lines)
        words = {result: word for result, (_, word) in RESULTS.items() if found[result]}
        return ", ".join(f"{found[result]} {word}" for result, word in words.items())

    def conditions(self) -> dict[str, str]:
        """Versions and machine."""
        from anygauge.interface import installed_version
        from anygauge.testing.check import sharding_spec

        packages = ("anygauge", "torch", "transformers", "peft", *sharding_spec().distributions)
        return {
            "contract": str(API_VERSION),
            "python": platform.python_version(),
            **{each: installed_version(each) or "not installed" for each in packages},
            "machine": f"{platform.system()} {platform.machine()}",
        }

    def markdown(self) -> str:
        """The page."""
        preposition = "against" if self.verdict == "is not fully tried" else "to"
        text = (
            f"# `{self.backend}` {self.verdict} {preposition} anygauge's backend contract, "
            f"version {API_VERSION}\n\n{self.distribution}. {self.counts()}.\n\n"
        )
        text += f"{self.gaps()}.\n\n" if self.not_tried else ""
        values = {**self.conditions(), **self.figures}
        text += table(("what", "version or value"), values.items())
        for part in dict.fromkeys(line.part for line in self.lines):
            rows = [
                (line.title, RESULTS[line.result][0] + (f": {line.why}" if line.why else ""))
                for line in self.lines
                if line.part == part
            ]
            text += f"\n## {part}\n\n{table(('check', 'result'), rows)}"
        return text

    def record(self) -> dict[str, Any]:
        """Return the same, for machines."""
        return {
            "backend": self.backend,
            "distribution": self.distribution,
            "conforms": self.verdict == "conforms",
            "not_tried": list(self.not_tried),
            "conditions": self.conditions(),
            "figures": self.figures,
            "checks": [asdict(line) for line in self.lines],
        }

    def terminal(self) -> Sequence[str]:
        """The end of a pytest run."""
        return [
            f"{self.backend} ({self.distribution}) {self.verdict}: {self.counts()}",
            *filter(None, [self.gaps()]),
            *(
                f"  {RESULTS[line.result][0]:>13}  {line.title}: {line.why}"
                for line in self.lines
                if line.result != "passed"
            ),
        ]


def heading(function: Any, parameters: Mapping[str, Any]) -> tuple[str, str]:
    """(Part of the report, title) of a test of the contract with these parameters."""
    part = PARTS.get(function.__name__, "the loop")
    if "check" in parameters:
        return part, parameters["check"].title
    words = (function.__doc__ or function.__name__).strip().splitlines()[0].rstrip(".")
    return part, " ".join([words, *(f"({value})" for value in parameters.values())])


def contents(contract: type) -> dict[str, tuple[str, str]]:
    """Every test of a class of tests as pytest names it: (part of the report, title)."""
    found = {}
    for name, function in vars(contract).items():
        if name.startswith("test_"):
            marks = getattr(function, "pytestmark", ())
            tables = [mark.args for mark in marks if mark.name == "parametrize"]
            cases = [{parameter: value} for parameter, values in tables for value in values]
            for case in cases or [{}]:
                labels = [f"[{getattr(value, 'name', value)}]" for value in case.values()]
                found["".join([name, *labels])] = heading(function, case)
    return found


def render(reports: Sequence[ConformanceReport], suffix: str) -> str:
    """The text of a file: Markdown, or JSON (an object, or a list of them if there are several)."""
    if suffix == ".md":
        return "\n".join(report.markdown() for report in reports)
    records = [report.record() for report in reports]
    return json.dumps(records if len(records) > 1 else records[0], indent=2) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *cells))
