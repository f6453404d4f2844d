"""The kit itself: verdicts, the pytest plugin, the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from anygauge.testing.check import CHECKS, Answer, verdict
from anygauge.testing.report import Line, Report
from tests.docs.pages import ROOT
from tests.testing.test_mutations import mutant_site

REPORTS = sorted((ROOT / "docs/conformance").glob("*.md"))


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (Answer(holds=True), "passed"),
        (Answer(holds=False, detail="no"), "failed"),
        (Answer(holds=True, declared="full", supported=True), "passed"),
        (Answer(holds=False, declared="full", supported=True), "failed"),
        (Answer(holds=False, declared="unsupported", supported=False), "declared"),
        (Answer(holds=True, declared="unsupported", supported=False), "failed"),
        (Answer(holds=True, not_asked="one device only"), "skipped"),
    ],
)
def test_what_is_declared_is_held_against_what_happens(answer: Answer, result: str) -> None:
    found, why = verdict(answer)
    assert found == result
    assert why or found == "passed", "everything but a pass has a reason"


def line(result: str, **changes: str) -> Line:
    return Line(**{"part": "p", "name": "n", "title": "t", "result": result, **changes})


def test_a_report_that_has_nothing_passed_does_not_conform() -> None:
    report = Report(backend="mine", distribution="mine 1.0")
    assert not report.conforms
    report.lines.append(line("skipped", why="no device"))
    assert not report.conforms
    report.lines.append(line("passed"))
    assert report.conforms
    report.lines.append(line("failed", why="a | b"))
    assert not report.conforms
    assert "does NOT conform" in report.markdown()
    assert "FAIL: a \\| b" in report.markdown(), "a bar in a table's cell"
    assert json.loads(report.as_json())["conforms"] is False
    assert report.counts() == "1 passed, 1 skipped, 1 FAILED"


def kit(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def test_a_failure_is_reported_in_both_forms_and_ends_in_status_1(tmp_path: Path) -> None:
    site = mutant_site(tmp_path)
    done = kit(
        tmp_path,
        *("--anygauge-backend", "mutant", "-k", "on_paper", "-n", "2"),
        *("--anygauge-report", "page.md", "--anygauge-report", "page.json"),
        PYTHONPATH=str(site),
        ANYGAUGE_MUTATION="a setting without a reason",
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "anygauge conformance: mutant" in done.stdout
    record = json.loads((tmp_path / "page.json").read_text())
    assert record["conforms"] is False
    (failed,) = [check for check in record["checks"] if check["result"] == "failed"]
    assert failed["name"] == "test_on_paper[settings_explain_themselves]"
    assert "MUTANT_LEVEL: no reason" in failed["why"]
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# `mutant` does NOT conform")
    assert "FAIL: MUTANT_LEVEL: no reason" in page


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--anygauge-backend", "nobody"), "there is no backend named 'nobody'"),
        (
            ("--anygauge-backend", "cpu", "--anygauge-report", "page.txt"),
            "must end in .md or .json",
        ),
    ],
)
def test_wrong_arguments_are_refused_in_words(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = kit(tmp_path, *arguments)
    assert done.returncode == 4
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_class_of_the_author_is_enough(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from anygauge.testing import BackendContract\n"
        "class TestMine(BackendContract):\n"
        "    backend = 'cpu'\n"
    )
    done = kit(tmp_path, "-k", "on_paper", "--anygauge-report", "page.md")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "page.md").read_text().startswith("# `cpu` conforms")


def test_pytest_without_the_kits_options_imports_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it():\n"
        "    assert 'anygauge.testing.contract' not in sys.modules\n"
        "    assert 'torch' not in sys.modules\n"
    )
    assert kit(tmp_path).returncode == 0


@pytest.mark.parametrize("page", REPORTS, ids=lambda page: page.stem)
def test_published_reports_are_of_todays_checks(page: Path) -> None:
    from anygauge.testing import catalogue  # noqa: F401  (fills the table)

    text = page.read_text()
    assert text.startswith(f"# `{page.stem}` conforms")
    told = {row.split(" | ")[0].removeprefix("| ") for row in text.splitlines()}
    assert {check.title for check in CHECKS.values()} <= told


def test_reports_are_published() -> None:
    assert {page.stem for page in REPORTS} == {"cpu", "lazy", "sim"}
