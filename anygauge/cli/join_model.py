"""Ranks that another launcher started fetch their model: the first of a machine, for all there."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.interface import AnygaugeError, Job
from anygauge.util.start import settled

if TYPE_CHECKING:
    import torch.distributed as dist

    from anygauge.agent.foreign import ForeignLaunch

_BEAT_S = 1.0
_TURN_S = 0.05
_HEARD_S = 30.0


def fetch_with_others(
    store: dist.Store, launch: ForeignLaunch, job: Job, *, quiet: bool
) -> str | None:
    """Fetch the run's model, if it is of the hub, or wait for those who do.

    Returns:
        Why it cannot be had, alike on all ranks; None where all machines have it.

    Raises:
        AnygaugeError: a machine is not heard from any more.
    """
    from anygauge.config import read_run
    from anygauge.models.hub import wanted

    if not wanted(read_run(settled(Path(job.run_file))).model):
        return None
    keys = {node: f"anygauge/model/{job.id}/{node}" for node in range(launch.nodes)}
    if launch.local_rank == 0:
        _fetch(store, keys[launch.node_rank], launch, job, quiet)
    refusal = _wait(store, keys, job.launch.lost_after_s)
    if refusal is not None:
        # Who serves the store leaves last.
        store.set(f"anygauge/model/{job.id}/heard/{launch.rank}", "")
        heard = [f"anygauge/model/{job.id}/heard/{rank}" for rank in range(launch.world_size)]
        deadline = time.monotonic() + _HEARD_S
        while launch.rank == 0 and not store.check(heard) and time.monotonic() < deadline:
            time.sleep(_TURN_S)
    return refusal


def _fetch(store: dist.Store, key: str, launch: ForeignLaunch, job: Job, quiet: bool) -> None:
    from anygauge.agent.startup import fetch_here

    beaten = -_BEAT_S

    def turn() -> bool:
        nonlocal beaten
        if time.monotonic() - beaten >= _BEAT_S:
            beaten = time.monotonic()
            store.set(f"{key}/at", str(time.time()))
        return True

    def log(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr)

    where = f"{socket.gethostname()}: " if launch.nodes > 1 else ""
    try:
        fetch_here(job.run_file, os.environ, where, log, turn)
    except AnygaugeError as error:
        store.set(key, str(error))
    else:
        store.set(key, "")


def _wait(store: dist.Store, keys: dict[int, str], limit_s: float) -> str | None:
    """Until all machines have it, or the first says why not."""
    waiting = dict(keys)
    heard = dict.fromkeys(keys, (b"", time.monotonic()))
    while waiting:
        for node, key in list(waiting.items()):
            if store.check([key]):
                del waiting[node]
                if text := store.get(key).decode():
                    return text
                continue
            at = store.get(f"{key}/at") if store.check([f"{key}/at"]) else b""
            before, when = heard[node]
            if at != before:
                heard[node] = (at, time.monotonic())
            elif time.monotonic() - when > limit_s:
                raise AnygaugeError(
                    f"node {node} is fetching the model, but has sent nothing for {limit_s:g} s "
                    "(launch.lost_after_s). Its machine or the network to it may be down"
                )
        if waiting:
            time.sleep(_TURN_S)
    return None
