"""``python -m anygauge.launch.rank``: what every rank runs, whoever started it.

A supervisor of ours gives a rank its variables (``--job``). A rank that torchrun, srun or mpirun
started has worked them out in `anygauge.launch.join`, which puts this program in its place
(``--foreign``). In both, all variables are there before torch is imported.
"""

from __future__ import annotations

import argparse
import os
import signal
from dataclasses import replace

from anygauge.util.processes import die_with_parent, end_rank


def main() -> int:
    """Be the rank; returns the exit status."""
    die_with_parent()  # before what takes longer to import
    parser = argparse.ArgumentParser(prog="python -m anygauge.launch.rank", description=__doc__)
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--job", help="the job file")
    start.add_argument("--foreign", type=int, help="descriptor with what the process knows")
    parser.add_argument("--rendezvous", help="where ranks meet; by default as the job says")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint")
    parser.add_argument("--decided", help="what the first machine has decided, as JSON")
    parser.add_argument("--lock", help="of the run directory: DEVICE:INODE, held by who started it")
    arguments = parser.parse_args()
    if arguments.foreign is not None:
        from anygauge.launch import foreign_rank

        return foreign_rank.main(arguments.foreign)
    # Schedulers send these to every process of a job. What they mean, the supervisor tells.
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    from anygauge.interface import Job
    from anygauge.training.worker import run_reported
    from anygauge.util.events import EventWriter

    job = Job.load(arguments.job)
    job = replace(
        job,
        rendezvous=arguments.rendezvous or job.rendezvous,
        resume=arguments.resume or job.resume,
    )
    if arguments.decided is not None:
        from anygauge.launch.decision import Decision

        job = Decision.load(arguments.decided).applied_to(job)
    index = int(os.environ["RANK"])
    return run_reported(job, index, EventWriter.of_rank(index), arguments.lock)


if __name__ == "__main__":
    end_rank(main())
