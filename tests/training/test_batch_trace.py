"""The way of a micro-batch is as short as docs/architecture.md says: counted in a run."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import ROOT, section, table_names
from tests.training.batch_trace import batch_trace

MOST_FILES, MOST_CARRIERS = 25, 9


def test_a_micro_batch_passes_the_files_and_carriers_that_the_page_lists(tmp_path: Path) -> None:
    """`python -m tests.training.batch_trace` prints them."""
    trace = batch_trace(tmp_path)
    assert len(trace.files) <= MOST_FILES, trace.files
    assert len(trace.carriers) <= MOST_CARRIERS, trace.carriers
    page = section(ROOT / "docs/architecture.md", "### The path of a batch, counted")
    assert table_names(page) == {*trace.files, *trace.carriers}
