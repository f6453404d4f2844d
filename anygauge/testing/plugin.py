"""The kit's pytest plugin: ``--anygauge-backend``, and the report at the end.

Loaded by every pytest run where anygauge is installed, so it imports nothing until it is asked to.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from anygauge.testing.report import Report

CHOSEN = "ANYGAUGE_CONFORMANCE_BACKEND"
"""How the collected file learns of the name."""
CONFORMANCE = Path(__file__).with_name("conformance.py")
DECLARED = "declared: "
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
    """Collect the kit where a backend is named and no files are."""
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
        from anygauge.testing.report import Report

        if backend not in self._reports:
            self._reports[backend] = Report(
                backend=backend,
                distribution=Registry.load().find_backend(backend).origin,
                figures=figures,
            )
        return self._reports[backend]

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """The page, and the files that were asked for."""
        for report in self._reports.values():
            terminalreporter.section(f"anygauge conformance: {report.backend}")
            for line in report.terminal():
                terminalreporter.write_line(line)
        if not self._reports:
            return
        from anygauge.interface.files import write_text

        for name in config.getoption("--anygauge-report"):
            pages = [
                report.as_json() if name.endswith(".json") else report.markdown()
                for report in self._reports.values()
            ]
            write_text(Path(name), "\n".join(pages))
            terminalreporter.write_line(f"written: {name}")


def _result(item: Any, contract: Any, outcome: pytest.TestReport, call: Any) -> dict[str, Any]:
    """What became of one test, in plain types."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    check = parameters.get("check")
    given = [value for name, value in parameters.items() if name != "check"]
    why = ""
    result: str = outcome.outcome
    if outcome.skipped:
        why = outcome.longrepr[2].removeprefix("Skipped: ")  # type: ignore[index]
        if why.startswith(DECLARED):
            result, why = "declared", why.removeprefix(DECLARED)
    elif outcome.failed:
        why = " ".join(str(call.excinfo.value).split())
    words = (item.function.__doc__ or item.name).strip().splitlines()[0].rstrip(".")
    return {
        "backend": contract.backend,
        "figures": {
            f"stated noise of losses, {dtype}": f"{noise:g}"
            for dtype, noise in contract.loss_noise.items()
        },
        "line": {
            "part": _PARTS.get(item.originalname, "the loop"),
            "name": item.name,
            "title": check.title if check else " ".join([words, *(f"({v})" for v in given)]),
            "result": result,
            "why": why,
            "capability": check.capability if check else None,
        },
    }


_PARTS = {
    "test_on_paper": "on paper",
    "test_on_device": "on a device",
    "test_on_ranks": "on several ranks",
}
