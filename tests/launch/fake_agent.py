"""The agent with fake ranks: `fake_agent.py SCRIPT`, then the agent's own arguments."""

from __future__ import annotations

import sys
from pathlib import Path

from anygauge.launch import agent

FAKE_RANK = str(Path(__file__).with_name("fake_rank.py"))

if __name__ == "__main__":
    command = (sys.executable, FAKE_RANK, sys.argv[1])
    sys.exit(agent.main(sys.argv[2:], argv_of_rank=lambda *_: command))
