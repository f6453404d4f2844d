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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from anygauge.interface import API_VERSION
from anygauge.testing.check import CHOSEN, CHOSEN_STRATEGY, DECLARED, NOT_ASKED, PROGRESS

CONFORMANCE = Path(__file__).with_name("contract.py")
"""Collected by ``--anygauge-backend``; its `TestBackend` is the backend of that name."""
OF_STRATEGIES = Path(__file__).with_name("strategy_contract.py")
"""Likewise, of ``--anygauge-strategy``."""
REPORT = "--anygauge-report"
KITS = {
    "--anygauge-backend": (CONFORMANCE, CHOSEN),
    "--anygauge-strategy": (OF_STRATEGIES, CHOSEN_STRATEGY),
}
"""Option -> the kit, and the variable in which it finds the name."""
PROPERTY = "anygauge_conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The kit's options."""
    add = parser.getgroup("anygauge", "anygauge: conformance of a backend").addoption
    texts = (
        "run the conformance kit on the installed backend NAME",
        "run the kit of strategies on the installed strategy NAME, on the host",
    )
    for option, text in zip(KITS, texts, strict=True):
        add(option, metavar="NAME", help=text)
    report = "write the report to FILE, as Markdown (.md) or JSON (.json); may be repeated"
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
        config.pluginmanager.register(_Reporter(), "anygauge-reporter")
        PROGRESS[:] = [_show_progress(config)]
    for option in chosen:
        _choose(config, option, config.getoption(option))


def _choose(config: pytest.Config, option: str, name: str) -> None:
    """Have pytest collect the kit, for the backend or strategy of that name."""
    from anygauge.interface import AnygaugeError
    from anygauge.registry import Registry

    kit, variable = KITS[option]
    registry = Registry.load()
    try:
        (registry.find_backend if variable == CHOSEN else registry.find_strategy)(name)
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


def _show_progress(config: pytest.Config) -> Callable[[str], None]:
    """Lines on the terminal as the kit goes, with the seconds since it began."""
    began = time.monotonic()

    def show(text: str) -> None:
        reporter = config.pluginmanager.getplugin("terminalreporter")
        capture = config.pluginmanager.getplugin("capturemanager")
        if reporter is None:  # a process of xdist
            return
        with contextlib.nullcontext() if capture is None else capture.global_and_fixture_disabled():
            reporter.write_line(f"{time.monotonic() - began:6.0f} s  {text}")

    return show


class _Reporter:
    """Collects the results of `BackendContract`'s tests, also from other processes (xdist)."""

    def __init__(self) -> None:
        self._reports: dict[str, ConformanceReport] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        outcome = yield
        contract = getattr(item, "cls", None)
        if contract is None or not hasattr(contract, "rank_counts"):
            return outcome
        # A test ends with its call, or earlier where it was skipped or could not start.
        if call.when == "call" or (call.when == "setup" and not outcome.passed):
            outcome.user_properties.append((PROPERTY, _result(item, contract, outcome, call)))
        return outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY:
                given: Any = value
                page = self._report(given["backend"])
                page.figures |= given["figures"]
                page.lines.append(Line(**given["line"]))

    def _report(self, backend: str) -> ConformanceReport:
        from anygauge.registry import Registry
        from anygauge.testing.contract import BackendContract

        if backend not in self._reports:
            self._reports[backend] = ConformanceReport(
                backend=backend,
                distribution=Registry.load().find_backend(backend).origin,
                contents=contents(BackendContract),
            )
        return self._reports[backend]

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
                write_text(Path(name), written(reports, Path(name).suffix))
                terminalreporter.write_line(f"written: {name}")
            else:
                missing = f"{REPORT} {name} was not written: no test of a BackendContract was run"
                terminalreporter.write_line(f"ERROR: {missing}", red=True)


def _result(item: Any, contract: Any, outcome: pytest.TestReport, call: Any) -> dict[str, Any]:
    """What became of one test, in plain types."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    part, title = heading(item.function, parameters)
    result, why = _judged(outcome, call)
    capability = getattr(parameters.get("check"), "capability", None)
    line = Line(
        part=part, name=item.name, title=title, result=result, why=why, capability=capability
    )
    stated = {
        f"stated noise of losses, {dtype}": f"{noise:g}"
        for dtype, noise in contract.loss_noise.items()
    }
    # What the loop's runs have found so far.
    found = getattr(getattr(item, "funcargs", {}).get("runs"), "figures", {})
    return {"backend": contract.backend, "figures": stated | found, "line": asdict(line)}


def _judged(outcome: pytest.TestReport, call: Any) -> tuple[str, str]:
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
    for start, result in ((DECLARED, "declared"), (NOT_ASKED, "skipped")):
        if said.startswith(start):
            return result, said.removeprefix(start)
    return "untried", said


MARKS = {
    "passed": "pass",
    "declared": "not supported",
    "failed": "FAIL",
    "skipped": "skipped",
    "untried": "not tried",
}
PARTS = {
    "test_on_paper": "on paper",
    "test_on_device": "on a device",
    "test_operators": "torch's operators",
    "test_on_ranks": "on several ranks",
}
"""Part of the report by the contract's test; all others are of the loop."""
PACKAGES = ("anygauge", "torch", "transformers", "peft")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One check of the report.

    Attributes:
        name: the test's, as pytest has it.
        result: ``passed``, ``declared`` (not supported, as declared), ``skipped`` (it has no
            meaning for this backend), ``untried`` (it could not be asked here) or ``failed``.
        why: empty for what passed.
    """

    part: str
    name: str
    title: str
    result: str
    why: str = ""
    capability: str | None = None


@dataclass(kw_only=True, slots=True)
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
        """Tests of the contract that were left out, or could not be asked here."""
        tried = {line.name for line in self.lines if line.result != "untried"}
        return [name for name in self.contents if name not in tried]

    @property
    def verdict(self) -> str:
        """``conforms``, ``does NOT conform`` or ``is not fully tried``."""
        if any(line.result == "failed" for line in self.lines):
            return "does NOT conform"
        return "is not fully tried" if self.not_tried else "conforms"

    @property
    def conforms(self) -> bool:
        """Whether nothing failed, and everything was tried."""
        return self.verdict == "conforms"

    def gaps(self) -> str:
        """``14 of 60 checks were not tried: on several ranks (all 14)``; empty if none."""
        missing = Counter(self.contents[name][0] for name in self.not_tried)
        whole = Counter(part for part, _ in self.contents.values())
        found = []
        for part, count in missing.items():
            how_many = f"all {count}" if count == whole[part] else f"{count} of {whole[part]}"
            found.append(f"{part} ({how_many})")
        counts = f"{missing.total()} of {whole.total()} checks were not tried"
        return f"{counts}: {', '.join(found)}" if found else ""

    def counts(self) -> str:
        """``31 passed, 2 not supported as declared, 1 FAILED``."""
        words = {
            "passed": "passed",
            "declared": "not supported as declared",
            "skipped": "skipped",
            "untried": "not tried",
            "failed": "FAILED",
        }
        found = Counter(line.result for line in self.lines)
        return ", ".join(f"{found[each]} {text}" for each, text in words.items() if found[each])

    def conditions(self) -> dict[str, str]:
        """Versions and machine."""
        from anygauge.registry import installed_version
        from anygauge.testing.check import sharding

        found = {"contract": str(API_VERSION), "python": platform.python_version()}
        for package in (*PACKAGES, *sharding().distributions):
            found[package] = installed_version(package) or "not installed"
        found["machine"] = f"{platform.system()} {platform.machine()}"
        return found

    def markdown(self) -> str:
        """The page."""
        preposition = "against" if self.verdict == "is not fully tried" else "to"
        values = {**self.conditions(), **self.figures}
        lines = [
            f"# `{self.backend}` {self.verdict} {preposition} anygauge's backend contract, "
            f"version {API_VERSION}",
            "",
            f"{self.distribution}. {self.counts()}.",
            "",
            *([f"{self.gaps()}.", ""] if self.not_tried else []),
            "| what | version or value |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in values.items()),
            "",
        ]
        for part in dict.fromkeys(line.part for line in self.lines):
            lines += [f"## {part}", "", "| check | result |", "|---|---|"]
            for line in self.lines:
                if line.part == part:
                    why = f": {line.why}" if line.why else ""
                    lines.append(
                        f"| {table_cell(line.title)} | {MARKS[line.result]}{table_cell(why)} |"
                    )
            lines.append("")
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """The same, for machines."""
        return {
            "backend": self.backend,
            "distribution": self.distribution,
            "conforms": self.conforms,
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
                f"  {MARKS[line.result]:>13}  {line.title}: {line.why}"
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
            if not tables:
                found[name] = heading(function, {})
            for parameter, values in tables:
                for value in values:
                    label = getattr(value, "name", value)
                    found[f"{name}[{label}]"] = heading(function, {parameter: value})
    return found


def written(reports: Sequence[ConformanceReport], suffix: str) -> str:
    """The text of a file: Markdown, or JSON (an object, or a list of them if there are several)."""
    if suffix == ".md":
        return "\n".join(report.markdown() for report in reports)
    records = [report.record() for report in reports]
    return json.dumps(records if len(records) > 1 else records[0], indent=2) + "\n"


def table_cell(text: str) -> str:
    """Text that does not end its cell."""
    return text.replace("|", "\\|").replace("\n", " ")
