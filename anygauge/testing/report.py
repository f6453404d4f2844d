"""One page on a backend: what was asked, what came of it, on what machine."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata

from anygauge.interface import API_VERSION

MARKS = {"passed": "pass", "declared": "not supported", "failed": "FAIL", "skipped": "skipped"}
PACKAGES = ("anygauge", "torch", "transformers", "peft", "deepspeed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One check of the report.

    Attributes:
        result: ``passed``, ``declared`` (not supported, as declared), ``skipped`` or ``failed``.
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
    """What the kit found out about one backend."""

    backend: str
    distribution: str
    lines: list[Line] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)

    @property
    def conforms(self) -> bool:
        """Whether nothing failed, and something passed."""
        results = [line.result for line in self.lines]
        return "failed" not in results and "passed" in results

    def counts(self) -> str:
        """``31 passed, 2 not supported as declared, 1 FAILED``."""
        words = {
            "passed": "passed",
            "declared": "not supported as declared",
            "skipped": "skipped",
            "failed": "FAILED",
        }
        found = [line.result for line in self.lines]
        return ", ".join(
            f"{found.count(result)} {text}" for result, text in words.items() if result in found
        )

    def conditions(self) -> dict[str, str]:
        """Versions and machine."""
        found = {"contract": str(API_VERSION), "python": platform.python_version()}
        for package in PACKAGES:
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                found[package] = "not installed"
        found["machine"] = f"{platform.system()} {platform.machine()}"
        return found

    def markdown(self) -> str:
        """The page."""
        verdict = "conforms" if self.conforms else "does NOT conform"
        lines = [
            f"# `{self.backend}` {verdict} to anygauge's backend contract, version {API_VERSION}",
            "",
            f"{self.distribution}. {self.counts()}.",
            "",
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

    def as_json(self) -> str:
        """The same, for machines."""
        record = {
            "backend": self.backend,
            "distribution": self.distribution,
            "conforms": self.conforms,
            "conditions": self.conditions(),
            "figures": self.figures,
            "checks": [asdict(line) for line in self.lines],
        }
        return json.dumps(record, indent=2) + "\n"

    def terminal(self) -> Sequence[str]:
        """The end of a pytest run."""
        lines = [f"{self.backend} ({self.distribution}): {self.counts()}"]
        lines += [
            f"  {MARKS[line.result]:>13}  {line.title}: {line.why}"
            for line in self.lines
            if line.result != "passed"
        ]
        return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
