"""The batch file of a rendered plan: all that ``sbatch FILE`` needs to submit a job by hand.

Its ``#SBATCH`` lines are what the launcher gives to sbatch as arguments. Slurm reads words in them
as a shell does, quotes included, up to the first line that is not a comment.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from anygauge.interface import Job, RunFileError

NAME = "job.sbatch"


def batch_text(
    plan: Path, job: Job, options: Sequence[Sequence[str]], arguments: Sequence[str], body: str
) -> str:
    """The file's text.

    Args:
        plan: absolute folder with the job file and the resolved run in it.
        options: of sbatch; those of one item stand in one line.
        arguments: of `body`.
        body: what runs on the first node.

    Raises:
        RunFileError: an option has a line break in it.
    """
    lines = []
    for words in options:
        broken = next((word for word in words if not word.isprintable()), None)
        if broken is not None:
            raise RunFileError(
                f"launch.options: {broken!r} cannot stand in a batch file: it has a line break or "
                "another control character in it. Remove that"
            )
        lines.append(f"#SBATCH {shlex.join(words)}\n")
    return (
        "#!/bin/sh\n" + "".join(lines) + f"# Submit it with: sbatch {_comment(plan / NAME)}\n"
        f"plan={shlex.quote(str(plan))}\n"
        f"run={shlex.quote(job.run_directory)}\n"
        f"start={shlex.quote(str(Path(job.run_file).parent))}\n"
        'exec >>"$plan/slurm.log" 2>&1\n'
        + ("" if job.takes_over else _UNUSED)
        + _COPY
        + f"set -- {shlex.join(arguments)}\n"
        + body
    )


# A job that Slurm puts back into the queue finds its own run there.
_UNUSED = """\
if [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] && [ -e "$run/run.yaml" ]; then
    echo "error: $run holds a run already. Render the plan again: with --set name=NAME for another"
    echo "folder, or with --resume auto to resume that run from its newest checkpoint"
    exit 2
fi
"""
# What a run that is resumed has waits for its ranks to accept the new one.
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
    return shlex.quote(str(path)) if str(path).isprintable() else NAME
