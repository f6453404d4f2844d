"""What is generated on the pages is today's; ``make docs`` writes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.describe import sections
from anygauge.config.plugin_sections import PluginSection
from anygauge.testing import BackendContract
from anygauge.testing.plugin import contents
from docs import make_docs
from docs.make_docs import MARKS, PARTS, REPORTS, ROOT, generated, pages

FOUND = [
    pytest.param(path, part[2], part[3], id=f"{path.relative_to(ROOT / 'docs')}: {part[2]}")
    for path in pages()
    for part in MARKS.finditer(path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("page", "name", "text"), FOUND)
def test_no_page_is_stale(page: Path, name: str, text: str) -> None:
    assert text == f"\n{PARTS[name]()}\n", f"{page.relative_to(ROOT)} is stale: run `make docs`"


def test_each_part_stands_on_one_page() -> None:
    assert sorted(found.values[1] for found in FOUND) == sorted(PARTS)


def test_only_what_is_between_the_marks_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_docs, "PARTS", {"cards": lambda: "new\n"})
    before, after = "a\n<!-- generated: cards (make docs) -->\n", "<!-- end -->\nb\n"
    assert generated(f"{before}old\n{after}") == f"{before}\nnew\n\n{after}"
    with pytest.raises(KeyError, match="hills"):
        generated(f"<!-- generated: hills (make docs) -->\n{after}")


# -- conformance/devices.md ------------------------------------------------------------------------


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_reports_of_our_own_devices_are_of_todays_checks(path: Path) -> None:
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["conforms"]
    today = {name: title for name, (_, title) in contents(BackendContract).items()}
    found = {line["name"]: line["title"] for line in report["checks"]}
    assert found == today, f"pytest --anygauge-backend {path.stem} --anygauge-report {path}"


def test_a_page_of_several_reports_has_a_column_for_each() -> None:
    def report(name: str, last: str) -> dict[str, Any]:
        results = {"a": "passed", "b": "passed", "c": last}
        checks = [
            {"name": letter, "part": "ranks", "title": f"{letter} | it", "result": result}
            for letter, result in results.items()
        ]
        figures = {"losses": "1.0e-07 from the host's at most; 2.0e-06 allowed"}
        conforms = last != "failed"
        versions = {"torch": "2.13"}
        return {"backend": name, "conforms": conforms, "conditions": versions, "checks": checks,
                "figures": figures if conforms else {}}  # fmt: skip

    text = "".join(make_docs.compared([report("one", "skipped"), report("two", "failed")]))
    assert "Equal for all: torch 2.13.\n" in text
    assert "| verdict | conforms | does NOT conform |" in text
    assert "| ranks: 2 checks | pass | pass |\n| ranks: c \\| it | - | FAIL |" in text
    assert "| losses | 2.0e-06 | 1.0e-07 | - |" in text


# -- run-file.md -----------------------------------------------------------------------------------


def test_every_field_of_every_section_has_a_full_row() -> None:
    text = PARTS["run file fields"]()
    for _, section in sections():
        rows = make_docs.field_rows(section)
        assert [row[0].strip("`") for row in rows] == list(section.model_fields)
        assert all(cell.strip() for row in rows for cell in row), rows
        if not issubclass(section, PluginSection):
            assert make_docs.fields(section) in text
        elif f"| `{section.plugin_name}` | " in text:  # those of other distributions are not
            for name, *cells in rows:
                found = rf"\| {name} \| ([^|]*`{section.plugin_name}`[^|]*|all) \| "
                assert name == "`name`" or re.search(found + re.escape(" | ".join(cells)), text)


def test_rows_say_type_default_and_meaning() -> None:
    text = PARTS["run file fields"]()
    assert "| `lr` | all | number > 0 | `0.0002` | Peak learning rate. |" in text
    assert "| `path` | text | required | A .json, .jsonl, .csv, .parquet or .txt file, the" in text
    assert '| `template` | text | `"{prompt}\\n"` |' in text
    assert "| `adapter` | section or null | `null` | A low-rank adapter (LoRA)." in text
    assert "each run makes \\<output>/\\<name>. |" in text
