"""``anygauge train`` as a rank of somebody else's launch: torchrun, srun, mpirun and their like.

Nothing is started. This process decides its environment by the rules that a supervisor has, and
becomes the rank: it puts a fresh interpreter in its own place (`anygauge.launch.rank`), so that
every variable is there before anything is imported. Rank 0 chooses and claims the run directory
first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from anygauge.interface import AnygaugeError
from anygauge.launch.foreign import ForeignLaunch, scrub

if TYPE_CHECKING:
    from anygauge.launch.environment import NodeEnvironment
    from anygauge.launch.request import RunRequest

_FOR_AGENTS = ("pass_environment", "options", "port", "lost_after_s")
"""Fields of ``launch`` that only launchers and agents of ours read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """What a rank passes to its fresh interpreter; plain values.

    Attributes:
        launch: which rank it is.
        answer: of rank 0, for all: which run this is, or why there is none.
        hello: what must be the same on all machines.
        provenance: of this machine's environment, from the first rank on it.
        run_directory: where the run would be, as this rank read its arguments.
    """

    launch: ForeignLaunch
    answer: Mapping[str, Any] | None
    hello: Mapping[str, Any]
    provenance: Mapping[str, Any] | None
    run_directory: str
    join_timeout_s: float
    quiet: bool

    @classmethod
    def read(cls, text: str) -> Handover:
        """The handover that was written as JSON of its fields."""
        fields = json.loads(text)
        return cls(**{**fields, "launch": ForeignLaunch(**fields["launch"])})


def join(request: RunRequest, foreign: ForeignLaunch, *, quiet: bool) -> NoReturn:
    """Become the rank: another interpreter takes over.

    Raises:
        AnygaugeError: what any rank would refuse.
    """
    from anygauge.launch.environment import NodeEnvironment
    from anygauge.launch.hello import Hello
    from anygauge.launch.rank_process import rank_numbers
    from anygauge.training.checks import check_settings

    run, job = request.run, request.job
    chosen = (request.registry, request.backend)
    check_settings(run, request.backend, request.registry, ranks_run_here=True)
    own = NodeEnvironment(job, foreign.node_rank, scrub(os.environ), chosen)
    leads = foreign.rank == 0
    if leads:
        for note in _notes(request, foreign, own):
            typer.echo(f"note: {note}", err=True)
    hello = asdict(
        Hello(
            node_rank=foreign.node_rank,
            nodes=foreign.nodes,
            devices_per_node=foreign.devices,
            fabric=own.fabric.name,
            settings=own.digests(),
        )
    )
    with contextlib.ExitStack() as held:
        answer = _answer(request, foreign, held, quiet) if leads else None
        handover = Handover(
            launch=foreign,
            answer=answer and {**answer, "hello": hello},
            hello=hello,
            provenance=own.record() if foreign.local_rank == 0 else None,
            run_directory=job.run_directory,
            join_timeout_s=job.launch.join_timeout_s,
            quiet=quiet,
        )
        environment = {
            **own.of_rank(foreign.local_rank),
            **rank_numbers(job, foreign.node_rank, foreign.local_rank),
        }
        _bind(own.cores.get(foreign.local_rank, ()))
        _become(handover, environment)


def _answer(
    request: RunRequest, foreign: ForeignLaunch, held: contextlib.ExitStack, quiet: bool
) -> dict[str, Any]:
    """What rank 0 tells all: the job, that it is done already, or why there is none."""
    from anygauge.launch.run_directory import claim, clear_for_start, write_run
    from anygauge.launch.submit import refuse_second, resume_target
    from anygauge.util.files import write_text
    from anygauge.util.rendezvous import served_address
    from anygauge.util.run_lock import identity_of

    job = replace(request.job, rendezvous=served_address(foreign.host, foreign.port))
    folder = Path(job.run_directory)
    try:
        staged, finished = resume_target(request)
        if finished is not None:
            return {"id": job.id, "done": finished.describe()}
        if staged:
            job = job.as_attempt()
        refuse_second(folder)
        # The interpreter that takes over keeps the claim, to the end of the rank.
        lock = held.enter_context(claim(folder))
        os.set_inheritable(lock, True)
        clear_for_start(folder, job if staged else None)
        write_run(Path(job.run_file), request.run.model_copy(update={"backend": job.backend}))
        path, text = Path(job.run_file).with_name("job.json"), job.dump()
        write_text(path, text, 0o600)
    except (AnygaugeError, OSError) as error:
        status = error.exit_status if isinstance(error, AnygaugeError) else 1
        return {"id": job.id, "refused": str(error), "exit_status": status}
    if not quiet:
        typer.echo(f"run: {folder}")
    found = {"id": job.id, "job": str(path), "digest": digest(text)}
    return {**found, "lock": identity_of(lock)}


def digest(text: str) -> str:
    """By which the others know that they read the same job file."""
    return hashlib.sha256(text.encode()).hexdigest()


def _notes(request: RunRequest, foreign: ForeignLaunch, own: NodeEnvironment) -> list[str]:
    notes = [f"started by {foreign.launcher}, which also ends the ranks and can restart them"]
    launch = request.run.launch
    unused = [
        name
        for name in _FOR_AGENTS
        if getattr(launch, name)
        != type(launch).model_fields[name].get_default(call_default_factory=True)
    ]
    if unused:
        notes.append(f"not used here: {', '.join(f'launch.{name}' for name in unused)}")
    for one in own.overruled(foreign.local_rank):
        origin, value = one.overruled[0]
        if not one.secret and not one.private:
            notes.append(
                f"{one.name}={one.value}, set by you or by {foreign.launcher}, stays; the {origin} "
                f"would set {value}"
            )
        else:
            notes.append(f"{one.name} was set where the ranks were started, and stays")
    return notes


def _bind(cores: tuple[int, ...]) -> None:
    """Bind this process, unless its launcher has done so."""
    if cores and len(os.sched_getaffinity(0)) == os.cpu_count():
        os.sched_setaffinity(0, cores)


def _become(handover: Handover, environment: Mapping[str, str]) -> NoReturn:
    """Put a fresh interpreter in this process's place."""
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(asdict(handover)).encode())
        file.seek(0)
        os.set_inheritable(file.fileno(), True)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execve(
            sys.executable,
            [sys.executable, "-u", "-m", "anygauge.launch.rank", "--handover", str(file.fileno())],
            dict(environment),
        )
