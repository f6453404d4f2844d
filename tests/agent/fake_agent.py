"""The agent with fake ranks: `fake_agent.py SCRIPT`, then the agent's own arguments.

With the variable `FORKED`, ranks are forks of a server, whose imports do what the variable says.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from anygauge.agent import __main__ as agent
from anygauge.agent.foreign import scrub
from anygauge.agent.forks import ForkServer, prepare_order

FAKE_RANK = str(Path(__file__).with_name("fake_rank.py"))
FORKED = "ANYGAUGE_TEST_FORKED"


def serving(*_: object) -> ForkServer:
    environment = scrub(os.environ)
    order = prepare_order(environment, os.environ[FORKED], "", {})
    return ForkServer(environment, order, module="tests.agent.fake_forked")


if __name__ == "__main__":
    rank_argv = (sys.executable, FAKE_RANK, sys.argv[1])
    if FORKED in os.environ:
        agent._Agent._serving = serving
        rank_argv = (sys.executable, "-m", "tests.agent.fake_rank", sys.argv[1])
    sys.exit(
        agent.main(
            sys.argv[2:],
            rank_argv=rank_argv,
            rank_environment=lambda local_rank: scrub(os.environ),
        )
    )
