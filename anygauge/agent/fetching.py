"""Before ranks start: each node fetches the model, and none starts ranks until all have it.

Meanwhile the nodes hear of each other, so that a failure on one of them ends the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from anygauge.agent.nodes import Nodes, Order
from anygauge.interface import AnygaugeError, Job, ModelError
from anygauge.models.fetching import fetching

_TURN_S = 0.1
_TOLD_S = 30.0


class OrderedError(AnygaugeError):
    """Another node has failed, or the job was asked to end: no rank starts here."""


def fetch_on_all(
    job: Job,
    nodes: Nodes,
    environment: Mapping[str, str],
    host: str,
    asked: Sequence[object] = (),
) -> None:
    """Fetch on this node, and wait for the others.

    Args:
        environment: of the process that fetches.
        asked: fills when this agent is asked to end: then nothing is waited for, and the
            supervisor answers.

    Raises:
        ModelError: it cannot be had; names the node.
        OrderedError: another node ends the job.
    """

    def turn() -> bool:
        if set(nodes.turn()) - {Order.FINISH}:
            raise OrderedError("no rank was started here")
        return not asked

    def log(text: str) -> None:
        nodes.send("message", level="info", text=text)

    where = f"node {host}: " if job.launch.nodes > 1 else ""
    fetch_here(job.run_file, environment, where, log, turn)
    if not asked:
        nodes.ready()
    while not nodes.all_ready and turn():
        time.sleep(_TURN_S)


def fetch_here(
    run_file: str,
    environment: Mapping[str, str],
    where: str,
    log: Callable[[str], None],
    turn: Callable[[], bool],
) -> None:
    """Fetch the model of a resolved run.

    Args:
        where: begins each line.
        log: takes lines: what is fetched, and now and then how far it is.
        turn: called again and again meanwhile; False gives up.

    Raises:
        ModelError: it cannot be had.
    """
    told = time.monotonic()
    try:
        for event in fetching(["--run", run_file], environment, turn):
            if event["event"] == "message":
                log(where + event["text"])
            elif event["event"] == "fetching" and time.monotonic() - told > _TOLD_S:
                told = time.monotonic()
                share = event["done"] / max(1, event["total"])
                log(f"{where}{event['name']}: {share:.0%} of {event['total'] / 1e9:.1f} GB")
    except ModelError as error:
        raise ModelError(f"{where}{error}") from None
