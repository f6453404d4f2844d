"""The process that fetches a model of the hub: ``python -m anygauge.models.fetch NAME``.

By hand it says what it does. With ``--events`` it writes events, for the command line and for
agents, who start it once on each machine before any rank.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from anygauge.config.resolved import read_run
from anygauge.config.schema import ModelSection
from anygauge.interface import AnygaugeError
from anygauge.models.hub import Wanted, fetch, readable_size, wanted
from anygauge.models.hub_errors import HubUnreachableError
from anygauge.util.events import EventWriter
from anygauge.util.processes import die_with_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch; returns the exit status.

    Events: ``message`` (`text`), ``fetching`` (`name`, `done` and `total` bytes, about once a
    second), ``fetched`` (`left`: bytes of weights that were not wanted), and ``refused``
    (`message`, `unreachable`).
    """
    tied = die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m anygauge.models.fetch", description=__doc__)
    parser.add_argument("name", nargs="?", help="of the hub, such as owner/name")
    parser.add_argument("--revision", help="branch, tag or commit")
    parser.add_argument("--wanted", help="what to fetch, as JSON")
    parser.add_argument("--run", help="a resolved run, whose model is fetched")
    parser.add_argument("--events", action="store_true", help="write events, one JSON a line")
    arguments = parser.parse_args(argv)
    if tied:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not stand among the events
    events = EventWriter(answers if arguments.events else None)

    def log(text: str) -> None:
        events.message(text)
        if not arguments.events:
            print(text, file=sys.stderr)

    try:
        for want in _asked(arguments):

            def show(done: int, total: int, name: str = want.name) -> None:
                events.send("fetching", name=name, done=done, total=total)

            found = fetch(want, show, log)
            if found.new:
                log(f"fetched {want.name}: {readable_size(found.new)} in {found.folder}")
            events.send("fetched", left=found.left)
    except AnygaugeError as error:
        unreachable = isinstance(error, HubUnreachableError)
        events.send("refused", message=str(error), unreachable=unreachable)
        if not arguments.events:
            print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except Exception as error:
        traceback.print_exc()
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        events.send("refused", message=f"fetching the model failed: {type(error).__name__}: {said}")
        return 1
    return 0


def _asked(arguments: argparse.Namespace) -> list[Wanted]:
    if arguments.wanted is not None:
        return [Wanted(**fields) for fields in json.loads(arguments.wanted)]
    if arguments.run is not None:
        return wanted(read_run(Path(arguments.run)).model)
    return wanted(ModelSection(name=arguments.name, revision=arguments.revision))


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a download that still runs has no use any more
