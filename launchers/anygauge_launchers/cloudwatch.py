"""``python -m anygauge_launchers.cloudwatch aws logs filter-log-events ...``: follows a log.

The aws client of version 2 can follow a log itself, that of version 1 cannot; this asks either
again and again. It prints each message once and ends with its parent.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

from anygauge.util.processes import tie_to_parent

ASK_S = 5.0
_OVERLAP_MS = 60_000
"""Events may arrive out of order."""


def main(argv: list[str]) -> int:
    """Follow until ended, or until the client fails for good."""
    tie_to_parent(signal.SIGTERM)
    known: set[str] = set()
    since = 0
    while True:
        done = subprocess.run(
            [*argv, "--start-time", str(max(0, since - _OVERLAP_MS))],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode and "ResourceNotFound" not in done.stderr:
            print(done.stderr.strip(), file=sys.stderr, flush=True)
            return done.returncode
        for event in json.loads(done.stdout)["events"] if done.returncode == 0 else ():
            if event["eventId"] not in known:
                known.add(event["eventId"])
                since = max(since, int(event["timestamp"]))
                print(event["message"].rstrip("\n"), flush=True)
        time.sleep(ASK_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
