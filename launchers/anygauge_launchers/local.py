"""The local launcher: one agent on this machine, which ends with the process that started it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from anygauge.interface import (
    AnygaugeError,
    Job,
    LauncherOptions,
    Plan,
    PlannedProcess,
    RunFileError,
)
from anygauge.util.events import read_event
from anygauge.util.files import write_text
from anygauge.util.processes import parent_environment
from anygauge.util.run_lock import identity_of
from anygauge.util.start import settled
from anygauge_launchers.remote import ForegroundLauncher, job_file


class Local(ForegroundLauncher):
    """Starts the agent of this machine; it ends when the starting process ends."""

    def render(self, job: Job, options: LauncherOptions) -> Plan:
        """One job file and one agent.

        Raises:
            RunFileError: the job asks for more than one machine.
        """
        if job.launch.nodes != 1:
            raise RunFileError(
                f"launch.launcher: 'local' starts ranks on this machine only, and launch.nodes is "
                f"{job.launch.nodes}. Set launch.nodes to 1, or name a launcher for several "
                "machines, such as ssh."
            )
        file = job_file(job)
        argv = (
            *(sys.executable, "-m", "anygauge.launch.agent", "--job", file.path),
            *("--node-rank", "0", "--grace", f"{options.grace_s:g}"),
        )
        return Plan(files=(file,), processes=(PlannedProcess(node_rank=0, argv=argv),))

    def submit(self, plan: Plan) -> LocalJob:
        """Write the files and start the agent.

        Call it from the main thread: on Linux the agent ends with the thread that started it.

        Raises:
            AnygaugeError: a file cannot be written, or the agent cannot be started.
        """
        (process,) = plan.processes
        # Its files are those of this machine, so the agent can tell the lock by device and inode.
        own = ("--lock", identity_of(plan.held[0])) if plan.held else ()
        argv = (*process.argv, *own)
        log = Path(plan.files[0].path).parent / "logs" / "agent0.log"
        try:
            for file in plan.files:
                write_text(file.path, file.text, file.mode)
            log.parent.mkdir(parents=True, exist_ok=True)
            environment = {**os.environ, **process.environment, **parent_environment()}
            with log.open("ab") as stderr:
                agent = subprocess.Popen(
                    argv,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    # The folder's lock: nobody else enters while ranks still save, even if the
                    # command line is killed. The agent keeps it from its ranks.
                    pass_fds=plan.held,
                    # Ctrl-C reaches the command line alone, which then ends the job in order.
                    start_new_session=True,
                )
        except OSError as error:
            raise AnygaugeError(
                f"cannot start the run in {log.parent.parent}: {error}. Check that the folder can "
                "be written and that the disk is not full."
            ) from error
        return LocalJob(agent, log)


class LocalJob:
    """A job whose agent is a child of this process."""

    record = None
    found: Literal["known"] = "known"

    def __init__(self, agent: subprocess.Popen[bytes], log: Path) -> None:
        self._agent = agent
        self._log = log
        self._cancellations = 0

    def events(self) -> Iterator[Mapping[str, Any]]:
        """What the agent reports, until it ends; lines that are not events go to its log."""
        assert self._agent.stdout is not None
        for line in self._agent.stdout:
            event = read_event(line)
            if event is None:
                with contextlib.suppress(OSError), settled(self._log).open("ab") as log:
                    log.write(line)
            else:
                yield event

    def status(self) -> str:
        """Whether its agent runs."""
        return "running" if self.alive else "ended"

    @property
    def alive(self) -> bool:
        """Whether its agent runs."""
        return self._agent.poll() is None

    def cancel(self) -> None:
        """End the ranks in order; the second call ends them at once, the third ends the agent."""
        self._cancellations += 1
        # The agent's death takes its ranks along: the last resort if it does not respond.
        self._agent.send_signal(signal.SIGKILL if self._cancellations > 2 else signal.SIGTERM)

    def wait(self) -> int:
        """Exit status of the agent; 128 + signal if it was killed."""
        code = self._agent.wait()
        return code if code >= 0 else 128 - code
