"""What pages say of files, lines and devices, held against the sources and against each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, section

MADE_OF_PARTS = {"wandb-run.json", "mlflow-run.json"}
"""Names that a source puts together."""
OF_OTHERS = {"tokenizer.json"}


def sources() -> str:
    """All of the package's own code."""
    folders = ("anygauge", "backends", "launchers", "kernels", "docker")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return "\n".join(path.read_text() for path in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_one_that_the_sources_know(page: Path) -> None:
    code = sources()
    named = set(re.findall(r"`(?:\w+/)*([a-z][a-z_-]*\.json)`", page.read_text()))
    unknown = {
        name
        for name in named - MADE_OF_PARTS - OF_OTHERS
        if not re.search(rf"(?<![\w-]){re.escape(name)}\b", code)
    }
    assert not unknown - {"data.json"}


def test_the_line_that_names_the_attention_is_the_one_that_is_printed() -> None:
    page = " ".join((ROOT / "docs" / "gaudi.md").read_text().split())
    told = re.search(r"begins with `(\w+:)` says which attention is active", page)
    assert told is not None
    assert f'f"{told[1]} {{plan.describe()}}"' in (ROOT / "anygauge/training/setup.py").read_text()
    assert 'parts = [f"attention ' in (ROOT / "anygauge/kernels/plan.py").read_text()
    assert f"\n{told[1]} attention " in (ROOT / "docs" / "commands.md").read_text()


def test_the_readme_claims_no_run_that_its_status_denies() -> None:
    status = section(ROOT / "README.md", "## What has run")
    for device, denied in (
        ("CUDA", "several cards only on a [strict stand-in]"),
        ("Gaudi", "on no card"),
    ):
        row = next(line for line in status.splitlines() if device in line)
        assert denied in row
    claim = " ".join((ROOT / "README.md").read_text().partition("\n## ")[0].split())
    assert "NVIDIA GPUs or Intel Gaudi" in claim
    assert "it has run on CPUs and on one NVIDIA H200" in claim
