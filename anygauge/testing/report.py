"""One page on a backend: what was asked, what came of it, on what machine."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from anygauge.interface import API_VERSION
from anygauge.registry import Registry, installed_version

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
class Report:
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
    def conforms(self) -> bool:
        """Whether nothing failed, and everything was tried."""
        return not self._failed and not self.not_tried

    @property
    def _failed(self) -> bool:
        return any(line.result == "failed" for line in self.lines)

    @property
    def verdict(self) -> str:
        """``conforms``, ``does NOT conform`` or ``is not fully tried``."""
        if self._failed:
            return "does NOT conform"
        return "is not fully tried" if self.not_tried else "conforms"

    def gaps(self) -> str:
        """``14 of 60 checks were not tried: on several ranks (all 14)``; empty if none."""
        missing = self.not_tried
        if not missing:
            return ""
        found = []
        for part in dict.fromkeys(part for part, _ in self.contents.values()):
            whole = [name for name, (where, _) in self.contents.items() if where == part]
            count = len([name for name in whole if name in missing])
            if count:
                how_many = f"all {count}" if count == len(whole) else f"{count} of {len(whole)}"
                found.append(f"{part} ({how_many})")
        return f"{len(missing)} of {len(self.contents)} checks were not tried: {', '.join(found)}"

    def counts(self) -> str:
        """``31 passed, 2 not supported as declared, 1 FAILED``."""
        words = {
            "passed": "passed",
            "declared": "not supported as declared",
            "skipped": "skipped",
            "untried": "not tried",
            "failed": "FAILED",
        }
        found = [line.result for line in self.lines]
        return ", ".join(
            f"{found.count(result)} {text}" for result, text in words.items() if result in found
        )

    def conditions(self) -> dict[str, str]:
        """Versions and machine."""
        found = {"contract": str(API_VERSION), "python": platform.python_version()}
        engines = Registry.load().default_strategy().spec.distributions
        for package in (*PACKAGES, *engines):
            found[package] = installed_version(package) or "not installed"
        found["machine"] = f"{platform.system()} {platform.machine()}"
        return found

    def markdown(self) -> str:
        """The page."""
        preposition = "against" if self.verdict == "is not fully tried" else "to"
        lines = [
            f"# `{self.backend}` {self.verdict} {preposition} anygauge's backend contract, "
            f"version {API_VERSION}",
            "",
            f"{self.distribution}. {self.counts()}.",
            "",
            *([f"{self.gaps()}.", ""] if self.not_tried else []),
            "| what | version or value |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in self.conditions().items()),
            *(f"| {name} | {value} |" for name, value in self.figures.items()),
            "",
        ]
        for part in dict.fromkeys(line.part for line in self.lines):
            lines += [f"## {part}", "", "| check | result |", "|---|---|"]
            for line in self.lines:
                if line.part == part:
                    why = f": {line.why}" if line.why else ""
                    lines.append(f"| {_cell(line.title)} | {MARKS[line.result]}{_cell(why)} |")
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
        lines = [f"{self.backend} ({self.distribution}) {self.verdict}: {self.counts()}"]
        lines += [self.gaps()] if self.not_tried else []
        lines += [
            f"  {MARKS[line.result]:>13}  {line.title}: {line.why}"
            for line in self.lines
            if line.result != "passed"
        ]
        return lines


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
        if not name.startswith("test_"):
            continue
        marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
        if not marks:
            found[name] = heading(function, {})
        for mark in marks:
            parameter, values = mark.args
            for value in values:
                label = getattr(value, "name", value)
                found[f"{name}[{label}]"] = heading(function, {parameter: value})
    return found


def written(reports: Sequence[Report], suffix: str) -> str:
    """The text of a file: Markdown, or JSON (an object, or a list of them if there are several)."""
    if suffix == ".md":
        return "\n".join(report.markdown() for report in reports)
    records = [report.record() for report in reports]
    return json.dumps(records if len(records) > 1 else records[0], indent=2) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
