"""Two parts of a run, sent to trackers as a rank sends them; then what they did to the process.

For a process of its own, since services keep state in theirs: FOLDER and their options.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from anygauge.config.schema import RunFile
from anygauge.registry import Registry
from anygauge.training.trackers.group import open_trackers


def main(folder: Path, options: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from accelerate.state import PartialState

    def refuse(*_: object) -> None:
        raise AssertionError("a tracker has set a device")

    torch.cuda.set_device = refuse  # type: ignore[assignment]
    file = {"name": "tiny", "model": {"name": "m"}, "data": {"train": {"path": "rows.jsonl"}}}
    run = RunFile.model_validate({**file, "trackers": list(options), "tracker_options": options})
    said: list[str] = []
    for resumed, steps in ((None, (1, 2)), (1, (2, 3))):
        trackers = open_trackers(
            Registry.load(), run, folder, said.append, resumed_from_step=resumed
        )
        for step in steps:
            losses = {"train/loss": step + 10.0 * (resumed or 0), "train/grad_norm": math.inf}
            trackers.log(step, losses)
        trackers.close("finished" if resumed else "stopped", {"final_loss": 1.5})
    assert said == [], said
    assert PartialState._shared_state == {} and not dist.is_initialized()
    assert not torch.cuda.is_initialized()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # a service that is open might hold up an ordinary end
