"""A fork server of fake ranks. The run in its order is a list of what its imports do."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from anygauge.training import fork_server
from anygauge.util.processes import die_with_parent
from tests.agent.fake_rank import main as be_rank


def preload(text: str, backend: str, options: Mapping[str, Any]) -> None:
    for action, argument in json.loads(text):
        if action == "print":
            print(argument)
        elif action == "set":
            os.environ.update(argument)
        elif action == "unset":
            del os.environ[argument]
        elif action == "thread":
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        elif action == "open":
            os.open(argument, os.O_RDWR | os.O_NOCTTY)
        elif action == "raise":
            raise ImportError(argument)
        elif action == "sleep":
            time.sleep(argument)
        elif action == "exit":
            os._exit(argument)
        else:
            raise ValueError(action)


if __name__ == "__main__":
    die_with_parent()
    fork_server.PLAIN = ()
    fork_server.preload = preload
    fork_server.serve(int(sys.argv[-1]), be_rank)
