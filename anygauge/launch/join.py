"""``anygauge train`` as a rank of somebody else's launch: torchrun, srun, mpirun and their like.

Nothing is started. This process decides its environment by the rules that a supervisor has, and
becomes the rank: it puts a fresh interpreter in its own place (`anygauge.launch.rank`), so that
every variable is there before anything is imported. Rank 0 chooses and claims the run directory
first.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from anygauge.interface import AnygaugeError
from anygauge.launch.foreign import ForeignLaunch, without_launcher

if TYPE_CHECKING:
    from anygauge.launch.rank_environment import NodeEnvironment
    from anygauge.launch.request import RunRequest

_FOR_AGENTS = ("lost_after_s", "options", "pass_environment", "port")
"""Fields of ``launch`` that only launchers and agents of ours read."""


def join(request: RunRequest, foreign: ForeignLaunch, *, quiet: bool) -> NoReturn:
    """Become the rank: another interpreter takes over.

    Raises:
        AnygaugeError: what any rank would refuse.
    """
    from anygauge.launch.hello import Hello
    from anygauge.launch.rank_environment import NodeEnvironment
    from anygauge.launch.rank_start import rank_numbers
    from anygauge.training.checks import check_settings

    job = request.job
    check_settings(request.run, request.backend, request.registry, ranks_run_here=True)
    chosen = (request.registry, request.backend)
    own = NodeEnvironment(job, foreign.node_rank, without_launcher(os.environ), chosen)
    hello = Hello(
        node_rank=foreign.node_rank,
        nodes=foreign.nodes,
        devices_per_node=foreign.devices,
        fabric=own.fabric.name,
        settings=own.digests(),
    )
    known: dict[str, Any] = {"hello": asdict(hello), "folder": job.run_directory}
    with contextlib.ExitStack() as held:
        if foreign.rank == 0:
            for note in _notes(request, foreign, own):
                typer.echo(f"note: {note}", err=True)
            known |= _decide_for_all(request, foreign, held)
            if "job" in known and not quiet:
                typer.echo(f"run: {job.run_directory}")
        cores = own.cores.get(foreign.local_rank, ())
        if cores and len(os.sched_getaffinity(0)) == os.cpu_count():  # its launcher has bound none
            os.sched_setaffinity(0, cores)
        given = {
            "launch": asdict(foreign),
            "known": known,
            "provenance": own.record() if foreign.local_rank == 0 else None,
            "patience_s": job.launch.join_timeout_s,
            "quiet": quiet,
        }
        numbers = rank_numbers(job, foreign.node_rank, foreign.local_rank)
        _exec_rank(given, {**own.of_rank(foreign.local_rank), **numbers})


def _decide_for_all(
    request: RunRequest, foreign: ForeignLaunch, held: contextlib.ExitStack
) -> dict[str, Any]:
    """Let rank 0 decide for all: the job, that it is done already, or why there is none."""
    from anygauge.launch.run_directory import clear_for_start, lock_folder, write_run
    from anygauge.launch.submit import refuse_second, resume_target
    from anygauge.util.files import write_text
    from anygauge.util.rendezvous import served_address
    from anygauge.util.run_lock import identity_of

    job = replace(request.job, rendezvous=served_address(foreign.host, foreign.port))
    folder = Path(job.run_directory)
    try:
        resuming, finished = resume_target(request)
        if finished is not None:
            return {"id": job.id, "done": finished.describe()}
        if resuming:
            job = job.as_attempt()
        refuse_second(folder)
        # The interpreter that takes over keeps the claim, to the end of the rank.
        lock = held.enter_context(lock_folder(folder))
        os.set_inheritable(lock, True)
        clear_for_start(folder, job if resuming else None)
        write_run(Path(job.run_file), request.run.model_copy(update={"backend": job.backend}))
        path = Path(job.run_file).with_name("job.json")
        write_text(path, job.dump(), 0o600)
        return {"id": job.id, "job": str(path), "lock": identity_of(lock)}
    except (AnygaugeError, OSError) as error:
        status = error.exit_status if isinstance(error, AnygaugeError) else 1
        return {"id": job.id, "refused": [status, str(error)]}


def _notes(request: RunRequest, foreign: ForeignLaunch, own: NodeEnvironment) -> list[str]:
    notes = [f"started by {foreign.launcher}, which also ends the ranks and can restart them"]
    unused = request.run.launch.model_fields_set.intersection(_FOR_AGENTS)
    if unused:
        notes.append(f"not used here: {', '.join(f'launch.{name}' for name in sorted(unused))}")
    for one in own.overruled_settings(foreign.local_rank):
        origin, value = one.overruled[0]
        if not one.secret and not one.private:
            notes.append(
                f"{one.name}={one.value}, set by you or by {foreign.launcher}, stays; the {origin} "
                f"would set {value}"
            )
        else:
            notes.append(f"{one.name} was set where the ranks were started, and stays")
    return notes


def _exec_rank(given: Mapping[str, Any], environment: Mapping[str, str]) -> NoReturn:
    """Put a fresh interpreter in this process's place.

    Args:
        given: for `anygauge.launch.foreign_rank.take_part`.
    """
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(given).encode())
        file.seek(0)
        os.set_inheritable(file.fileno(), True)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        rank = ("-m", "anygauge.launch.rank", "--foreign", str(file.fileno()))
        os.execve(sys.executable, (sys.executable, "-u", *rank), dict(environment))
