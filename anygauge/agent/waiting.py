"""``python -m anygauge.agent.waiting DESCRIPTOR``: an agent that starts before its job is known.

The command line starts it first thing, so that what ranks need is imported while the run is read
and checked. It learns through the socket, in this order, what to import and which job to run; if
the socket is closed before, there is no job, and it ends. Its owner's side is
`anygauge.util.waiting`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from anygauge.agent.forks import ForkServer
from anygauge.util.forking import receive
from anygauge.util.processes import die_with_parent


def main() -> int:
    """Wait for a job and run it; returns the exit status."""
    die_with_parent(signal.SIGTERM)
    # Only it works until there is a job; what an agent imports, it imports then. The checks of the
    # run end long before the imports of its ranks, and both should have a processor to themselves.
    forks = ForkServer()
    channel = socket.socket(fileno=int(sys.argv[1]))
    while (received := receive(channel)) is not None:
        message, descriptors = received
        if "prepare" in message:
            order = message["prepare"]
            forks.prepare(order)
            if forks.serves(order):  # a variable that was read already: the loader's, Python's
                forks.close()
                forks = ForkServer(order["environment"], order)
            continue
        channel.close()
        log, *_held = descriptors  # the rest, such as a folder's lock, stays open until the end
        os.dup2(log, 2)
        os.close(log)
        os.environ.clear()
        os.environ.update(message["environment"])
        from anygauge.agent.__main__ import main as run_agent

        return run_agent(message["arguments"], forks=forks)
    forks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
