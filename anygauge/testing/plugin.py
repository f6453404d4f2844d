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
    config.pluginmanager.register(_Reporter(), "anygauge-reporter")


class _Reporter:
    """Collects the results of `BackendContract`'s tests."""

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
            self._add(item, contract, outcome)
        return outcome

    def _add(self, item: Any, contract: Any, outcome: pytest.TestReport) -> None:
        from anygauge.testing.report import Line

        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        check = parameters.get("check")
        given = [value for name, value in parameters.items() if name != "check"]
        why = ""
        result = outcome.outcome
        if outcome.skipped:
            why = outcome.longrepr[2].removeprefix("Skipped: ")  # type: ignore[index]
            if why.startswith(DECLARED):
                result, why = "declared", why.removeprefix(DECLARED)
        elif outcome.failed:
            why = str(outcome.longreprtext).strip().splitlines()[-1]
        words = (item.function.__doc__ or item.name).strip().splitlines()[0]
        title = check.title if check else " ".join([words, *(f"({value})" for value in given)])
        self._report(contract).lines.append(
            Line(
                part=_PARTS.get(item.originalname, "the loop"),
                name=item.name,
                title=title,
                result=result,
                why=why,
                capability=check.capability if check else None,
            )
        )

    def _report(self, contract: Any) -> Report:
        from anygauge.registry import Registry
        from anygauge.testing.report import Report

        name = contract.backend
        if name not in self._reports:
            self._reports[name] = Report(
                backend=name,
                distribution=Registry.load().find_backend(name).origin,
                figures={
                    f"stated noise of losses, {dtype}": f"{noise:g}"
                    for dtype, noise in contract.loss_noise.items()
                },
            )
        return self._reports[name]

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


_PARTS = {
    "test_on_paper": "on paper",
    "test_on_device": "on a device",
    "test_on_ranks": "on several ranks",
}
