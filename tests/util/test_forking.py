"""What an agent and its fork server say to each other, and what an early agent is told."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from anygauge.util import waiting
from anygauge.util.forking import receive, send
from anygauge.util.waiting import AGENT, WaitingAgent


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("size", [0, 10, 2**20])
def test_a_message_comes_with_its_descriptors(pair, size: int, tmp_path: Path) -> None:
    ours, theirs = pair
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER, str(ours.fileno()), str(size)], pass_fds=(ours.fileno(),)
    )
    message, (descriptor,) = receive(theirs) or ({}, [-1])
    assert sender.wait() == 0
    assert message == {"text": "x" * size}
    assert os.read(descriptor, 100).endswith(b"import sys\n")
    os.close(descriptor)


SENDER = """
import socket, sys, tempfile
from anygauge.util.forking import send
with tempfile.TemporaryFile() as file:
    file.write(b"import sys\\n")
    file.seek(0)
    send(socket.socket(fileno=int(sys.argv[1])), {"text": "x" * int(sys.argv[2])}, [file.fileno()])
"""


def test_the_other_side_may_leave_as_soon_as_it_has_a_message(
    pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pair
    usual = socket.send_fds

    def sent_and_read(*arguments):
        size = usual(*arguments)
        theirs.close()
        return size

    monkeypatch.setattr(socket, "send_fds", sent_and_read)
    send(ours, {"job": 1}, [0])


def test_the_other_side_has_gone(pair) -> None:
    ours, theirs = pair
    theirs.close()
    assert receive(ours) is None
    with pytest.raises(OSError):
        send(ours, {"job": 1}, [0])


def test_an_agent_that_may_have_got_its_job_does_not_live_beside_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    agent = WaitingAgent()

    def broken(*arguments):
        raise BrokenPipeError

    monkeypatch.setattr(waiting, "send", broken)
    with (tmp_path / "log").open("wb") as log:
        assert not agent.run([*AGENT, "--job", "x"], {}, log.fileno())
    assert agent.process.returncode is not None
    assert "has ended; another one starts" in (tmp_path / "log").read_text()
    agent.end()
