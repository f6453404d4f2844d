"""What layers keep on a simulated card between forward and backward, in bytes.

``python -m tests.strategies.activations_rank OUTPUT``: of each way to keep them, how much, and how
much of it is left after backward.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from anygauge.interface import Share
from anygauge.kernels.loss import model_loss
from anygauge.registry import Registry
from tests.strategies.parity_rank import MICRO, ParityCase, built, placed, rows

WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "every second": {"recomputed": True, "every": 2},
    "selective": {"recomputed": True, "selective": True},
    "recomputed": {"recomputed": True},
    "offloaded": {"offloaded": True},
    "recomputed, offloaded": {"recomputed": True, "offloaded": True},
}


def main(output: Path) -> None:
    """Measure each."""
    backend = Registry.load().create_backend("sim")
    device = backend.open(0)
    found = {}
    ids, labels = rows(0)
    for name, way in WAYS.items():
        case = ParityCase(strategy="single", **way)
        engine, _, share = built(case, backend, 0, 1)
        assert share == Share(0, 1)
        batch = placed(case, ids[:MICRO], labels[:MICRO], share, device)
        engine.model.train()
        before = backend.placement.memory().in_use
        loss = model_loss(engine.model(**batch.inputs))
        kept = backend.placement.memory().in_use - before
        loss.backward()
        del loss
        engine.model.zero_grad(set_to_none=True)
        found[name] = {"kept": kept, "left": backend.placement.memory().in_use - before}
        engine.close()
    output.write_text(json.dumps(found))
    backend.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
