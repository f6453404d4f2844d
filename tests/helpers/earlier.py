"""A run directory that version 0.1 made: `tests/fixtures/run_0_1`, with paths of a test's folder.

Its base is a Llama of 13,000 weights. It trained an adapter for 4 steps, to be resumed from its
checkpoint. The file `metrics.jsonl` is of that run alone; steps 5 and 6 had `LOSSES_OF_5_AND_6`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from anygauge.training.checkpoints.sound import MANIFEST, digest_of
from tests.helpers.tokenizer import FIXTURES

LOSSES_OF_5_AND_6 = (6.222972347861842, 6.197272922681726)


def run_of_0_1(folder: Path) -> Path:
    """The run directory, ``folder/out/run``; its base is ``folder/base``."""
    run = folder / "out" / "run"
    shutil.copytree(FIXTURES / "run_0_1" / "base", folder / "base")
    shutil.copytree(FIXTURES / "run_0_1" / "run", run)
    places = {
        "@RUN@": run,
        "@OUTPUT@": run.parent,
        "@BASE@": folder / "base",
        "@CACHE@": folder / "cache",
        "@FIXTURES@": FIXTURES,
    }
    for path in [*run.rglob("*.json"), run / "run.yaml"]:
        text = path.read_text()
        for mark, place in places.items():
            text = text.replace(mark, str(place))
        path.write_text(text)
    for manifest in run.rglob(MANIFEST):
        sealed = json.loads(manifest.read_text())
        for name, entry in sealed["files"].items():
            path = manifest.parent / name
            entry |= {"bytes": path.stat().st_size, "sha256": digest_of(path)}
        manifest.write_text(json.dumps(sealed))
    return run
