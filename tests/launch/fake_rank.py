"""A rank without torch: does what a script tells its rank, one action after the other.

The script is JSON: rank -> list of [action, argument].
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from anygauge.interface import STOPPED
from anygauge.util.events import EventWriter
from anygauge.util.processes import die_with_parent


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def main() -> None:
    die_with_parent()
    rank = int(os.environ["RANK"])
    script = Path(sys.argv[1])
    here = script.parent
    writer = EventWriter.of_rank(rank)
    (here / f"pid{rank}").write_text(str(os.getpid()))
    for action, argument in json.loads(script.read_text()).get(str(rank), []):
        if action == "send":
            writer.send(**argument)
        elif action == "raw":
            os.write(int(os.environ["ANYGAUGE_EVENTS_FD"]), argument.encode())
        elif action == "print":
            print(argument)
        elif action == "exit":
            os._exit(argument)
        elif action == "once":
            if not (here / argument).exists():
                (here / argument).touch()
                os._exit(7)
        elif action == "ignore":
            signal.signal(argument, signal.SIG_IGN)
        elif action == "on_term_stop":

            def stop(*_: object, event: dict[str, object] = argument) -> None:
                writer.send("stopped", **event)
                os._exit(STOPPED)

            signal.signal(signal.SIGTERM, stop)
        elif action == "helper":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            (here / argument).write_text(str(child.pid))
        elif action == "environment":
            (here / argument).write_text(json.dumps(dict(os.environ)))
        elif action == "touch":
            (here / argument).touch()
        elif action == "wait":
            wait_for(here / argument)
        elif action == "sleep":
            time.sleep(argument)
        elif action == "close_events":
            os.close(int(os.environ["ANYGAUGE_EVENTS_FD"]))
        else:
            raise ValueError(action)


if __name__ == "__main__":
    main()
