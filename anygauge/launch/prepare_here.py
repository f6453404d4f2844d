"""Prepares a run on a machine where ranks will run and the command does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from anygauge.interface import AnygaugeError, Job
from anygauge.launch.decision import Decision
from anygauge.launch.prepare_call import no_other_work, prepare
from anygauge.util.text import format_bytes

_PROGRESS_S = 30.0


def prepare_here(
    job: Job,
    environment: Mapping[str, str],
    where: str,
    log: Callable[[str], None],
    turn: Callable[[], bool] = no_other_work,
    *,
    check: bool,
    plan: bool,
) -> Decision:
    """Prepare a run on this machine, where ranks will run: fetch its model.

    Args:
        where: a prefix for each line.
        log: takes lines: what is fetched, and from time to time how much of it.
        turn: called again and again meanwhile; False gives up.
        check: also check model and rows, and put the rows' tokens in the cache.
        plan: also decide for all machines what strategy `auto` is, and plan memory.

    Raises:
        AnygaugeError: the model cannot be fetched, or what ranks would refuse.
    """
    from anygauge.config.resolved import read_run, run_json
    from anygauge.data import addresses
    from anygauge.launch.prepare_request import PrepareRequest
    from anygauge.models.hub import download_requests

    logged = time.monotonic()

    def show(event: Mapping[str, Any]) -> None:
        nonlocal logged
        if event["event"] == "message":
            log(where + event["text"])
        elif time.monotonic() - logged > _PROGRESS_S:
            logged = time.monotonic()
            share = event["done"] / max(1, event["total"])
            log(f"{where}{event['name']}: {share:.0%} of {format_bytes(event['total'])}")

    try:
        run = read_run(job.resolved_run)
        request = PrepareRequest(
            fetch=tuple(download_requests(run.model)),
            copies=tuple(addresses(run.data)),
            stages=(*(("check",) if check else ()), *(("plan",) if plan else ())),
            run=run_json(run.model_copy(update={"environment": {}})),
            backend=job.backend,
            id=job.id,
            asked=job.plan,
            force=job.force,
        )
        answer = prepare(request, environment, show=show, turn=turn)
    except AnygaugeError as error:
        raise type(error)(f"{where}{error}") from None
    decided = answer.decided or Decision()
    for note in (*answer.found.notes, *filter(None, [decided.note])):
        log(f"{where}note: {note}")
    for line in decided.lines:
        log(line)
    return decided
