"""Two ranks that look whether their collectives have means: ``average_rank.py OUTPUT``.

Whichever way the installed torch's gloo answers, a mean that is a sum is refused.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from anygauge.interface import UnsupportedError
from anygauge.strategies.fsdp import check_average


def main(output: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=os.environ["RENDEZVOUS"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    group, device = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    reduce = dist.all_reduce

    def wrong(value: torch.Tensor, op: Any, group: Any) -> None:
        reduce(value, op=dist.ReduceOp.SUM, group=group)

    def right(value: torch.Tensor, op: Any, group: Any) -> None:
        reduce(value, op=dist.ReduceOp.SUM, group=group)
        value.div_(dist.get_world_size(group))

    def lacking(value: torch.Tensor, op: Any, group: Any) -> None:
        raise RuntimeError("no such operation")

    said = []
    for one in (right, wrong, lacking):
        dist.all_reduce = one  # type: ignore[assignment]
        try:
            check_average(group, device)
            said.append("accepted")
        except UnsupportedError as error:
            said.append(str(error))
    dist.all_reduce = reduce
    if dist.get_rank() == 0:
        output.write_text("\n".join(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
