"""Slurm: one agent on each node of an allocation, a new one (sbatch) or the one we are in (salloc).

The batch script is the same for every job: it finds the first node and hands its arguments to srun
as they are. What belongs to a job is in sbatch's arguments and in the job file, never in a script.
A rendered plan also has a batch file, with which ``sbatch FILE`` submits the job by hand.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from anygauge.interface import (
    LOST,
    STOPPED,
    BatchFile,
    Job,
    LauncherOptions,
    LaunchProfile,
    Plan,
    PlannedFile,
    PlannedProcess,
    RunFileError,
    UnsupportedError,
    variables_file,
)
from anygauge_launchers.remote_job import RemoteJob, job_file
from anygauge_launchers.slurm_job import SlurmJob

BATCH_FILE = "job.sbatch"

BODY = f"""\
# One agent on each node. Arguments: a log, or empty for none of its own; a file, or empty;
# a number; the rest is srun's. While the file does not exist, a job goes back into the queue:
# one that ended to be continued (exit status {STOPPED}), and, so many times, one that lost a node
# ({LOST}, or 137 where an agent was killed).
log=$1
again=$2
restarts=$3
shift 3
[ -z "$log" ] || exec >>"$log" 2>&1
ANYGAUGE_COORDINATOR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export ANYGAUGE_COORDINATOR
srun "$@"
status=$?
if [ -n "$again" ] && [ ! -e "$again" ]; then
    case $status in
        {STOPPED}) scontrol requeue "$SLURM_JOB_ID" ;;
        {LOST}|137)
            if [ "${{SLURM_RESTART_COUNT:-0}}" -lt "$restarts" ]; then
                scontrol requeue "$SLURM_JOB_ID"
            fi ;;
    esac
fi
exit "$status"
"""
SCRIPT = f"#!/bin/sh\n{BODY}"


class SlurmOptions(LauncherOptions):
    """Options of the slurm launcher; most are sbatch's own, under its names.

    Attributes:
        allocation: ``new`` submits a job, ``current`` uses the one that this shell is in; ``auto``:
            the current one if there is one.
        partition, account, qos, time, constraint, reservation, gres, gpus_per_node, mem: sbatch's.
        cpus_per_task: cores for all ranks of a node; without it, whole nodes are taken.
        requeue: resume from the newest checkpoint in a new job when the time is up, when the job
            is preempted, and when a node fails.
        warn_s: seconds before the time limit at which ranks are asked to write a checkpoint.
        extra: further arguments for sbatch, each as one text.
        python: the interpreter on the nodes; this one's path by default.
    """

    allocation: Literal["auto", "new", "current"] = "auto"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    gres: str | None = None
    gpus_per_node: str | int | None = None
    cpus_per_task: Annotated[int, Field(ge=1)] | None = None
    mem: str | None = None
    requeue: bool = False
    warn_s: Annotated[int, Field(ge=0, le=65535)] = 120
    extra: list[str] = Field(default_factory=list)
    python: str = sys.executable


_SBATCH = ("partition", "account", "qos", "time", "constraint", "reservation", "gres", "mem")


class Slurm:
    """Starts an agent on each node by srun."""

    def render(self, job: Job, options: SlurmOptions, profile: LaunchProfile) -> Plan:
        """The job file, the script, and the command that takes it."""
        folder = Path(job.run_directory)
        script = str(folder / "slurm.sh")
        inside = options.allocation == "current" or (
            options.allocation == "auto" and "SLURM_JOB_ID" in os.environ
        )
        agent = self._agent(options, job)
        step = self._step(options, job)
        start = (options.python, "-m", "anygauge.launch.agent")
        variables = variables_file(folder)
        files = (job_file(job), PlannedFile(path=script, text=SCRIPT, mode=0o755))
        batch: BatchFile | None = None
        if inside:
            argv = ("sh", script, "", "", "0", *step, "--input=all", *start, "--stdin")
            where = "this allocation"
            process = PlannedProcess(node_rank=0, host=where, argv=argv, arguments=agent)
        else:
            # The script, its log, variables and what agents report are of the submission: a job
            # that is queued again finds them where they were. The job file waits for its ranks.
            before = (
                str(folder / "logs" / "slurm.log"),
                str(folder / "cancelled") if options.requeue else "",
                str(max(1, job.launch.max_restarts)),
            )
            after = (
                *("--attempt", "$SLURM_RESTART_COUNT"),
                *("--events", str(folder / "events.jsonl")),
            )
            argv = (
                *("sbatch", "--parsable", "--export=NIL"),
                *(*self._sbatch(options, job), *options.extra),
                *(script, *before, *step, *start, *agent, *after),
                *("--variables", variables.path),
            )
            process = PlannedProcess(node_rank=0, argv=argv)
            # By hand, variables of the shell come along by name: Slurm takes their values.
            exported = ",".join(job.launch.pass_environment) or "NIL"
            lines: list[Sequence[str]] = [
                (f"--export={exported}",),
                *((one,) for one in self._sbatch(options, job)),
            ]
            if options.extra:
                lines.append(options.extra)
            its = job.as_attempt() if job.takes_over else job
            step = self._step(options, job, tuple(job.launch.pass_environment))
            arguments = (*before, *step, *start, *self._agent(options, its), *after)
            batch = BatchFile(
                name=BATCH_FILE,
                text=lambda plan: _batch_text(plan, its, lines, arguments),
                files=(PlannedFile(path=str(folder / "job.json"), text=its.dump(), mode=0o600),),
                command=("sbatch",),
            )
        operations = {
            "submit": process.argv,
            "status": ("scontrol", "show", "job", "{id}"),
            "logs": ("tail", "-F", str(folder / "logs" / "rank0.log")),
            "cancel": ("scancel", "{id}"),
        }
        return Plan(
            files=files if inside else (*files, variables),
            processes=(process,),
            pass_environment=tuple(job.launch.pass_environment),
            operations={} if inside else operations,
            batch=batch,
        )

    def submit(self, plan: Plan) -> RemoteJob | SlurmJob:
        """Write the files, and submit the job or start the step."""
        if plan.processes[0].argv[0] == "sbatch":
            return SlurmJob.start(plan)
        return RemoteJob.start(plan)

    def attach(self, record: Mapping[str, Any], run_directory: Path) -> SlurmJob:
        """A job that was submitted before."""
        try:
            return SlurmJob(str(record["job"]), run_directory, int(record["offset"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UnsupportedError(
                f"{run_directory}: {dict(record)} is not a record of a job"
            ) from error

    def _agent(self, own: SlurmOptions, job: Job) -> tuple[str, ...]:
        """Arguments of an agent."""
        return (
            *("--job", job_file(job).path, "--node-rank", "$SLURM_NODEID"),
            *("--coordinator", f"$ANYGAUGE_COORDINATOR:{job.launch.port}"),
            *("--grace", f"{own.grace_s:g}", "--tied"),
        )

    def _step(self, own: SlurmOptions, job: Job, passed: Sequence[str] = ()) -> tuple[str, ...]:
        """Of srun. `passed`: names of variables that it hands on from the batch file's."""
        return (
            *(f"--nodes={job.launch.nodes}", f"--ntasks={job.launch.nodes}", "--ntasks-per-node=1"),
            # Agents end each other, and agree on why before they do. One behind a cut cable ends by
            # itself, but srun does not notice.
            *("--kill-on-bad-exit=0", "--wait=15", "--cpu-bind=none"),
            f"--export={','.join(('ANYGAUGE_COORDINATOR', *passed))}",
            *(() if own.cpus_per_task is None else (f"--cpus-per-task={own.cpus_per_task}",)),
        )

    def _sbatch(self, own: SlurmOptions, job: Job) -> tuple[str, ...]:
        given = {name: getattr(own, name) for name in _SBATCH}
        return (
            f"--job-name={job.name}",
            # Slurm interprets % and \\ in the path of a log; the script writes a log of its own.
            *(f"--nodes={job.launch.nodes}", "--ntasks-per-node=1"),
            *("--chdir=/", "--output=/dev/null"),
            f"--signal=USR1@{own.warn_s}",
            "--requeue" if own.requeue else "--no-requeue",
            *(f"--{name}={value}" for name, value in given.items() if value is not None),
            *(() if own.gpus_per_node is None else (f"--gpus-per-node={own.gpus_per_node}",)),
            "--exclusive" if own.cpus_per_task is None else f"--cpus-per-task={own.cpus_per_task}",
        )


def _batch_text(
    plan: Path, job: Job, options: Sequence[Sequence[str]], arguments: Sequence[str]
) -> str:
    """The batch file of a rendered plan; what the launcher gives to sbatch is in its #SBATCH lines.

    Slurm splits such a line into words as a shell does, quotes included; it stops at the first line
    that is not a comment.

    Args:
        plan: absolute folder with the job file and the resolved run in it.
        options: of sbatch; those of one item are in one line.
        arguments: of `BODY`.

    Raises:
        RunFileError: an option has a line break in it.
    """
    lines = []
    for words in options:
        broken = next((word for word in words if not word.isprintable()), None)
        if broken is not None:
            raise RunFileError(
                f"launch.options: {broken!r} cannot be in a batch file: it has a line break or "
                "another control character in it. Remove that"
            )
        lines.append(f"#SBATCH {shlex.join(words)}\n")
    return (
        "#!/bin/sh\n" + "".join(lines) + f"# Submit it with: sbatch {_comment(plan / BATCH_FILE)}\n"
        f"plan={shlex.quote(str(plan))}\n"
        f"run={shlex.quote(job.run_directory)}\n"
        f"start={shlex.quote(str(Path(job.run_file).parent))}\n"
        'exec >>"$plan/slurm.log" 2>&1\n'
        + ("" if job.takes_over else _UNUSED)
        + _COPY
        + f"set -- {shlex.join(arguments)}\n"
        + BODY
    )


# A job that Slurm has put back into the queue finds its own run there.
_UNUSED = """\
if [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] && [ -e "$run/run.yaml" ]; then
    echo "error: $run holds a run already. Render the plan again: with --set name=NAME for another"
    echo "folder, or with --resume auto to resume that run from its newest checkpoint"
    exit 2
fi
"""
# Where a run is resumed, the new files wait until its ranks have accepted them.
_COPY = """\
mkdir -p "$run/logs" || exit 1
if [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || [ -d "$start" ]; then
    mkdir -p "$start" || exit 1
    cp -p "$plan/job.json" "$start/job.json" || exit 1
    cp -p "$plan/run.json" "$start/run.json" || exit 1
    cp -p "$plan/run.yaml" "$start/run.yaml" || exit 1
fi
"""


def _comment(path: Path) -> str:
    return shlex.quote(str(path)) if str(path).isprintable() else BATCH_FILE
