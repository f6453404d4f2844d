"""Checks whether ranks may be forks of a process that has imported torch, where a backend says so.

Nothing of this happens in the process of the part `basic`, which imports no torch: a fork of it
becomes the process that ranks are forked from, and a fork of that the rank.
"""

from __future__ import annotations

import os
import select
import signal
import traceback
from collections.abc import Callable

from anygauge.testing.basic import Paper
from anygauge.testing.check import NotAsked, check

_IMPORTS_S, _RANK_S = 60.0, 20.0
_MOST = 4000


@check(
    "a process that has imported torch and made the backend can become ranks",
    part="basic",
    limit_s=_IMPORTS_S + 10,
    means="Ranks hang or crash in their first operation; what the backend imports starts a thread "
    "or opens the device before `open` does, and `LaunchProfile.forked_ranks` is set.",
)
def forks_become_ranks(paper: Paper) -> None:
    if not paper.backend().launch.forked_ranks:
        raise NotAsked("LaunchProfile.forked_ranks is not set: each rank is a process of its own")
    problem = _said_by_a_fork(lambda: _server(paper), _IMPORTS_S)
    assert not problem, problem


def _server(paper: Paper) -> str:
    """What keeps this process from becoming ranks."""
    import torch  # noqa: F401 - as a fork server does

    from anygauge.training.fork_server import why_not_forked

    paper.backend()
    if why_not := why_not_forked():
        return why_not
    for rank in range(2):  # a second time, since the first must leave nothing
        if problem := _said_by_a_fork(lambda: _rank(paper), _RANK_S):
            return f"rank {rank}, a fork: {problem}"
    return ""


def _rank(paper: Paper) -> str:
    import torch

    backend = paper.backend()
    device = backend.open(0)
    weight = torch.full((8, 8), 2.0, device=device, requires_grad=True)
    (weight @ weight).sum().backward()
    assert weight.grad is not None
    found = weight.grad.cpu()
    backend.close()
    return "" if bool((found == 32.0).all()) else f"a gradient is {found[0, 0]}, not 32"


def _said_by_a_fork(function: Callable[[], str], limit_s: float) -> str:
    """The result of a function in a fork; what kept it from one, if there is none."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(reader)
            os.write(writer, function().encode()[:_MOST])
            status = 0
        except BaseException as error:
            traceback.print_exc()
            os.write(writer, f"{type(error).__name__}: {error}".encode()[:_MOST])
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as said:
        if not select.select([said], [], [], limit_s)[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"nothing came of it within {limit_s:g} s"
        text = said.read(_MOST).decode(errors="replace")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return text or (f"it ended with {code}" if code else "")
