"""A run is prepared beside ranks that another launcher started: by the first rank of each machine.

The ranks tell each other through torch's store what came of it.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from anygauge.interface import AnygaugeError, Job
from anygauge.launch.decision import Decision
from anygauge.launch.foreign_meeting import TURN_S
from anygauge.util.text import escape

if TYPE_CHECKING:
    import torch.distributed as dist

    from anygauge.launch.foreign import ForeignLaunch

_BEAT_S = 1.0
_HEARD_S = 30.0


class RefusedError(AnygaugeError):
    """No rank can start, for one reason on all of them; rank 0 has reported it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.exit_status = status


def say_refusal(why: str) -> None:
    """Say it on rank 0, before the others hear of it: a launcher ends all ranks with the first."""
    print(escape(f"error: {why}"), file=sys.stderr, flush=True)


def prepare_with_others(
    store: dist.Store, launch: ForeignLaunch, job: Job, *, quiet: bool
) -> Decision:
    """Prepare the run, as the first rank of a machine, or wait for those who do: each machine has
    the model, and on the first, model and rows are checked, and memory is planned.

    Who prepares counts on in the store meanwhile: not every launcher ends all ranks with one.

    Returns:
        What rank 0 has decided.

    Raises:
        RefusedError: the run cannot start.
        AnygaugeError: a machine is not heard from any more.
    """
    found: dict[int, str] = {}
    mine = f"anygauge/prepared/{job.id}/"
    if launch.local_rank == 0:
        beats = _Beats(store, f"{mine}beats/{launch.node_rank}")
        store.set(f"{mine}{launch.node_rank}", _prepare(launch, job, beats, quiet))
    heard = dict.fromkeys(range(launch.nodes), (0, time.monotonic()))
    while len(found) < launch.nodes:
        for node in set(range(launch.nodes)) - set(found):
            if store.check([f"{mine}{node}"]):
                found[node] = store.get(f"{mine}{node}").decode()
                continue
            count, limit_s = store.add(f"{mine}beats/{node}", 0), job.launch.silence_s
            if count != heard[node][0]:
                heard[node] = (count, time.monotonic())
            elif time.monotonic() - heard[node][1] > limit_s:
                raise AnygaugeError(
                    f"node {node} is preparing the run, but has sent nothing for {limit_s:g} s "
                    "(launch.lost_after_s). Its machine or the network to it may be down"
                )
        refusal = next((text for text in found.values() if not text.startswith("{")), None)
        if refusal is not None:
            break
        time.sleep(TURN_S)
    else:
        return _read_decision(found[0])
    status, _, why = refusal.partition(" ")
    if launch.rank == 0:
        say_refusal(why)
    # Who serves the store leaves last.
    store.set(f"{mine}heard/{launch.rank}", "")
    all_heard = [f"{mine}heard/{rank}" for rank in range(launch.world_size)]
    deadline = time.monotonic() + _HEARD_S
    while launch.rank == 0 and not store.check(all_heard) and time.monotonic() < deadline:
        time.sleep(TURN_S)
    raise RefusedError(int(status), why)


def _read_decision(text: str) -> Decision:
    try:
        return Decision.load(text)
    except ValueError as error:
        raise AnygaugeError(
            "what rank 0 has decided cannot be read here. Do all machines have the same version "
            "of anygauge?"
        ) from error


class _Beats:
    """Counts on in the store, once a second, for as long as it is called."""

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store, self._key, self._at = store, key, 0.0

    def __call__(self) -> bool:
        """Go on."""
        if time.monotonic() - self._at >= _BEAT_S:
            self._at = time.monotonic()
            self._store.add(self._key, 1)
        return True


def _prepare(launch: ForeignLaunch, job: Job, turn: Callable[[], bool], quiet: bool) -> str:
    """What this machine, the first for all, has decided; or exit status and why it refuses."""
    from anygauge.launch.prepare_here import prepare_here

    def log(text: str) -> None:
        if not quiet:
            print(escape(text), file=sys.stderr)

    where = f"{socket.gethostname()}: " if launch.nodes > 1 else ""
    first = launch.rank == 0
    try:
        return prepare_here(job, os.environ, where, log, turn, check=first, plan=first).dump()
    except AnygaugeError as error:
        return f"{error.exit_status} {error}"
