"""Two parts of a run, sent to one tracker as a rank sends them; then what it did to the process.

For a process of its own, since services keep state in theirs: NAME FOLDER OPTIONS.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from anygauge.config.schema import RunFile
from anygauge.registry import Registry
from anygauge.training.trackers.group import open_trackers


def main(name: str, folder: Path, options: str) -> None:
    import torch
    import torch.distributed as dist
    from accelerate.state import PartialState

    def refuse(*_: object) -> None:
        raise AssertionError("a tracker has set a device")

    torch.cuda.set_device = refuse  # type: ignore[assignment]
    file = {"name": "tiny", "model": {"name": "m"}, "data": {"train": {"path": "rows.jsonl"}}}
    run = RunFile.model_validate(
        {**file, "trackers": [name], "tracker_options": {name: json.loads(options)}}
    )
    said: list[str] = []
    for resumed, steps in ((None, (1, 2)), (1, (2, 3))):
        trackers = open_trackers(
            Registry.load(), run, folder, said.append, resumed_from_step=resumed
        )
        for step in steps:
            losses = {"train/loss": step + 10.0 * (resumed or 0), "train/grad_norm": math.inf}
            trackers.log(step, losses)
        trackers.close("finished" if resumed else "stopped", {"final_loss": 1.5})
    assert said == []
    assert PartialState._shared_state == {} and not dist.is_initialized()
    assert not torch.cuda.is_initialized()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
