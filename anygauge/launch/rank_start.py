"""How a supervisor starts a rank: its command, numbers, cores and pipe."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from anygauge.interface import Job
from anygauge.launch.decision import Decision
from anygauge.util.events import EVENTS_FD
from anygauge.util.processes import parent_environment


def rank_numbers(job: Job, node_rank: int, local_rank: int) -> dict[str, str]:
    """Variables that tell a process which rank of the job it is, named as torchrun names them."""
    count = job.launch.devices
    return {
        "RANK": str(node_rank * count + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(count),
    }


RankArgv = Callable[[str, bool], Sequence[str]]
"""Where ranks meet, and whether they resume from the newest checkpoint -> the command of a rank."""


def rank_argv(
    job_file: str, lock: str, decided: Decision | None, rendezvous: str, resume: bool
) -> tuple[str, ...]:
    """The command of a rank.

    Args:
        lock: of the run directory (`identity_of`).
        decided: None: what the job file says.
    """
    return (
        *(sys.executable, "-m", "anygauge.launch.rank", "--job", job_file),
        *("--lock", lock, "--rendezvous", rendezvous, *(("--resume",) if resume else ())),
        *(() if decided is None else ("--decided", decided.dump())),
    )


def start_rank(
    argv: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes],
    cores: tuple[int, ...],
    held: Sequence[int],
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a rank, as the leader of a session.

    Args:
        log: takes what it prints.
        cores, held: see `RankProcess`.

    Returns:
        Its process, and the end of a pipe from which its events can be read without waiting.

    Raises:
        OSError: it cannot be started.
    """
    reader, writer = os.pipe()
    own = {
        **parent_environment(),
        EVENTS_FD: str(writer),
        "PYTHONUNBUFFERED": "1",  # so that a log is complete when its rank is killed
    }
    try:
        os.set_blocking(reader, False)
        with bound_to(cores):
            process = subprocess.Popen(
                list(argv),
                env={**environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writer, *held),
                start_new_session=True,
            )
    except BaseException:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    return process, reader


@contextlib.contextmanager
def bound_to(cores: tuple[int, ...]) -> Iterator[None]:
    """Bind processes that are started meanwhile to these cores; an empty tuple binds nothing."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
