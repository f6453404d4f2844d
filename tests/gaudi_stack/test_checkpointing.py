"""Recomputation with a DeepSpeed of the Gaudi stack: why it is reentrant there."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    Version(metadata.version("deepspeed")) >= Version("0.19.6"),
    reason="this DeepSpeed keeps the weights of non-reentrant regions",
)


@pytest.mark.parametrize("form", ["reentrant", "not"])
def test_only_reentrant_recomputation_trains(tmp_path: Path, form: str) -> None:
    output = tmp_path / "found.json"
    run_ranks("tests.gaudi_stack.checkpointing_rank", [str(output), form], world=2, folder=tmp_path)
    found = json.loads(output.read_text(encoding="utf-8"))
    if form == "reentrant":
        assert found["raised"] is None
        first, second = found["losses"]
        assert second < first
    else:
        assert found == {"losses": [], "raised": "CheckpointError"}
