"""The kit's pytest plugin: ``--anygauge-backend``, and the report at the end.

Loaded by every pytest run where anygauge is installed, so it imports nothing until it is asked to.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from anygauge.testing.check import DECLARED, NOT_ASKED

if TYPE_CHECKING:
    from anygauge.testing.report import Report

CHOSEN = "ANYGAUGE_CONFORMANCE_BACKEND"
"""How the collected file learns of the name."""
CONFORMANCE = Path(__file__).with_name("conformance.py")
PROPERTY = "anygauge_conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The kit's options."""
    group = parser.getgroup("anygauge", "anygauge: conformance of a backend")
    group.addoption(
        "--anygauge-backend",
        metavar="NAME",
        help="run the conformance kit on the installed backend NAME",
    )
    group.addoption(
        "--anygauge-report",
        metavar="FILE",
        action="append",
        default=[],
        help="write the report to FILE, as Markdown (.md) or JSON (.json); may be repeated",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect the kit where a backend is named."""
    for name in config.getoption("--anygauge-report"):
        if Path(name).suffix not in (".md", ".json"):
            raise pytest.UsageError(f"--anygauge-report {name}: the name must end in .md or .json")
    backend = config.getoption("--anygauge-backend")
    if backend or config.getoption("--anygauge-report"):
        config.pluginmanager.register(_Reporter(), "anygauge-reporter")
    if not backend:
        return
    from anygauge.interface import AnygaugeError
    from anygauge.registry import Registry

    try:
        Registry.load().find_backend(backend)
    except AnygaugeError as error:
        raise pytest.UsageError(f"--anygauge-backend: {error}") from error
    os.environ[CHOSEN] = backend
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = [str(CONFORMANCE)]
    for given in config.args:
        path = config.invocation_params.dir / given.split("::")[0]
        if path.resolve() != CONFORMANCE.resolve():
            raise pytest.UsageError(
                f"--anygauge-backend {backend} runs the kit and takes no other tests: leave out "
                f"{given}, or --anygauge-backend if a class there derives from BackendContract"
            )


class _Reporter:
    """Collects the results of `BackendContract`'s tests, also from other processes (xdist)."""

    def __init__(self) -> None:
        self._reports: dict[str, Report] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        outcome = yield
        contract = getattr(item, "cls", None)
        if contract is None or not hasattr(contract, "loss_noise"):
            return outcome
        # A test is over with its call, or before it where it was skipped or could not begin.
        if call.when == "call" or (call.when == "setup" and not outcome.passed):
            outcome.user_properties.append((PROPERTY, _result(item, contract, outcome, call)))
        return outcome

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        from anygauge.testing.report import Line

        for name, value in report.user_properties:
            if name == PROPERTY:
                given: Any = value
                self._report(given["backend"], given["figures"]).lines.append(Line(**given["line"]))

    def _report(self, backend: str, figures: dict[str, str]) -> Report:
        from anygauge.registry import Registry
        from anygauge.testing.contract import BackendContract
        from anygauge.testing.report import Report, contents

        if backend not in self._reports:
            self._reports[backend] = Report(
                backend=backend,
                distribution=Registry.load().find_backend(backend).origin,
                contents=contents(BackendContract),
                figures=figures,
            )
        return self._reports[backend]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A report that was asked for and cannot be written is a failure."""
        # A process of xdist may well have got none of the tests; the one that asked has them all.
        asking = not hasattr(session.config, "workerinput")
        if asking and session.config.getoption("--anygauge-report") and not self._reports:
            session.exitstatus = session.exitstatus or pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """The page, and the files that were asked for."""
        files = config.getoption("--anygauge-report")
        for report in self._reports.values():
            terminalreporter.section(f"anygauge conformance: {report.backend}")
            for line in report.terminal():
                terminalreporter.write_line(line)
        if not self._reports:
            for name in files:
                terminalreporter.write_line(
                    f"ERROR: --anygauge-report {name} was not written: no test of a "
                    "BackendContract was run",
                    red=True,
                )
            return
        from anygauge.testing.report import written
        from anygauge.util.files import write_text

        for name in files:
            write_text(Path(name), written(list(self._reports.values()), Path(name).suffix))
            terminalreporter.write_line(f"written: {name}")


def _result(item: Any, contract: Any, outcome: pytest.TestReport, call: Any) -> dict[str, Any]:
    """What became of one test, in plain types."""
    from anygauge.testing.report import heading

    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    check = parameters.get("check")
    part, title = heading(item.function, parameters)
    result, why = _judged(outcome, call)
    return {
        "backend": contract.backend,
        "figures": {
            f"stated noise of losses, {dtype}": f"{noise:g}"
            for dtype, noise in contract.loss_noise.items()
        },
        "line": {
            "part": part,
            "name": item.name,
            "title": title,
            "result": result,
            "why": why,
            "capability": check.capability if check else None,
        },
    }


def _judged(outcome: pytest.TestReport, call: Any) -> tuple[str, str]:
    """(Result of the line, why) of a test that is over."""
    raised = call.excinfo.value if call.excinfo else None
    said = " ".join(str(raised).split()) if raised else str(outcome.longrepr)
    if outcome.passed:
        return "passed", ""
    if hasattr(outcome, "wasxfail"):
        if isinstance(raised, pytest.xfail.Exception):
            return "untried", f"marked as an expected failure: {outcome.wasxfail}"
        # Who expects a failure has one all the same.
        return "failed", f"{said} (marked as an expected failure: {outcome.wasxfail})"
    if outcome.failed:
        return "failed", said
    for start, result in ((DECLARED, "declared"), (NOT_ASKED, "skipped")):
        if said.startswith(start):
            return result, said.removeprefix(start)
    return "untried", said
